"""A paged token lies in row `table[position // block] * block + position % block` of its sequence's block table."""

from __future__ import annotations

from torch import Tensor

from kvbench.engine.arena import Arena
from kvbench.engine.attention.layout import BlockTables, Layout, PathMaker, paged
from kvbench.engine.attention.torch_path import TorchPath
from kvbench.engine.types import Batch
from kvbench.paged.blocks import BlockPool


class BlockCache:
    """Device half of the paged backend. `longest` is the most tokens a sequence may have."""

    def __init__(self, arena: Arena, allocator: BlockPool, longest: int, path: PathMaker = TorchPath) -> None:
        size = allocator.block_size
        self._arena = arena
        self._allocator = allocator
        self._tables = BlockTables(size, arena.k[0].device)
        self._path = path(arena, -(-longest // size) * size)
        self._layout: Layout | None = None

    def begin(self, batch: Batch) -> None:
        self._arena.move(batch.moves)
        self._layout = paged(batch, self._tables, [*map(self._allocator.table, batch.sequences)])

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert self._layout is not None, "begin comes first"
        return self._path.attend(self._layout, layer, q, k, v, scale=scale, window=window, softcap=softcap, sinks=sinks)
