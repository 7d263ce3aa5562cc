"""Requests that are given up, at any moment and by whom it may be: nothing leaks, nothing is forgotten, nobody else
notices."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from fakes import (
    CACHED_KINDS,
    KINDS,
    SWAPPING_KINDS,
    VOCABULARY,
    FakeExecutor,
    Pool,
    answer,
    asking,
    make_pool,
    request,
    rows_of,
    serve_on,
)
from hypothesis import event, given, settings
from hypothesis import strategies as st
from test_engine import Cell, cells, check_memory, check_steps, check_times

from kvbench.contiguous.slots import Slots
from kvbench.engine.clock import VirtualClock
from kvbench.engine.engine import Engine, serve
from kvbench.engine.interfaces import Load
from kvbench.engine.scheduler import Limits, Scheduler
from kvbench.engine.static import StaticScheduler
from kvbench.engine.types import Request, Usage
from kvbench.errors import KvbenchError
from kvbench.metrics.memory import split
from kvbench.metrics.records import ABORTED, FAILED, FINISHED, REJECTED, UNFINISHED, RequestRecord, Run
from kvbench.metrics.summary import summarise
from kvbench.paged.blocks import BlockPool
from kvbench.workloads.load import ClosedLoop, OpenLoop

PHASES = ("before the launch", "in flight", "after the commit")


def check_partition(pool: Pool, engine: Engine) -> None:
    """Every row is free or held by a sequence that lives, and by that one alone unless the pool says that it is shared:
    then all who hold it have filled it, or none has."""
    held = Counter[int]()
    filled, empty = set[int](), set[int]()
    ended = engine.scheduler.ended if isinstance(engine.scheduler, StaticScheduler) else []
    for sequence in [*engine.scheduler.running, *ended]:
        if isinstance(pool, Slots):
            rows = rows_of(pool, sequence, max(sequence.computed, pool.asked(sequence)))
        else:
            rows = rows_of(pool, sequence, len(pool.table(sequence)) * pool.block_size)
        held.update(rows)
        filled.update(rows[: 0 if sequence in ended else sequence.computed])
        empty.update(rows[sequence.computed :])
    usage = engine.usage()
    assert usage.saved == sum(held[row] - 1 for row in filled), "a row has two owners"
    assert all(held[row] == 1 for row in filled & empty), "a shared row is not filled for all"
    assert usage.swapped == sum(one.computed for one in engine.scheduler.waiting)
    assert usage.held + usage.free == pool.pool_tokens
    if not isinstance(pool, Slots) or pool.policy == "max":
        assert usage.held == len(held), "rows are held by none that lives"
    assert usage.filled == len(filled)
    assert usage.filled + usage.saved == sum(sequence.computed for sequence in engine.scheduler.running)


class Story:
    """An engine taken through its steps by hand: requests arrive and are aborted when a test says so. `done` are the
    records handed out, in order. In every step the oldest gets on, so that none can go on for ever."""

    def __init__(self, kind: str, pool_tokens: int, limits: Limits, static: bool = False) -> None:
        self.pool = make_pool(kind, pool_tokens, limits.max_model_len)
        self.executor = FakeExecutor(self.pool)
        scheduler = Scheduler(self.pool, limits, self.pool if isinstance(self.pool, BlockPool) else None)
        if static:
            assert isinstance(self.pool, Slots)
            scheduler = StaticScheduler(self.pool, limits)
        self.engine = Engine(self.pool, self.executor, limits, save_tokens=True, scheduler=scheduler)
        self.now_s = 0.0
        self.done: list[RequestRecord] = []

    def step(self, *requests: Request, aborts: dict[str, list[int]] | None = None) -> list[bool]:
        """One turn; what `abort` answered, in the order of phases."""
        engine, answers = self.engine, list[bool]()
        for one in requests:
            engine.submit(one)

        def phase(name: str) -> None:
            answers.extend(engine.abort(id) for id in (aborts or {}).get(name, []))
            check_partition(self.pool, engine)

        phase(PHASES[0])
        oldest = next(iter([*engine.scheduler.running, *engine.scheduler.waiting]), None)
        computed = oldest.computed if oldest else 0
        engine.launch(self.now_s)
        if engine.busy:
            phase(PHASES[1])
            done_s = engine.collect()
            assert done_s is not None
            self.now_s = done_s
            engine.commit(self.now_s)
        phase(PHASES[2])
        self.done += engine.take_done()
        if oldest in (*engine.scheduler.running, *engine.scheduler.waiting):  # it has not ended
            assert oldest.computed > computed, "the oldest stands still"
        return answers

    def end(self) -> Run:
        while self.engine.pending:
            self.step()
        run = self.engine.run(self.now_s)
        assert replace(self.pool.usage(), cached=0) == Usage(0, 0, self.pool.pool_tokens), "rows leaked"
        split(run)
        assert sorted(one.request for one in self.done) == sorted({one.request for one in run.requests})
        accepted = [one for one in run.requests if one.status != REJECTED]
        assert len(run.steps) <= sum(one.input_tokens + one.output_tokens - 1 for one in accepted)
        return run


@settings(max_examples=300)
@given(st.data())
def test_aborts_timeouts_and_ends_at_random(data: st.DataObject) -> None:  # sglang#11970, vllm#46283, inference-sim#529
    """Under a prefix cache all prompts are beginnings of one text, with a few tokens of their own behind."""
    kind = data.draw(st.sampled_from((*KINDS, *CACHED_KINDS, *SWAPPING_KINDS, *SWAPPING_KINDS)))
    timeout_s = data.draw(st.sampled_from((None, None, 2**-4, 2**-2)))
    limits = Limits(40, data.draw(st.integers(1, 24)), data.draw(st.integers(1, 6)), request_timeout_s=timeout_s)
    pool_tokens = data.draw(st.integers(28, 90)) * (8 if kind == "paged-256" else 1)
    contiguous = "-" not in kind
    story = Story(kind, pool_tokens, limits, static=contiguous and data.draw(st.booleans()))
    asked: list[Request] = []
    accepted: set[int] = set()
    for _ in range(data.draw(st.integers(1, 30))):
        new: list[Request] = []
        for _ in range(data.draw(st.integers(0, 2))):
            own_end = kind not in ("pow2", "oracle")
            number, length = len(asked) + len(new), data.draw(st.integers(1, 24))
            own = min(length, data.draw(st.integers(0, 4))) if kind.startswith("cached") else length
            new.append(
                asking(
                    number,
                    [*range(length - own), *((number * 31 + position) % VOCABULARY for position in range(own))],
                    16,
                    output_tokens=None if own_end else data.draw(st.integers(1, 16)),
                    stop_ids=frozenset(range(8)) if own_end else frozenset(),
                    scheduled_s=story.now_s,
                    n=data.draw(st.sampled_from((1, 1, 1, 2, 3))),
                )
            )
        asked += new
        ids = st.lists(st.integers(0, max(0, len(asked) - 1)), max_size=2)
        aborts = {phase: data.draw(ids) for phase in PHASES}
        over = {one.request for one in story.done}
        answers = story.step(*new, aborts=aborts)
        for id, living in zip(aborts[PHASES[0]], answers, strict=False):
            assert not (living and id in over)
            accepted |= {id} if living else set()
    run = story.end()
    expected = [(one, sample) for one in asked for sample in range(one.n)]
    assert [(one.request, one.sample) for one in run.requests] == [(one.id, sample) for one, sample in expected]
    for record, (one, sample) in zip(run.requests, expected, strict=True):
        event(f"{record.status}, preempted: {record.preemptions > 0}, answered: {record.output_tokens > 0}")
        event(f"{record.status}, hit: {record.cached_tokens > 0}, swapped: {record.swaps > 0}")
        whole = answer(one, sample=sample)
        assert record.output_token_ids == whole[: record.output_tokens]
        assert record.output_tokens == len(record.token_s)
        if record.status == FINISHED:  # a request that is given up may have samples that had ended
            assert record.output_tokens == len(whole) and (one.n > 1 or record.request not in accepted)
        else:
            assert record.status in (ABORTED, REJECTED, FAILED)
            assert record.status == ABORTED or record.request not in accepted
            too_late = record.reason == f"not finished {timeout_s or 0:g} s after it was scheduled"
            assert (too_late or record.reason == "aborted by its client") == (record.status == ABORTED)
            event(f"too late: {too_late}")
    assert sum(step.sampled_tokens for step in run.steps) == sum(one.output_tokens for one in run.requests)


def statuses(run: Run) -> list[tuple[str, int]]:
    return [(one.status, one.output_tokens) for one in run.requests]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", ["paged-3", "max", "declared"])
def test_an_abort_while_waiting(kind: str, phase: str) -> None:  # vllm#46283
    story = Story(kind, 64, Limits(16, 8, 1))
    assert story.step(request(0, 4, 5), request(1, 4, 5), aborts={phase: [1]}) == [True]
    (done,) = story.done
    assert (done.request, done.status, done.admitted_s, done.first_s, done.token_s) == (1, ABORTED, None, None, [])
    assert statuses(story.end()) == [(FINISHED, 5), (ABORTED, 0)]


@pytest.mark.parametrize("kind", ["paged-3", "max", "declared"])
def test_an_abort_in_the_middle_of_a_prompt_waits_for_the_batch_in_flight(kind: str) -> None:  # vllm#46283
    story = Story(kind, 64, Limits(16, 4))
    story.step(request(0, 10, 3))
    held = story.pool.usage().held
    assert story.step(aborts={PHASES[1]: [0, 0]}) == [True, True]  # check_partition saw its rows in flight
    assert [(step.held_tokens >= held, step.used_tokens) for step in story.engine.steps] == [(True, 4), (True, 8)]
    assert story.pool.usage() == Usage(0, 0, 64)
    run = story.end()
    assert statuses(run) == [(ABORTED, 0)] and {hold.final_tokens for hold in run.holds} == {8}
    assert max(hold.end_step for hold in run.holds) == 2


@pytest.mark.parametrize(
    ("phase", "output", "steps"), [("before the launch", 2, 2), ("in flight", 3, 3), ("after the commit", 3, 3)]
)
@pytest.mark.parametrize("kind", ["paged-3", "max", "declared"])
def test_an_abort_while_decoding_keeps_the_tokens_that_came(kind: str, phase: str, output: int, steps: int) -> None:
    story = Story(kind, 64, Limits(16))
    story.step(request(0, 4, 9))
    story.step()
    story.step(aborts={phase: [0]})
    run = story.end()
    assert statuses(run) == [(ABORTED, output)] and len(run.steps) == steps
    assert run.requests[0].output_token_ids == answer(request(0, 4, 9))[:output]
    row = summarise(run)
    assert (row["requests_aborted"], row["requests_submitted"], row["output_tokens_total"]) == (1, 1, output)
    assert row["ttft_samples"] == 0 and row["ttft_p50_s"] is None and row["attainment"] == 0


def test_an_abort_of_a_preempted_request_leaves_the_queue() -> None:  # vllm#46283
    story = Story("paged-4", 12, Limits(12))
    story.step(*(request(number, 4, 4) for number in range(3)))
    story.step()
    assert [one.id for one in story.engine.scheduler.waiting] == [1, 2]
    assert story.step(aborts={PHASES[1]: [1]}) == [True]
    run = story.end()
    assert statuses(run) == [(FINISHED, 4), (ABORTED, 1), (FINISHED, 4)]
    assert [one.preemptions for one in run.requests] == [0, 1, 1]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("who", [0, 1])
def test_an_abort_leaves_shared_blocks_to_whom_it_shared_them_with(who: int, phase: str) -> None:
    requests = [asking(number, [*range(9), 20 + number], 8) for number in range(3)]
    story = Story("cached-4", 64, Limits(32))
    story.step(requests[0])
    story.step(requests[1])
    assert story.pool.usage().saved == 8
    story.step(aborts={phase: [who]})
    assert story.pool.usage().saved == 0
    story.step(requests[2])
    assert story.pool.usage().saved == 8
    run = story.end()
    expected = [ABORTED if number == who else FINISHED for number in range(3)]
    assert [one.status for one in run.requests] == expected
    assert [one.cached_tokens for one in run.requests] == [0, 8, 8]
    for record, one in zip(run.requests, requests, strict=True):
        assert record.output_token_ids == answer(one)[: record.output_tokens]


def test_an_abort_in_flight_of_an_answer_that_would_have_ended_is_an_abort() -> None:
    story = Story("paged-4", 64, Limits(12))
    assert story.step(request(0, 4, 1), aborts={PHASES[1]: [0]}) == [True]
    assert statuses(story.end()) == [(ABORTED, 1)]


def test_an_abort_of_what_has_ended_or_never_came_does_nothing() -> None:
    story = Story("paged-4", 64, Limits(12))
    aborts = {PHASES[0]: [7], PHASES[2]: [0, 1]}
    assert story.step(request(0, 4, 1), request(1, 20, 1), aborts=aborts) == [False, False, False]
    assert statuses(story.end()) == [(FINISHED, 1), (REJECTED, 0)]


@settings(max_examples=300)
@given(cells(), st.integers(1, 96), st.booleans())
def test_any_workload_with_impatient_clients(cell: Cell, ticks: int, tight: bool) -> None:
    """Every request ends in time or is aborted soon after; the books are as whole as without aborts."""
    timeout_s = ticks * 2 ** (-8 if tight else -6)
    cell = replace(cell, limits=replace(cell.limits, request_timeout_s=timeout_s))
    served = cell.serve()
    check_times(served)
    check_steps(cell, served)
    check_memory(cell, served)
    ends_s = [step.end_s for step in served.run.steps]
    for record, asked in zip(served.run.requests, sorted(cell.requests, key=lambda one: one.id), strict=True):
        event(f"{record.status}, preempted: {record.preemptions > 0}, admitted: {record.admitted_s is not None}")
        status, _, output = cell.fate(asked)
        deadline_s = record.scheduled_s + timeout_s
        assert record.status in (status, ABORTED)
        assert record.output_token_ids == output[: record.output_tokens]
        mine = [step for step, batch in enumerate(served.batches) if any(one.id == record.request for one in batch)]
        assert all(served.run.steps[step].start_s <= deadline_s for step in mine), "it ran on without a client"
        if record.status == FINISHED:
            assert record.last_s is not None and record.last_s <= deadline_s and len(output) == record.output_tokens
        elif record.status == ABORTED:
            assert record.reason == f"not finished {timeout_s:g} s after it was scheduled"
            assert sum(at_s > deadline_s for at_s in record.token_s) <= 1
            assert served.run.end_s > deadline_s or any(end_s > deadline_s for end_s in ends_s)
    assert {one.status for one in served.run.requests} <= {FINISHED, FAILED, REJECTED, ABORTED}


def test_timeouts_by_hand() -> None:
    """One at a time, steps of about 8 ms. Request 0 ends in time. Request 1 waits for it, and its time is over in the
    middle of its answer; request 2's before it was ever admitted; request 3 comes to an idle engine."""
    limits = Limits(64, max_sequences=1, request_timeout_s=0.1)
    requests = [
        request(0, 4, 6),
        request(1, 4, 30),
        request(2, 4, 2, scheduled_s=0.001),
        request(3, 4, 2, scheduled_s=5),
    ]
    run, batches, _ = serve_on(make_pool("paged-4", 64, 64), OpenLoop(requests), limits)
    first, second, third, fourth = run.requests
    assert statuses(run)[::3] == [(FINISHED, 6), (FINISHED, 2)]
    assert second.status == third.status == ABORTED and 3 < second.output_tokens < 10
    assert [at_s > 0.1 for at_s in second.token_s] == [False] * (second.output_tokens - 1) + [True]
    assert third.admitted_s is None and third.token_s == [] and fourth.admitted_s == 5
    assert len(batches) == 6 + second.output_tokens + 2 and first.last_s is not None


