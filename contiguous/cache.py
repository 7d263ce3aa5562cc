"""A contiguous token lies in row `base + position`: one number a sequence is all the device has to know."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.contiguous.slots import Slots
from kvbench.engine.arena import Arena
from kvbench.engine.attention.torch_path import Span, attend, spans
from kvbench.engine.types import Batch


class SlotCache:
    """Device half of the contiguous backend; keys and values are read where they lie."""

    def __init__(self, arena: Arena, allocator: Slots) -> None:
        self._arena = arena
        self._allocator = allocator
        self._spans: list[Span] = []
        self._writes = torch.empty(0, dtype=torch.int64)

    def begin(self, batch: Batch) -> None:
        self._spans = spans(batch)
        rows: list[int] = []
        for chunk in batch.chunks:
            base = self._allocator.base(chunk.sequence)
            rows.extend(range(base + chunk.start, base + chunk.end))
        self._writes = torch.tensor(rows, device=self._arena.k[0].device)

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
        keys, values = self._arena.k[layer], self._arena.v[layer]

        def rows(span: Span, skip: int) -> tuple[Tensor, Tensor]:
            base = self._allocator.base(span.sequence)
            mine = slice(base + skip, base + span.keys)
            return keys[mine], values[mine]

        return attend(q, self._spans, rows, scale=scale, window=window, softcap=softcap, sinks=sinks)
