"""Backends put together for tests on a device: clean ones over NaN-filled memory, and broken ones that must be caught."""

from __future__ import annotations

import math
from collections.abc import Sequence as Listing

import torch
from torch import Tensor

from kvbench.contiguous.cache import SlotCache
from kvbench.contiguous.slots import Slots
from kvbench.engine.arena import Arena, KVShape
from kvbench.engine.clock import WallClock
from kvbench.engine.engine import Engine, serve
from kvbench.engine.model import BoundModel
from kvbench.engine.runner import ModelRunner
from kvbench.engine.scheduler import Limits
from kvbench.engine.types import Request, Sequence
from kvbench.metrics.records import Run
from kvbench.paged.blocks import BlockPool
from kvbench.paged.cache import BlockCache
from kvbench.workloads.load import ClosedLoop


class InterruptedSlots(Slots):
    """Contiguous memory that pretends to be short: every `every`-th time a running sequence asks, it is refused. Whole
    ranges never grow, so nothing else preempts a contiguous sequence."""

    def __init__(self, pool_tokens: int, max_model_len: int, policy: str = "max", *, every: int) -> None:
        super().__init__(pool_tokens, max_model_len, policy)
        self._every = every
        self._asked = 0

    def reserve(self, sequence: Sequence, rows: int) -> bool:
        if sequence.computed:
            self._asked += 1
            if self._asked % self._every == 0:
                return False
        return super().reserve(sequence, rows)


class MisplacedSlots(Slots):
    """From its `good`-th look-up on, every range seems to begin one row later than it does."""

    good = 200

    def base(self, sequence: Sequence) -> int:
        self.good -= 1
        return super().base(sequence) + (self.good < 0)


class MisplacedBlocks(BlockPool):
    """From its `good`-th look-up on, the first entry of every table names the block after the right one."""

    good = 40

    def table(self, sequence: Sequence) -> list[int]:
        self.good -= 1
        first, *others = super().table(sequence)
        return [first % self.blocks + (1 if self.good < 0 else 0), *others] if self.good < 0 else [first, *others]


class SlippingArena(Arena):
    """Stores the first token of every batch one row too far, in one layer."""

    def write(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        if layer == 1:
            rows = rows.clone()
            rows[0] += 1
        super().write(layer, rows, k, v)


def arena_for(
    allocator: Slots | BlockPool, shape: KVShape, dtype: torch.dtype, fill: float = math.nan, kind: type[Arena] = Arena
) -> Arena:
    """The allocator's memory on the CPU, the padding block or one spare row included."""
    padding = allocator.block_size if isinstance(allocator, BlockPool) else 1
    return kind(shape, allocator.pool_tokens + padding, dtype, torch.device("cpu"), fill=fill)


def cache_for(allocator: Slots | BlockPool, arena: Arena) -> SlotCache | BlockCache:
    """The device half that belongs to the allocator."""
    return BlockCache(arena, allocator) if isinstance(allocator, BlockPool) else SlotCache(arena, allocator)


def answer(
    model: BoundModel,
    allocator: Slots | BlockPool,
    prompts: Listing[Listing[int]],
    *,
    new_tokens: int,
    limits: Limits,
    arena: Arena | None = None,
) -> Run:
    """Serve all prompts at once, each for exactly `new_tokens` tokens, which the records keep."""
    requests = [
        Request(number, tuple(prompt), new_tokens, output_tokens=new_tokens) for number, prompt in enumerate(prompts)
    ]
    cache = cache_for(allocator, arena or arena_for(allocator, model.kv, model.dtype))
    engine = Engine(allocator, ModelRunner(model, cache), limits, save_tokens=True)
    return serve(ClosedLoop(requests, len(requests)), engine, WallClock())
