"""A small problem for each attention path of a device, against attention's definition: what `kvbench doctor` runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.engine.attention.paths import PATHS, RANGES_ONLY, make_path

if TYPE_CHECKING:
    import torch

    from kvbench.engine.attention.layout import PathMaker

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
    from kvbench.engine.attention.drawn import draw_layout
    from kvbench.engine.attention.reference import attention

    draw = torch.Generator().manual_seed(1)
    drawn = draw_layout(device, LENGTHS, QUERIES, BLOCK if paged else None)
    arena = Arena(KVShape(1, KV_HEADS, DIM), drawn.rows, dtype, device)
    q = torch.randn(sum(QUERIES), HEADS, DIM, generator=draw).to(dtype)
    k, v = (torch.randn(sum(LENGTHS), KV_HEADS, DIM, generator=draw).to(dtype) for _ in range(2))
    starts = [sum(LENGTHS[:place]) for place in range(len(LENGTHS))]
    parts = list(zip(LENGTHS, QUERIES, starts, strict=True))
    new = torch.cat([torch.arange(start + length - queries, start + length) for length, queries, start in parts])
    old = torch.ones(sum(LENGTHS), dtype=torch.bool).index_fill(0, new, False)
    arena.write(0, drawn.places[old].to(device), k[old].to(device), v[old].to(device))
    path = make(arena, max(LENGTHS) + BLOCK)
    tensors = (q.to(device), k[new].to(device), v[new].to(device))
    out = path.attend(drawn.layout, 0, *tensors, scale=DIM**-0.5, window=None, softcap=None, sinks=None)
    exact = []
    for part, (length, _, start) in zip(q.split(list(QUERIES)), parts, strict=True):
        whole = slice(start, start + length)
        exact.append(attention(part, k[whole], v[whole], scale=DIM**-0.5))
    return float((out.cpu().double() - torch.cat(exact)).abs().max())
