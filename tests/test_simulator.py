"""Predicted time under the same engine: what a step is said to do, and what comes of it in closed form."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from fakes import CACHED_KINDS, KINDS, SWAPPING_KINDS, make_pool, request
from hypothesis import event, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvbench.engine.clock import VirtualClock
from kvbench.engine.engine import Engine, serve
from kvbench.engine.scheduler import Limits, Scheduler
from kvbench.engine.types import Batch, Chunk, Request, Sequence, Steps, Usage, stand_ins
from kvbench.metrics.memory import split
from kvbench.metrics.records import FINISHED, Run
from kvbench.paged.blocks import BlockPool
from kvbench.planner.simulator import SimExecutor
from kvbench.planner.work import StepWork
from kvbench.workloads.load import ClosedLoop, OpenLoop


@dataclass(frozen=True)
class Toy:
    """A step takes `base_s`, and `token_s` for each of its tokens and `read_s` for each that they read."""

    base_s: float = 0.0
    token_s: float = 0.0
    read_s: float = 0.0

    def seconds(self, work: StepWork) -> float:
        return self.base_s + self.token_s * (work.decodes + work.prefill_tokens) + self.read_s * work.context_tokens

    def decode_seconds(self, sequences: int, context_tokens: int, steps: int) -> NDArray[np.float64]:
        contexts = range(context_tokens + sequences, context_tokens + sequences * steps + 1, sequences)
        return np.array([self.seconds(StepWork(sequences, 0, read, read, sequences)) for read in contexts])


class StepByStep:
    """The same executor without its foresight."""

    def __init__(self, executor: SimExecutor) -> None:
        self.launch, self.collect = executor.launch, executor.collect


Cell = tuple[str, int, Limits, list[Request], int | None]


@st.composite
def cells(draw: st.DrawFn) -> Cell:
    """Few long answers in a pool that is often large enough, so that steps follow in which nothing happens."""
    kind = draw(st.sampled_from((*KINDS, *CACHED_KINDS, *SWAPPING_KINDS)))
    timeout_s = draw(st.sampled_from([None, None, 1.0, 4.0]))
    limits = Limits(60, draw(st.integers(4, 80)), draw(st.integers(2, 8)), request_timeout_s=timeout_s)
    requests = [
        request(
            number,
            draw(st.integers(1, 12)),
            draw(st.integers(1, 40)),
            n=draw(st.sampled_from([1, 1, 1, 2])),
            scheduled_s=draw(st.sampled_from([0.0, 0.1, 0.7, 3.0])) * number,
        )
        for number in range(draw(st.integers(1, 7)))
    ]
    users = draw(st.one_of(st.none(), st.integers(1, len(requests))))
    return kind, draw(st.integers(60, 600)) * (8 if kind == "paged-256" else 1), limits, requests, users


@settings(max_examples=300)
@given(cells(), st.sampled_from([math.inf, 2.5, 6.0]))
def test_steps_in_one_go_are_the_same_steps(cell: Cell, timeout_s: float) -> None:
    kind, pool_tokens, limits, requests, users = cell
    runs = []
    for foresight in (True, False):
        pool, executor = make_pool(kind, pool_tokens, 60), SimExecutor(Toy(0.03, 0.007, 0.0001))
        scheduler = Scheduler(pool, limits, pool if isinstance(pool, BlockPool) else None)
        runs_on = executor if foresight else StepByStep(executor)
        engine = Engine(pool, runs_on, limits, scheduler=scheduler, save_tokens=True)
        turns: list[float] = []
        load = OpenLoop(requests) if users is None else ClosedLoop(requests, users)
        runs.append(serve(load, engine, VirtualClock(), lambda _, now_s: turns.append(now_s), timeout_s=timeout_s))  # noqa: B023
        event("in one go" if len(turns) < len(runs[-1].steps) else "one by one")
        assert replace(pool.usage(), cached=0) == Usage(0, 0, pool_tokens)
    split(runs[0])
    assert runs[0] == runs[1]


def test_nobody_is_asked_in_uneventful_steps() -> None:
    """One user, one answer of 1,000 tokens: two turns of the loop, and no step is missing."""
    pool, limits = BlockPool(2000, 16), Limits(2000)
    turns: list[float] = []
    engine = Engine(pool, SimExecutor(Toy(0.5)), limits, scheduler=Scheduler(pool, limits, pool))
    run = serve(ClosedLoop([request(0, 5, 1000)], 1), engine, VirtualClock(), lambda _, now_s: turns.append(now_s))
    assert len(run.steps) == 1000 and turns == [0.5, 500.0]
    assert run.requests[0].token_s == [0.5 * n for n in range(1, 1001)]


def run_on(
    cost: Toy, requests: list[Request], *, kind: str = "paged-16", users: int | None = None, seats: int = 8
) -> Run:
    limits = Limits(64, max_batched_tokens=64, max_sequences=seats)
    load = OpenLoop(requests) if users is None else ClosedLoop(requests, users)
    return serve(load, Engine(make_pool(kind, 64 * seats, 64), SimExecutor(cost), limits), VirtualClock())


def test_what_a_step_does_is_what_its_record_says() -> None:
    decode = Sequence.of(request(0, 5, 9))
    decode.computed = 5
    decode.emit(7, 0)
    decode.follow(Steps())
    prompt = Sequence.of(request(1, 6, 9))
    prompt.computed = 2
    work = StepWork.of(Batch(0, [Chunk(prompt, 2, 6, True)], decodes=[decode], context=6))
    assert work == StepWork(1, 4, 6 + (3 + 4 + 5 + 6), 6 + 6, 2)
    for seed in range(3):
        asked = [request(n, 3 + 7 * n % 20, 1 + 5 * n % 12) for n in range(12)]
        seen: list[StepWork] = []

        class Watching(Toy):
            def seconds(self, work: StepWork) -> float:
                seen.append(work)  # noqa: B023
                return 0.5

        run = run_on(Watching(), asked, users=3 + seed)
        assert [(w.decodes, w.prefill_tokens, w.attended_pairs, w.context_tokens, w.sampled_tokens) for w in seen] == [
            (s.decode_tokens, s.prefill_tokens, s.attended_pairs, s.context_tokens, s.sampled_tokens) for s in run.steps
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_one_user_waits_for_each_step_in_turn(kind: str) -> None:
    run = run_on(Toy(0.25, 0.125), [request(0, 6, 4), request(1, 2, 3)], kind=kind, users=1)
    first, second = run.requests
    assert first.token_s == [1.0, 1.375, 1.75, 2.125] and second.scheduled_s == 2.125
    assert second.token_s == [2.625, 3.0, 3.375]
    assert run.end_s == 3.375 and [step.host_s for step in run.steps] == [0.0] * len(run.steps)


def test_stand_ins_are_never_equal_by_chance() -> None:
    sequences = [Sequence.of(request(n, 4, 4, n=2), sample=sample) for n in range(20) for sample in range(2)]
    tokens = [token for sequence in sequences for token in stand_ins(sequence, 4, 54)]
    assert len(set(tokens)) == len(tokens) and max(tokens) < 0 and min(tokens) >= -(2**63)


def test_tokens_and_times_are_conserved() -> None:
    """Every token asked for comes once; mean users in the system = rate x mean stay (Little), exactly."""
    asked = [request(n, 1 + n % 9, 1 + n % 7, scheduled_s=n * 0.3) for n in range(200)]
    run = run_on(Toy(0.05, 0.01), asked)
    assert [record.output_tokens for record in run.requests] == [one.output_tokens for one in asked]
    assert sum(step.sampled_tokens for step in run.steps) == sum(record.output_tokens for record in run.requests)
    assert all(record.status == FINISHED for record in run.requests)
    moments = sorted(
        [(record.scheduled_s, 1) for record in run.requests] + [(record.last_s or 0.0, -1) for record in run.requests]
    )
    area = math.fsum(
        (later - at_s) * sum(step for _, step in moments[: i + 1])
        for i, ((at_s, _), (later, _)) in enumerate(itertools.pairwise(moments))
    )
    assert area == pytest.approx(math.fsum((r.last_s or 0.0) - r.scheduled_s for r in run.requests), rel=1e-12)
