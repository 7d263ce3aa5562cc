"""A contiguous token lies in row `base + position`: one number a sequence is all the device has to know."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.contiguous.slots import Slots
from kvbench.engine.arena import Arena
from kvbench.engine.attention.torch_path import Span, Staging, attend, spans
from kvbench.engine.types import Batch


class SlotCache:
    """Device half of the contiguous backend. `longest` is the most tokens a sequence may have."""

    def __init__(self, arena: Arena, allocator: Slots, longest: int) -> None:
        self._arena = arena
        self._allocator = allocator
        self._staging = Staging(arena, longest)
        self._spans: list[Span] = []
        self._bases: dict[int, int] = {}
        self._writes = torch.empty(0, dtype=torch.int64)

    def begin(self, batch: Batch) -> None:
        self._spans = spans(batch)
        self._bases = {chunk.sequence.id: self._allocator.base(chunk.sequence) for chunk in batch.chunks}
        rows: list[int] = []
        for chunk in batch.chunks:
            base = self._bases[chunk.sequence.id]
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

        def rows(span: Span, skip: int) -> tuple[Tensor, Tensor]:
            base = self._bases[span.sequence.id]
            return self._staging.copy_rows(layer, base + skip, base + span.keys)

        return attend(q, self._spans, rows, scale=scale, window=window, softcap=softcap, sinks=sinks)
