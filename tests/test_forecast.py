"""A load on the cost model: by hand where one can, and held against the engine itself, step by step, virtually."""

from __future__ import annotations

import dataclasses
import random

import pytest
from fakes import make_pool
from test_cost import model

from kvbench.engine.clock import VirtualClock
from kvbench.engine.engine import Engine, serve
from kvbench.engine.scheduler import Limits as EngineLimits
from kvbench.engine.types import Request
from kvbench.planner.forecast import Job, Limits, Replay, Unit, forecast
from kvbench.planner.simulator import SimExecutor
from kvbench.workloads.load import ClosedLoop, OpenLoop


def jobs(count: int, rate: float | None, seed: int = 1) -> list[Job]:
    rng, now, made = random.Random(seed), 0.0, []
    for _ in range(count):
        made.append(Job(now, rng.randint(20, 900), rng.randint(1, 200)))
        now += rng.expovariate(rate) if rate else 0.0
    return made


def test_each_step_is_counted() -> None:
    """Two prompts of 3 tokens in one step, then 4 and 1 more tokens: one a step."""
    done = forecast(Unit(), Limits(), [Job(0.0, 3, 5), Job(0.0, 3, 2)])
    assert [(job.first_s, job.last_s) for job in done.jobs] == [(1.0, 5.0), (1.0, 2.0)]
    assert (done.steps, done.end_s) == (5, 5.0)


def test_a_budget_cuts_prompts_and_a_limit_makes_them_wait() -> None:
    done = forecast(Unit(), Limits(batched_tokens=4), [Job(0.0, 10, 1), Job(0.0, 2, 1)])
    assert [job.first_s for job in done.jobs] == [3.0, 3.0]
    done = forecast(Unit(), Limits(sequences=1), [Job(0.0, 1, 3), Job(0.0, 1, 1)])
    assert [job.first_s for job in done.jobs] == [1.0, 4.0]


def test_prompts_go_alone_where_steps_are_not_mixed() -> None:
    asked = [Job(0.0, 4, 3), Job(1.5, 4, 1)]
    mixed = forecast(Unit(), Limits(), [dataclasses.replace(job) for job in asked])
    alone = forecast(Unit(), Limits(mixed=False), asked)
    assert [job.last_s for job in mixed.jobs] == [3.0, 3.0]
    assert [job.last_s for job in alone.jobs] == [4.0, 3.0]


def test_a_full_pool_preempts_the_latest_and_reserving_makes_it_wait() -> None:
    asked = [Job(0.0, 4, 8), Job(0.0, 4, 8)]
    tight = forecast(Unit(), Limits(pool_tokens=16), [dataclasses.replace(job) for job in asked])
    assert tight.preemptions == 1 and all(job.last_s is not None for job in tight.jobs)
    assert tight.jobs[0].last_s == 8.0 and (tight.jobs[1].last_s or 0) > 8.0
    kept = forecast(Unit(), Limits(pool_tokens=16, reserve=True), asked)
    assert kept.preemptions == 0 and kept.jobs[1].first_s == 9.0


def test_what_fits_no_pool_is_not_waited_for() -> None:
    done = forecast(Unit(), Limits(pool_tokens=10), [Job(0.0, 20, 2), Job(0.0, 2, 2)])
    assert done.jobs[0].first_s is None and done.jobs[1].last_s == 2.0


def test_a_closed_loop_keeps_its_number() -> None:
    done = forecast(Unit(), Limits(), [Job(0.0, 1, 4) for _ in range(6)], concurrency=2)
    assert [job.arrival_s for job in done.jobs] == [0.0, 0.0, 4.0, 4.0, 8.0, 8.0] and done.end_s == 12.0


@pytest.mark.parametrize("users", [None, 8])
@pytest.mark.parametrize("reserve", [False, True])
def test_a_replay_is_the_forecast(users: int | None, reserve: bool) -> None:
    cost, limits = model(), Limits(32, 1024, 12_000, reserve=reserve)
    told = forecast(cost, limits, jobs(80, None), users)
    again = Replay.of(forecast(Unit(), limits, jobs(80, None), users)).times(cost)
    assert again == pytest.approx(told.times(), rel=1e-9)


@pytest.mark.parametrize(("rate", "users"), [(4.0, None), (40.0, None), (None, 6), (None, None)])
def test_it_is_what_the_engine_does_step_by_step(rate: float | None, users: int | None) -> None:
    """The same requests through scheduler, allocator and virtual clock: totals within 2 %, mean TTFT and TPOT too."""
    cost, asked = model(), jobs(120, rate)
    requests = [
        Request(i, tuple(range(1, job.input_tokens + 1)), job.output_tokens, job.output_tokens, job.arrival_s)
        for i, job in enumerate(asked)
    ]
    limits = EngineLimits(2048, max_batched_tokens=1024, max_sequences=64)
    load = ClosedLoop(requests, users) if users else OpenLoop(requests)
    run = serve(load, Engine(make_pool("paged-16", 200_000, 2048), SimExecutor(cost), limits), VirtualClock())
    times = forecast(cost, Limits(64, 1024, 200_000), asked, users).times()
    records = sorted(run.requests, key=lambda record: record.request)
    assert times[2].max() == pytest.approx(max(r.last_s or 0 for r in records), rel=0.02)
    ttft = sum((r.first_s or 0) - r.scheduled_s for r in records) / len(records)
    e2e = sum((r.last_s or 0) - r.scheduled_s for r in records) / len(records)
    assert (times[1] - times[0]).mean() == pytest.approx(ttft, rel=0.05)
    assert (times[2] - times[0]).mean() == pytest.approx(e2e, rel=0.02)
