"""A paged token lies in row `table[position // block] * block + position % block` of its sequence's block table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.engine.arena import Arena
from kvbench.engine.attention.torch_path import Span, Staging, attend, spans
from kvbench.engine.types import Batch
from kvbench.paged.blocks import BlockPool


@dataclass(frozen=True, slots=True)
class _Table:
    """A sequence's table, the allocator's own list, and its copy on the device, made anew when the list has grown or is
    another."""

    blocks: list[int]
    on_device: Tensor


class BlockCache:
    """Device half of the paged backend. `longest` is the most tokens a sequence may have."""

    def __init__(self, arena: Arena, allocator: BlockPool, longest: int) -> None:
        self._arena = arena
        self._allocator = allocator
        self._size = allocator.block_size
        self._staging = Staging(arena, -(-longest // self._size) * self._size)
        self._spans: list[Span] = []
        self._tables: dict[int, _Table] = {}
        self._writes = torch.empty(0, dtype=torch.int64)

    def begin(self, batch: Batch) -> None:
        self._arena.move(batch.moves)
        device = self._arena.k[0].device
        self._spans = spans(batch)
        known, self._tables = self._tables, {}
        rows: list[int] = []
        for chunk in batch.chunks:
            blocks = self._allocator.table(chunk.sequence)
            table = known.get(chunk.sequence.id)
            if table is None or table.blocks is not blocks or len(table.on_device) != len(blocks):
                table = _Table(blocks, torch.tensor(blocks, device=device))
            self._tables[chunk.sequence.id] = table
            rows.extend(
                blocks[position // self._size] * self._size + position % self._size
                for position in range(chunk.start, chunk.end)
            )
        self._writes = torch.tensor(rows, device=device)

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
        self._arena.write(layer, self._writes, k, v)

        def rows(span: Span, skip: int) -> tuple[Tensor, Tensor]:
            first = skip // self._size
            blocks = self._tables[span.sequence.id].on_device[first : -(-span.keys // self._size)]
            keys, values = self._staging.copy_blocks(layer, blocks, self._size)
            mine = slice(skip - first * self._size, span.keys - first * self._size)
            return keys[mine], values[mine]

        return attend(q, self._spans, rows, scale=scale, window=window, softcap=softcap, sinks=sinks)
