"""Layouts drawn at random, as a busy server's would be: blocks in no order, ranges with gaps between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from kvbench.engine.attention.layout import Layout


@dataclass(frozen=True, slots=True)
class Drawn:
    """A layout, the arena `rows` that it needs, and the row of every token, sequence after sequence (int64)."""

    layout: Layout
    rows: int
    places: torch.Tensor


def draw_layout(
    device: torch.device, keys: Sequence[int], queries: Sequence[int], block_size: int | None, seed: int = 0
) -> Drawn:
    """Sequences of so many keys, of which the last `queries` are new; in blocks of a size, or in ranges where None."""
    import numpy as np
    import torch

    from kvbench.engine.attention.layout import Layout

    lengths, new = np.array(keys), np.array(queries)
    sequence = np.arange(len(lengths)).repeat(lengths)
    position = np.arange(lengths.sum()) - (lengths.cumsum() - lengths)[sequence]
    address_map: dict[str, Any]
    if block_size is None:
        bases = 3 + np.concatenate([[0], (lengths + 1).cumsum()[:-1]])
        places, rows = bases[sequence] + position, int(bases[-1] + lengths[-1] + 1)
        address_map = {"bases": torch.from_numpy(bases).to(device)}
    else:
        counts = -(-lengths // block_size)
        free = np.random.default_rng(seed).permutation(np.arange(1, counts.sum() + 1))
        tables = np.zeros((len(lengths), counts.max()), dtype=np.int32)
        tables[np.arange(counts.max()) < counts[:, None]] = free
        places = tables[sequence, position // block_size].astype(np.int64) * block_size + position % block_size
        rows = int(counts.sum() + 1) * block_size
        address_map = {"tables": torch.from_numpy(tables).to(device), "block_size": block_size}
    written = places[position >= (lengths - new)[sequence]]
    layout = Layout(
        starts=torch.from_numpy(np.concatenate([[0], new.cumsum()]).astype(np.int32)).to(device),
        ends=torch.from_numpy(lengths.astype(np.int32)).to(device),
        writes=torch.from_numpy(written).to(device),
        queries=new,
        keys=lengths,
        longest_queries=int(new.max()),
        longest_keys=int(lengths.max()),
        **address_map,
    )
    return Drawn(layout, rows, torch.from_numpy(places))