def test_a_request_that_meets_a_busy_engine_too_late_is_never_run() -> None:
    """It is due in the middle of a step that lasts longer than its patience."""
    requests = [request(0, 1000, 2), request(1, 4, 2, scheduled_s=0.0005)]
    limits = Limits(2000, request_timeout_s=0.2)
    run, batches, _ = serve_on(make_pool("paged-4", 2048, 2000), OpenLoop(requests), limits)
    assert statuses(run) == [(ABORTED, 1), (ABORTED, 0)] and len(batches) == 1
    assert run.requests[1].admitted_s is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_whose_request_was_aborted_asks_again_at_once(kind: str) -> None:
    requests = [request(number, 4, 16 if number % 2 else 2) for number in range(20)]
    pool = make_pool(kind, 512, 32)
    run, *_ = serve_on(pool, ClosedLoop(requests, 2), Limits(32, request_timeout_s=0.05))
    assert statuses(run)[::2] == [(FINISHED, 2)] * 10
    assert {one.status for one in run.requests[1::2]} == {ABORTED}
    assert [step.sequences for step in run.steps][:-8] == [2] * (len(run.steps) - 8), (
        "a client waited a step for nothing"
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("open_loop", [False, True])
def test_a_run_that_takes_too_long_ends_with_what_it_has(kind: str, open_loop: bool) -> None:
    requests = [request(number, 4, 12, scheduled_s=0.03 * number) for number in range(20)]
    pool = make_pool(kind, 512, 32)
    load: Load = OpenLoop(requests) if open_loop else ClosedLoop(requests, 2)
    engine = Engine(pool, FakeExecutor(pool), Limits(32))
    run = serve(load, engine, VirtualClock(), timeout_s=0.25)
    assert run.steps[-1].start_s < 0.25 <= run.end_s == run.steps[-1].end_s
    assert {one.status for one in run.requests} == {FINISHED, UNFINISHED} and len(run.requests) < 20
    assert all(one.token_s[-1] == run.end_s for one in run.requests if one.status == UNFINISHED and one.token_s)
    assert pool.usage() == Usage(0, 0, pool.pool_tokens)
    split(run)
    row = summarise(run)
    assert row["requests_unfinished"] == load.in_flight  # type: ignore[attr-defined]


def test_a_run_may_end_while_it_waits_for_the_next_request() -> None:
    load, pool = OpenLoop([request(0, 4, 2), request(1, 4, 2, scheduled_s=60)]), make_pool("paged-4", 64, 32)
    run = serve(load, Engine(pool, FakeExecutor(pool), Limits(32)), VirtualClock(), timeout_s=10)
    assert (run.end_s, statuses(run), load.remaining) == (10, [(FINISHED, 2)], 1)


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_timeout_that_cannot_be(value: float) -> None:
    with pytest.raises(KvbenchError, match="request_timeout_s must be above 0"):
        Limits(8, request_timeout_s=value)
