"""What the host does for a decode step, apart from the device: schedule, allocate, prepare (inputs and layout), commit.

Every sequence decodes; the model is a stand-in that answers at once. Printed for both backends, by how many run and how
long their contexts are: `make bench`. Not a test: it asserts nothing.

    python tests/bench_host.py [--steps 120]
"""

from __future__ import annotations

import argparse
import gc
import time
from statistics import median, quantiles
from typing import Any, cast

import torch
from torch import Tensor

from kvbench.contiguous.cache import SlotCache
from kvbench.contiguous.slots import Slots
from kvbench.engine.arena import Arena, KVShape
from kvbench.engine.engine import Engine
from kvbench.engine.interfaces import Allocator, Cache
from kvbench.engine.model import BoundModel
from kvbench.engine.runner import ModelRunner
from kvbench.engine.scheduler import Limits, Scheduler
from kvbench.engine.types import Request
from kvbench.paged.blocks import BlockPool
from kvbench.paged.cache import BlockCache

CPU = torch.device("cpu")
BLOCK = 16
RUNNING, CONTEXTS = (16, 256, 1024), (128, 4096)


class Instant:
    """A model that has its answer already."""

    device = CPU

    def forward(self, ids: Tensor, positions: Tensor, keep: Tensor, cache: Cache) -> Tensor:
        return torch.zeros(len(keep), 1)


def engine(backend: str, running: int, context: int, steps: int) -> Engine:
    """One with so many requests in it, all past their prompts."""
    longest = context + steps + BLOCK
    rows = running * -(-longest // BLOCK) * BLOCK
    arena = Arena(KVShape(1, 1, 1), rows + BLOCK, torch.float32, CPU)
    allocator: Allocator
    cache: Cache
    if backend == "paged":
        allocator = pool = BlockPool(rows, BLOCK)
        cache = BlockCache(arena, pool, longest)
    else:
        allocator = slots = Slots(rows, longest)
        cache = SlotCache(arena, slots, longest)
    limits = Limits(longest, max_batched_tokens=running * context, max_sequences=running)
    runner = ModelRunner(cast("BoundModel", Instant()), cache)
    made = Engine(allocator, runner, limits, scheduler=Scheduler(allocator, limits))
    for number in range(running):
        made.submit(Request(number, (1,) * context, steps + 8))
    return made


def step(one: Engine, now_s: float) -> float:
    """Seconds of the host for one step."""
    started_s = time.perf_counter()
    one.launch(now_s)
    one.collect()
    one.commit(now_s + 1)
    return time.perf_counter() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    steps: int = parser.parse_args().steps
    torch.set_num_threads(1)
    print(f"host time of a decode step, ms: median of {steps} (p95)")
    for running in RUNNING:
        for context in CONTEXTS:
            cells: list[str] = []
            for backend in ("contiguous", "paged"):
                one: Any = engine(backend, running, context, steps)
                step(one, 0.0)  # all prompts at once
                gc.collect()
                found = [step(one, float(number)) * 1e3 for number in range(1, steps)]
                cells.append(f"{backend} {median(found):6.3f} ({quantiles(found, n=20)[-1]:.3f})")
            print(f"{running:5} running, {context:5} tokens each: " + ", ".join(cells), flush=True)


if __name__ == "__main__":
    main()
