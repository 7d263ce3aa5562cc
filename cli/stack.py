"""The one composition root: it alone names the backends, and puts allocator, cache, runner, engine, load and clock
together for each cell of a sweep; or load and server, where a server is measured beside them. What is under the engine,
a device or the time that a card would take, is a `Machine`: `cli/owned.py` and `cli/virtual.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from kvbench.contiguous import slots
from kvbench.contiguous.slots import POLICIES, Slots
from kvbench.engine.clock import VirtualClock
from kvbench.engine.engine import Engine, Watch, serve
from kvbench.engine.interfaces import Allocator, Cache, Clock, Executor, Load
from kvbench.engine.scheduler import Limits, Scheduler
from kvbench.engine.static import StaticScheduler
from kvbench.metrics.points import BATCHINGS, PREEMPTIONS, Variant
from kvbench.metrics.records import Run
from kvbench.paged import blocks
from kvbench.paged.blocks import BlockPool
from kvbench.workloads.endpoint import Endpoint

if TYPE_CHECKING:
    from kvbench.engine.arena import Arena
    from kvbench.engine.attention.layout import PathMaker


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How much memory a backend gets and how it may use it, in rows of the arena, `swap_tokens` in rows of host memory.
    What a variant decides (`reserve`, `prefix_caching`) is filled in for each cell. Both backends get the same arena:
    the pool and one padding block."""

    pool_tokens: int
    block_size: int
    max_model_len: int
    reserve: str | None = None
    prefix_caching: bool = False
    swap_tokens: int = 0

    @property
    def arena_rows(self) -> int:
        """Rows of the device's memory: the pool and one padding block."""
        return self.pool_tokens + self.block_size


@dataclass(frozen=True, slots=True)
class Backend:
    """A way to hold memory: who holds which rows, and how the device finds them. `policies` are the fields of a
    `Variant` that it lets one choose, each with its values, the default first. `shares`: rows may have several readers.
    `ranges`: those of a sequence lie side by side.
    `most_at_once(memory, input_tokens, output_tokens)`: how many such sequences it can hold together, each to its end.
    """

    name: str
    make_allocator: Callable[[CacheConfig], Allocator]
    make_cache: Callable[[Arena, Allocator, int, PathMaker], Cache]
    most_at_once: Callable[[CacheConfig, int, int], int]
    policies: Mapping[str, Sequence[str]] = field(default_factory=dict)
    shares: bool = False
    ranges: bool = False


def _slot_cache(arena: Arena, allocator: Allocator, longest: int, path: PathMaker) -> Cache:
    from kvbench.contiguous.cache import SlotCache

    assert isinstance(allocator, Slots)
    return SlotCache(arena, allocator, longest, path)


def _block_cache(arena: Arena, allocator: Allocator, longest: int, path: PathMaker) -> Cache:
    from kvbench.paged.cache import BlockCache

    assert isinstance(allocator, BlockPool)
    return BlockCache(arena, allocator, longest, path)


def _scheduler(batching: str, allocator: Allocator, limits: Limits) -> Scheduler:
    if batching == "continuous":
        return Scheduler(allocator, limits, allocator if isinstance(allocator, BlockPool) else None)
    assert isinstance(allocator, Slots), "the command line refuses static batches on other backends"
    return StaticScheduler(allocator, limits)


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(
            "contiguous",
            lambda config: Slots(config.pool_tokens, config.max_model_len, config.reserve or "max"),
            _slot_cache,
            lambda config, *lengths: slots.most_at_once(
                config.pool_tokens, config.max_model_len, config.reserve or "max", *lengths
            ),
            policies={"reserve": POLICIES, "batching": BATCHINGS},
            ranges=True,
        ),
        Backend(
            "paged",
            lambda config: BlockPool(
                config.pool_tokens,
                config.block_size,
                prefix_caching=config.prefix_caching,
                swap_tokens=config.swap_tokens,
            ),
            _block_cache,
            lambda config, *lengths: blocks.most_at_once(config.pool_tokens, config.block_size, *lengths),
            policies={"prefix_caching": ("off", "on"), "preemption": PREEMPTIONS},
            shares=True,
        ),
    )
}


SERVER = "server"
"""What stands in the place of a backend where a server is measured, which holds its memory in its own way."""


class Machine(Protocol):
    """What serves the batches of a sweep here."""

    def begin(self, backend: Backend, memory: CacheConfig) -> tuple[Allocator, Executor, Clock]:
        """Fresh memory for a cell and what runs on it, in its own time. Raises CellError where it has no room."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Everything that all cells of a sweep share. `machine` is None where only a server is measured, `endpoint` where
    none is."""

    machine: Machine | None
    cache: CacheConfig
    limits: Limits
    save_tokens: bool = False
    endpoint: Endpoint | None = None

    def cache_of(self, variant: Variant) -> CacheConfig:
        """The memory of one variant: only one that swaps gets host memory."""
        swap_tokens = self.cache.swap_tokens if variant.preemption == "swap" else 0
        return replace(
            self.cache, reserve=variant.reserve, prefix_caching=variant.prefix_caching, swap_tokens=swap_tokens
        )

    def run(self, variant: Variant, load: Load, watch: Watch | None = None, *, timeout_s: float = math.inf) -> Run:
        """Serve `load` with a fresh engine and fresh memory, for `timeout_s` at most. Raises CellError where the cell
        cannot run."""
        if variant.backend == SERVER:
            return self._run_server(load, timeout_s)
        assert self.machine is not None, "only a server is measured: nothing else is ready"
        allocator, executor, clock = self.machine.begin(BACKENDS[variant.backend], self.cache_of(variant))
        scheduler = _scheduler(variant.batching, allocator, self.limits)
        engine = Engine(allocator, executor, self.limits, save_tokens=self.save_tokens, scheduler=scheduler)
        with clock if isinstance(clock, VirtualClock) else nullcontext():
            return serve(load, engine, clock, watch, timeout_s=timeout_s)

    def _run_server(self, load: Load, timeout_s: float) -> Run:
        from kvbench.workloads.client import serve_by

        assert self.endpoint is not None, "the command line refuses a server without an address"
        return serve_by(
            load,
            self.endpoint,
            request_timeout_s=self.limits.request_timeout_s,
            timeout_s=timeout_s,
            save_tokens=self.save_tokens,
        )


def shares(variant: Variant) -> bool:
    """Whether rows may have several readers."""
    return variant.backend == SERVER or BACKENDS[variant.backend].shares
