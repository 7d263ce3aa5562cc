"""A contiguous token lies in row `base + position`: one number a sequence is all the device has to know."""

from __future__ import annotations

from torch import Tensor

from kvbench.contiguous.slots import Slots
from kvbench.engine.arena import Arena
from kvbench.engine.attention.layout import Layout, PathMaker, contiguous
from kvbench.engine.attention.torch_path import TorchPath
from kvbench.engine.types import Batch


class SlotCache:
    """Device half of the contiguous backend. `longest` is the most tokens a sequence may have."""

    def __init__(self, arena: Arena, allocator: Slots, longest: int, path: PathMaker = TorchPath) -> None:
        self._device = arena.k[0].device
        self._allocator = allocator
        self._path = path(arena, longest)
        self._layout: Layout | None = None

    def begin(self, batch: Batch) -> None:
        self._layout = contiguous(batch, [*map(self._allocator.base, batch.sequences)], self._device)

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
