"""Request-level batching: who shares a batch, what is held for nothing, and the same tokens as ever."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, groupby
from operator import attrgetter

import pytest
from fakes import Served, answer, make_pool, power_of_two, request, serve_on
from hypothesis import event, given, settings
from test_abort import PHASES, Story
from test_engine import Cell, cells, check_progress, check_requests

from kvbench.cli.config import parse_variants
from kvbench.cli.stack import BACKENDS
from kvbench.contiguous.slots import POLICIES
from kvbench.engine.scheduler import Limits
from kvbench.engine.types import Usage
from kvbench.errors import KvbenchError
from kvbench.metrics.memory import split
from kvbench.metrics.points import Variant
from kvbench.metrics.records import ABORTED, FINISHED, Hold, RequestRecord, Run
from kvbench.workloads.load import ClosedLoop, OpenLoop


def formed(run: Run) -> list[list[RequestRecord]]:
    """The batches: those admitted at one time, in order."""
    admitted = [one for one in run.requests if one.admitted_s is not None]
    admitted.sort(key=attrgetter("admitted_s", "scheduled_s", "request"))
    return [list(batch) for _, batch in groupby(admitted, key=attrgetter("admitted_s"))]


def test_a_small_run_by_hand() -> None:
    """Two slots of 8 rows. Request 0 (2 in, 2 out) and 1 (2 in, 5 out) make the first batch; request 2 (3 in, 1 out)
    waits for both although a slot is idle from the third step on."""
    requests = (request(0, 2, 2), request(1, 2, 5), request(2, 3, 1))
    served = Cell("max", 16, Limits(8), requests, 3, static=True).serve()
    run = served.run
    assert [[(p.id, p.start, p.end) for p in batch] for batch in served.batches] == [
        [(0, 0, 2), (1, 0, 2)],
        [(0, 2, 3), (1, 2, 3)],
        [(1, 3, 4)],
        [(1, 4, 5)],
        [(1, 5, 6)],
        [(2, 0, 3)],
    ]
    parts = split(run)
    assert parts.used.tolist() == [4, 6, 4, 5, 6, 3]
    assert parts.reserved.tolist() == [5, 3, 2, 1, 0, 0]
    assert parts.internal.tolist() == [7, 7, 10, 10, 10, 5]
    assert parts.rounding.tolist() == [0] * 6
    assert parts.free.tolist() == [0, 0, 0, 0, 0, 8]
    assert run.holds == [
        Hold(0, 0, 2, 8, 8, 3), Hold(1, 0, 5, 8, 8, 6), Hold(0, 2, 5, 8, 8, 0), Hold(2, 5, 6, 8, 8, 3)
    ]  # fmt: skip
    assert [(step.running, step.waiting) for step in run.steps] == [(2, 1), (2, 1), (1, 1), (1, 1), (1, 1), (1, 0)]
    assert [one.last_s for one in run.requests] == [run.steps[number].end_s for number in (1, 4, 5)]
    assert [one.admitted_s for one in run.requests] == [0, 0, run.steps[4].end_s]


def test_a_buddys_rounding_is_internal_after_the_end() -> None:
    """5 rows asked for, 8 held: 3 of rounding while it runs, none afterwards."""
    requests = (request(0, 4, 1), request(1, 4, 3, max_tokens=4))
    parts = split(Cell("declared", 16, Limits(8), requests, 2, static=True).serve().run)
    assert parts.rounding.tolist() == [3, 0, 0]
    assert parts.internal.tolist() == [1 + 2, 8 + 2, 8 + 2]


def test_a_client_is_told_at_its_own_last_token() -> None:
    """And asks again at once, though its next request waits for the batch to end."""
    requests = [request(0, 2, 2), request(1, 2, 9), request(2, 2, 2)]
    run, *_ = serve_on(make_pool("max", 64, 16), ClosedLoop(requests, 2), Limits(16), static=True)
    assert run.requests[2].scheduled_s == run.requests[0].last_s == run.steps[1].end_s
    assert run.requests[2].admitted_s == run.requests[1].last_s == run.steps[8].end_s


def test_a_batch_larger_than_the_token_budget_is_still_one_batch() -> None:
    """Its memory is reserved when it forms, its prompts come in turn, and nobody joins it later."""
    requests = [request(number, 6, 3) for number in range(4)] + [request(4, 1, 1, scheduled_s=2**-8)]
    run, batches, _ = serve_on(make_pool("max", 64, 12), OpenLoop(requests), Limits(12, 5), static=True)
    assert [[one.request for one in batch] for batch in formed(run)] == [[0, 1, 2, 3], [4]]
    assert [step.held_tokens for step in run.steps] == [48] * (len(run.steps) - 1) + [12]
    assert run.steps[0].sequences == 1 and run.steps[0].running == 4
    assert [one.output_token_ids for one in run.requests] == [answer(one) for one in requests]
    assert sum(piece.end - piece.start for piece in batches[0]) == 5


@settings(max_examples=300)
@given(cells(kinds=POLICIES))
def test_any_workload_in_static_batches(cell: Cell) -> None:  # inference-sim#529
    """Every request ends as it must, in bounded steps, with the tokens of continuous batching; every row is accounted
    for."""
    cell = replace(cell, static=True)
    served = cell.serve()
    check_requests(cell, served)
    check_progress(cell, served)
    check_batches(cell, served)
    assert cell.serve() == served, "the same run twice gave other records"
    continuous = replace(cell, static=False).serve().run
    tokens = [one.output_token_ids for one in continuous.requests]
    assert [one.output_token_ids for one in served.run.requests] == tokens
    event(f"batches: {min(len(formed(served.run)), 4)}")


def check_batches(cell: Cell, served: Served) -> None:
    """One batch after the other, in order of arrival, as many as wait and fit; all members hold their rows from its
    first step to its last."""
    run, parts = served.run, split(served.run)
    held: dict[tuple[int, int], tuple[int, int, int]] = {
        (step, hold.request): (hold.held_tokens, hold.asked_tokens, hold.final_tokens)
        for hold in run.holds
        for step in range(hold.first_step, hold.end_step)
    }
    batches = formed(run)
    order = [one.request for batch in batches for one in batch]
    assert order == sorted(order, key=lambda id: (run.requests[id].scheduled_s, id)), "somebody overtook"
    lasts, firsts = [], []
    for batch in batches:
        assert len(batch) <= cell.limits.max_sequences
        members = {one.request for one in batch}
        steps = [n for n, pieces in enumerate(served.batches) if {piece.id for piece in pieces} & members]
        assert steps == list(range(steps[0], steps[-1] + 1)) and run.steps[steps[0]].start_s == batch[0].admitted_s
        assert all({piece.id for piece in served.batches[step]} <= members for step in steps), "a step of two batches"
        firsts.append(run.steps[steps[0]].start_s)
        lasts.append(run.steps[steps[-1]].end_s)
        used = [0] * len(steps)
        for one in batch:
            mine = [n for n in steps if any(piece.id == one.request for piece in served.batches[n])]
            rows = held[steps[0], one.request][0]
            assert rows == (cell.limits.max_model_len if cell.kind == "max" else power_of_two(rows))
            final = one.input_tokens + one.output_tokens - 1
            for at, step in enumerate(steps):
                ends = [piece.end for n in mine if n <= step for piece in served.batches[n] if piece.id == one.request]
                if step <= mine[-1]:
                    used[at] += ends[-1] if ends else 0
                    assert (held[step, one.request][0], held[step, one.request][2]) == (rows, final)
                else:
                    assert held[step, one.request] == (rows, rows, 0), "what has ended is all internal"
        assert parts.used[steps].tolist() == used
        assert parts.held[steps].tolist() == [sum(held[steps[0], one.request][0] for one in batch)] * len(steps)
    assert all(first >= last for first, last in zip(firsts[1:], lasts, strict=False)), "two batches at once"
    assert len(held) == sum(hold.end_step - hold.first_step for hold in run.holds), "a step is in two holds"


@pytest.mark.parametrize("kind", POLICIES)
def test_a_failed_allocation_at_any_call_changes_no_token(kind: str) -> None:  # vllm#16832
    requests = [request(number, 5 + 3 * number, 3 + 2 * number) for number in range(5)]
    preempted = 0
    for fails in count():
        pool = make_pool(kind, 128, 32)
        run, _, asked = serve_on(pool, ClosedLoop(requests, 5), Limits(32, 9, 4), fails={fails}, static=True)
        assert [one.output_token_ids for one in run.requests] == [answer(one) for one in requests], f"call {fails}"
        assert pool.usage() == Usage(0, 0, 128)
        split(run)
        preempted += sum(one.preemptions for one in run.requests)
        if fails >= asked:
            break
    assert fails > 20 and preempted > 10


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("phase", PHASES)
def test_who_gives_up_leaves_its_rows_to_the_batch(kind: str, phase: str) -> None:
    story = Story(kind, 128, Limits(32), static=True)
    story.step(request(0, 4, 9), request(1, 4, 5), request(2, 4, 2))
    held = story.pool.usage().held
    story.step(aborts={phase: [0]})
    assert {one.request for one in story.done} == {0, 2}
    assert story.engine.usage() == Usage(5, held, 128 - held)
    run = story.end()
    assert [one.status for one in run.requests] == [ABORTED, FINISHED, FINISHED]
    assert [step.held_tokens for step in run.steps] == [held] * 5 and len(formed(run)) == 1


@pytest.mark.parametrize("kind", POLICIES)
def test_who_gives_up_before_its_turn_in_the_batch_has_filled_nothing(kind: str) -> None:
    """The budget leaves request 1 without a chunk in the first step; it is aborted while that step is in flight."""
    story = Story(kind, 128, Limits(32, 4), static=True)
    story.step(request(0, 8, 3), request(1, 4, 5), aborts={PHASES[1]: [1]})
    run = story.end()
    assert [(one.status, one.token_s) for one in run.requests][1] == (ABORTED, [])
    assert [(hold.first_step, hold.final_tokens) for hold in run.holds if hold.request == 1] == [(0, 0)]


@pytest.mark.parametrize("kind", POLICIES)
def test_a_batch_that_ran_out_of_patience_makes_way(kind: str) -> None:
    requests = [request(0, 4, 3), request(1, 4, 30), request(2, 4, 1)]
    limits = Limits(64, max_sequences=2, request_timeout_s=0.1)
    pool = make_pool(kind, 128, 64)
    run, *_ = serve_on(pool, ClosedLoop(requests, 2), limits, static=True)
    assert [one.status for one in run.requests] == [FINISHED, ABORTED, FINISHED]
    assert len(formed(run)) == 2 and pool.usage() == Usage(0, 0, 128)
    split(run)


def test_the_command_line_knows_what_static_is_for() -> None:
    policies = {name: backend.policies for name, backend in BACKENDS.items()}

    def asked(backends: str, **told: str | None) -> tuple[Variant, ...]:
        return parse_variants(backends, {"reserve": None, "batching": None, **told}, policies)

    (only,) = asked("contiguous", reserve="max", batching="STATIC")
    assert (only.backend, only.reserve, only.batching) == ("contiguous", "max", "static")
    assert {one.batching for one in asked("contiguous,paged")} == {"continuous"}
    both = asked("contiguous,paged", batching="static,continuous")
    assert [(one.backend, one.batching) for one in both] == [
        ("contiguous", "static"),
        ("contiguous", "continuous"),
        ("paged", "continuous"),
    ]
    with pytest.raises(KvbenchError, match="--batching is a policy of the contiguous backend; add contiguous"):
        asked("paged", batching="static")
    with pytest.raises(KvbenchError, match=r"--batching 'statik' .* did you mean static"):
        asked("contiguous", reserve="max", batching="statik")
