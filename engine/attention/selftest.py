"""A small problem for each attention path of a device, against attention's definition: what `kvbench doctor` runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.engine.attention.paths import PATHS, RANGES_ONLY, make_path

if TYPE_CHECKING:
    import torch

    from kvbench.engine.attention.layout import Layout, PathMaker

HEADS, KV_HEADS, DIM = 6, 2, 64
LENGTHS = (1, 37, 20)
QUERIES = (1, 9, 20)
"""Three sequences at once: one that begins, one in the middle of its prompt, one whole prompt."""
BLOCK = 4
TOLERANCE = {"float32": 1e-4, "bfloat16": 4e-2, "float16": 5e-3}
"""Of values around 1; far above rounding, far below what a wrong row or mask does."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`wrong` where it gave wrong numbers or failed; `said` says by how much they are off, or why it cannot be had."""

    path: str
    available: bool
    wrong: bool
    said: str


def try_paths(device: torch.device, dtype: torch.dtype) -> list[Outcome]:
    """Every path there is for the device, over both address maps."""
    found = []
    for name in PATHS:
        path = make_path(name, device, dtype, DIM)
        if isinstance(path, str):
            found.append(Outcome(name, available=False, wrong=False, said=path))
            continue
        try:
            error = max(
                _error(path, device, dtype, paged) for paged in ((False,) if name in RANGES_ONLY else (False, True))
            )
        except Exception as failure:
            said = f"it failed: {type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
            found.append(Outcome(name, available=True, wrong=True, said=said))
            continue
        wrong = not error <= TOLERANCE[str(dtype).removeprefix("torch.")]
        found.append(Outcome(name, available=True, wrong=wrong, said=f"off by {error:.1e} at most"))
    return found


def _error(make: PathMaker, device: torch.device, dtype: torch.dtype, paged: bool) -> float:
    """The largest difference from the definition."""
    import torch

    from kvbench.engine.arena import Arena, KVShape
    from kvbench.engine.attention.reference import attention

    draw = torch.Generator().manual_seed(1)
    rows = 2 * sum(-(-length // BLOCK) * BLOCK for length in LENGTHS)
    arena = Arena(KVShape(1, KV_HEADS, DIM), rows, dtype, device)
    layout, places = _layout(device, rows, paged)
    q = torch.randn(sum(QUERIES), HEADS, DIM, generator=draw).to(dtype)
    k, v = (torch.randn(sum(LENGTHS), KV_HEADS, DIM, generator=draw).to(dtype) for _ in range(2))
    new = torch.cat([torch.arange(length - queries, length) + start for length, queries, start in _each(LENGTHS)])
    old = torch.ones(sum(LENGTHS), dtype=torch.bool).index_fill(0, new, False)
    arena.write(0, places[old].to(device), k[old].to(device), v[old].to(device))
    how = {"scale": DIM**-0.5, "window": None, "softcap": None, "sinks": None}
    out = make(arena, max(LENGTHS) + BLOCK).attend(
        layout,
        0,
        q.to(device),
        k[new].to(device),
        v[new].to(device),
        **how,
    )
    exact = []
    for place, (length, queries, start) in enumerate(_each(LENGTHS)):
        first = sum(QUERIES[:place])
        whole = slice(start, start + length)
        exact.append(attention(q[first : first + queries], k[whole], v[whole], scale=DIM**-0.5))
    return float((out.cpu().double() - torch.cat(exact)).abs().max())


def _each(lengths: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Length, queries and the place of the first token of each sequence, all tokens side by side."""
    return [(length, QUERIES[i], sum(lengths[:i])) for i, length in enumerate(lengths)]


def _layout(device: torch.device, rows: int, paged: bool) -> tuple[Layout, torch.Tensor]:
    """Ranges with gaps between them, or blocks in an odd order; and the row of every token."""
    import numpy as np
    import torch

    from kvbench.engine.attention.layout import Layout

    width = -(-max(LENGTHS) // BLOCK)
    tables = torch.zeros(len(LENGTHS), width, dtype=torch.int32)
    free = list(range(1, rows // BLOCK))[::-2] + list(range(1, rows // BLOCK))[::2]
    bases, places, row = [], [], 3
    for place, length in enumerate(LENGTHS):
        blocks = [free.pop() for _ in range(-(-length // BLOCK))]
        tables[place, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        position = torch.arange(length)
        places.append(tables[place, position // BLOCK] * BLOCK + position % BLOCK if paged else row + position)
        bases.append(row)
        row += length + 1
    every = torch.cat(places).long()
    writes = torch.cat([every[start + length - queries : start + length] for length, queries, start in _each(LENGTHS)])
    address_map = (
        {"tables": tables.to(device), "block_size": BLOCK} if paged else {"bases": torch.tensor(bases).to(device)}
    )
    layout = Layout(
        starts=torch.tensor(np.cumsum([0, *QUERIES]), dtype=torch.int32).to(device),
        ends=torch.tensor(LENGTHS, dtype=torch.int32).to(device),
        writes=writes.to(device),
        queries=np.array(QUERIES),
        keys=np.array(LENGTHS),
        longest_queries=max(QUERIES),
        longest_keys=max(LENGTHS),
        **address_map,
    )
    return layout, every
