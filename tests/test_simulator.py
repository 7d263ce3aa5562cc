"""Predicted time under the same engine: what a step is said to do, and what comes of it in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from fakes import KINDS, make_pool, request

from kvbench.engine.clock import VirtualClock
from kvbench.engine.engine import Engine, serve
from kvbench.engine.scheduler import Limits
from kvbench.engine.types import Batch, Chunk, Request, Sequence
from kvbench.metrics.records import FINISHED, Run
from kvbench.planner.simulator import SimExecutor, stand_in
from kvbench.planner.work import StepWork
from kvbench.workloads.load import ClosedLoop, OpenLoop


@dataclass(frozen=True)
class Toy:
    """A step takes `base_s`, and `token_s` for each of its tokens."""

    base_s: float = 0.0
    token_s: float = 0.0

    def seconds(self, work: StepWork) -> float:
        return self.base_s + self.token_s * (work.decodes + work.prefill_tokens)


def run_on(
    cost: Toy, requests: list[Request], *, kind: str = "paged-16", users: int | None = None, seats: int = 8
) -> Run:
    limits = Limits(64, max_batched_tokens=64, max_sequences=seats)
    load = OpenLoop(requests) if users is None else ClosedLoop(requests, users)
    return serve(load, Engine(make_pool(kind, 64 * seats, 64), SimExecutor(cost), limits), VirtualClock())


def test_what_a_step_does_is_what_its_record_says() -> None:
    decode = Sequence.of(request(0, 5, 9))
    decode.computed = 5
    decode.tokens.append(7)
    prompt = Sequence.of(request(1, 6, 9))
    prompt.computed = 2
    work = StepWork.of(Batch(0, (Chunk(decode, 5, 6, True), Chunk(prompt, 2, 6, True))))
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
    tokens = [stand_in(sequence, position) for sequence in sequences for position in range(50)]
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
        for i, ((at_s, _), (later, _)) in enumerate(zip(moments, moments[1:], strict=False))
    )
    assert area == pytest.approx(math.fsum((r.last_s or 0.0) - r.scheduled_s for r in run.requests), rel=1e-12)
