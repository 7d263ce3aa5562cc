"""A paged token lies in row `table[position // block] * block + position % block` of its sequence's block table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.engine.arena import Arena
from kvbench.engine.attention.torch_path import Span, attend, spans
from kvbench.engine.types import Batch
from kvbench.paged.blocks import BlockPool


@dataclass(frozen=True, slots=True)
class _Table:
    """A sequence's table, the allocator's own list, and its copy on the device, made anew when the list has grown."""

    blocks: list[int]
    on_device: Tensor


class BlockCache:
    """Device half of the paged backend. Torch's attention wants one sequence's keys side by side, so its blocks are
    copied into a buffer that all sequences and layers reuse; it grows to the longest sequence seen."""

    def __init__(self, arena: Arena, allocator: BlockPool) -> None:
        self._arena = arena
        self._allocator = allocator
        self._size = allocator.block_size
        self._rows = arena.rows // self._size * self._size  # those of whole blocks
        self._spans: list[Span] = []
        self._tables: dict[int, _Table] = {}
        self._writes = torch.empty(0, dtype=torch.int64)
        self._buffers = [arena.k[0].new_empty(0), arena.v[0].new_empty(0)]

    def begin(self, batch: Batch) -> None:
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
        self._reserve_buffers(max((len(table.blocks) for table in self._tables.values()), default=0))

    def _reserve_buffers(self, blocks: int) -> None:
        shape = self._arena.shape
        if self._buffers[0].shape[0] < blocks:
            self._buffers = [
                buffer.new_empty(blocks, self._size * shape.kv_heads * shape.head_dim) for buffer in self._buffers
            ]

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
        shape = self._arena.shape
        row = shape.kv_heads * shape.head_dim

        def rows(span: Span, skip: int) -> tuple[Tensor, Tensor]:
            first = skip // self._size
            blocks = self._tables[span.sequence.id].on_device[first : -(-span.keys // self._size)]
            mine = slice(skip - first * self._size, span.keys - first * self._size)
            found = []
            for arena, buffer in zip((self._arena.k[layer], self._arena.v[layer]), self._buffers, strict=True):
                side_by_side = buffer[: len(blocks)]
                torch.index_select(arena[: self._rows].view(-1, self._size * row), 0, blocks, out=side_by_side)
                found.append(side_by_side.view(-1, shape.kv_heads, shape.head_dim)[mine])
            return found[0], found[1]

        return attend(q, self._spans, rows, scale=scale, window=window, softcap=softcap, sinks=sinks)
