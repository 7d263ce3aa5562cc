"""How much faster than real time one core simulates an 8B model on an H100: `make bench`.

The engine, the allocators and the loads are those of a sweep, the step times the shipped ones. Not a test: it asserts
nothing and prints what it measured.

    python tests/bench_simulator.py [--repeats 5] [--requests 2000]
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from statistics import median

from kvbench.contiguous.slots import Slots
from kvbench.engine.clock import VirtualClock
from kvbench.engine.engine import Engine, serve
from kvbench.engine.scheduler import Limits, Scheduler
from kvbench.engine.shapes import find_shape
from kvbench.engine.types import Request
from kvbench.paged.blocks import BlockPool
from kvbench.planner.catalog import find_card
from kvbench.planner.simulator import SimExecutor
from kvbench.planner.steps import step_cost
from kvbench.workloads.load import ClosedLoop

POOL_TOKENS, BLOCK = 420_905, 16
"""What an H100 leaves for Llama-3.1-8B in bfloat16."""


@dataclass(frozen=True, slots=True)
class Job:
    """So many users who always want something, each prompt and answer of one length."""

    name: str
    users: int
    input_tokens: int
    output_tokens: int
    aim: int


JOBS = (Job("saturated", 256, 512, 128, 300), Job("decoding", 64, 128, 1024, 1000))


def simulate(job: Job, backend: str, requests: int) -> tuple[float, float, int]:
    """Simulated seconds, seconds of CPU and steps of a run."""
    card, shape = find_card("h100-sxm"), find_shape("Llama-3.1-8B")
    assert shape is not None
    longest = job.input_tokens + job.output_tokens
    pool = BlockPool(POOL_TOKENS, BLOCK) if backend == "paged" else Slots(POOL_TOKENS, longest)
    limits = Limits(longest, max_sequences=job.users)
    scheduler = Scheduler(pool, limits, pool if isinstance(pool, BlockPool) else None)
    executor = SimExecutor(step_cost(card, shape, "bfloat16", 1).cost)
    text = tuple(range(job.input_tokens))
    asked = [Request(number, text, job.output_tokens, job.output_tokens) for number in range(requests)]
    load, engine = ClosedLoop(asked, job.users), Engine(pool, executor, limits, scheduler=scheduler)
    began_s = time.process_time()
    with VirtualClock() as clock:
        run = serve(load, engine, clock)
    return run.end_s, time.process_time() - began_s, len(run.steps)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how fast the simulator is.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=2000)
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"Llama-3.1-8B on a virtual H100, one core, {asked.repeats} repeats; load average {load:.1f}")
    print(f"{'':24}{'x real time':>12}{'least':>8}{'most':>8}{'us a step':>11}{'aim':>7}")
    for job in JOBS:
        for backend in ("paged", "contiguous"):
            runs = [simulate(job, backend, asked.requests) for _ in range(asked.repeats)]
            speeds = sorted(simulated_s / cpu_s for simulated_s, cpu_s, _ in runs)
            step_us = median(cpu_s / steps * 1e6 for _, cpu_s, steps in runs)
            print(
                f"{job.name:12}{backend:12}{median(speeds):12.0f}{speeds[0]:8.0f}{speeds[-1]:8.0f}"
                f"{step_us:11.1f}{job.aim:7}"
            )


if __name__ == "__main__":
    main()
