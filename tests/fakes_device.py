"""Backends put together for tests on a device, over NaN-filled memory; and ways to break one that must be noticed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import replace
from typing import TypeVar

import torch
from fakes import asked_in_every_step
from torch import Tensor

from kvbench.contiguous.cache import SlotCache
from kvbench.contiguous.slots import Slots
from kvbench.engine.arena import Arena, KVShape
from kvbench.engine.attention.layout import PathMaker
from kvbench.engine.attention.torch_path import TorchPath
from kvbench.engine.clock import WallClock
from kvbench.engine.engine import Engine, serve
from kvbench.engine.interfaces import Cache
from kvbench.engine.model import BoundModel
from kvbench.engine.runner import ModelRunner
from kvbench.engine.scheduler import Limits, Scheduler
from kvbench.engine.sequence import Sequence
from kvbench.engine.types import GREEDY, Batch, Request, Sampling
from kvbench.metrics.records import Run
from kvbench.paged.blocks import BlockPool
from kvbench.paged.cache import BlockCache
from kvbench.workloads.load import ClosedLoop

AnyAllocator = TypeVar("AnyAllocator", bound=Slots | BlockPool)


def interrupted(allocator: AnyAllocator, fails: Callable[[int], bool]) -> AnyAllocator:
    """`allocator`, but the n-th time (from 1) that a running sequence asks for rows it is refused where `fails(n)`: the
    one way to preempt a contiguous sequence, whose range never has to grow."""
    reserve, asked = asked_in_every_step(allocator).reserve, itertools.count(1)

    def sometimes(sequence: Sequence, rows: int) -> bool:
        return not (sequence.computed and fails(next(asked))) and reserve(sequence, rows)

    allocator.reserve = sometimes  # type: ignore[method-assign]
    return allocator


class MisplacedSlots(Slots):
    """After `good` look-ups every range seems to begin one row later than it does."""

    good = 100

    def base(self, sequence: Sequence) -> int:
        self.good -= 1
        return super().base(sequence) + (self.good < 0)


class MisplacedBlocks(BlockPool):
    """After `good` look-ups the first entry of every table names the block after the right one."""

    good = 20

    def table(self, sequence: Sequence) -> list[int]:
        self.good -= 1
        first, *others = super().table(sequence)
        return [first % self.blocks + 1 if self.good < 0 else first, *others]


class SlippingArena(Arena):
    """In its last layer, the first token of every batch is stored one row too far."""

    def write(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        if layer == self.shape.layers - 1:
            rows = rows.clone()
            rows[0] += 1
        super().write(layer, rows, k, v)


class ForgetfulCache:
    """Serves attention without one of its options, which it notes in `seen`."""

    def __init__(self, cache: Cache, option: str) -> None:
        self._cache = cache
        self._option = option
        self.seen: list[object] = []

    def begin(self, batch: Batch) -> None:
        self._cache.begin(batch)

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
        options = {"window": window, "softcap": softcap, "sinks": sinks}
        self.seen.append(options.pop(self._option))
        return self._cache.attend(layer, q, k, v, scale=scale, **options)  # type: ignore[arg-type]


def arena_for(
    allocator: Slots | BlockPool,
    shape: KVShape,
    dtype: torch.dtype = torch.float32,
    *,
    fill: float = math.nan,
    host_rows: int = 0,
    kind: type[Arena] = Arena,
) -> Arena:
    """The allocator's memory on the CPU, and the padding block or one row more; `host_rows` as swap space."""
    padding = allocator.block_size if isinstance(allocator, BlockPool) else 1
    rows = allocator.pool_tokens + padding
    return kind(shape, rows, dtype, torch.device("cpu"), host_rows=host_rows, fill=fill)


def cache_for(allocator: Slots | BlockPool, arena: Arena, path: PathMaker = TorchPath) -> SlotCache | BlockCache:
    """The device half that belongs to the allocator."""
    longest = allocator.pool_tokens
    if isinstance(allocator, BlockPool):
        return BlockCache(arena, allocator, longest, path)
    return SlotCache(arena, allocator, longest, path)


def answer(
    model: BoundModel,
    allocator: Slots | BlockPool,
    prompts: Listing[Listing[int]],
    *,
    new_tokens: int,
    limits: Limits,
    cache: Cache | None = None,
    sampling: Sampling = GREEDY,
    samples: int = 1,
    host_rows: int = 0,
) -> Run:
    """Serve all prompts at once, each for exactly `new_tokens` tokens, which the records keep. All are sampled as
    `sampling` says, each with its own seed, `samples` times."""
    requests = [
        Request(
            number,
            tuple(prompt),
            new_tokens,
            output_tokens=new_tokens,
            sampling=replace(sampling, seed=sampling.seed + number),
            n=samples,
        )
        for number, prompt in enumerate(prompts)
    ]
    if cache is None:
        cache = cache_for(allocator, arena_for(allocator, model.kv, model.dtype, host_rows=host_rows))
    scheduler = Scheduler(allocator, limits, allocator if isinstance(allocator, BlockPool) else None)
    engine = Engine(allocator, ModelRunner(model, cache), limits, save_tokens=True, scheduler=scheduler)
    return serve(ClosedLoop(requests, len(requests)), engine, WallClock())
