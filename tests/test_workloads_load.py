"""The two loads as an engine or a server meets them: due, done, and what is left."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.engine.interfaces import Load
from kvbench.engine.types import Request, Sampling
from kvbench.errors import KvbenchError
from kvbench.metrics.records import FAILED, FINISHED, REJECTED, RequestRecord
from kvbench.workloads.arrivals import schedule
from kvbench.workloads.datasets import RandomTokens
from kvbench.workloads.lengths import Lengths
from kvbench.workloads.load import ClosedLoop, OpenLoop, draw_requests

DATASET = RandomTokens(Lengths(8), Lengths(5, 0.4), vocab_size=100)


def ended(request: Request, status: str = FINISHED) -> RequestRecord:
    return RequestRecord(request.id, request.scheduled_s, request.scheduled_s, 8, request.max_tokens, status=status)


def test_a_closed_loop_schedules_the_next_when_a_slot_is_free() -> None:
    load = ClosedLoop(draw_requests(DATASET, 4, seed=0), concurrency=2)
    as_load: Load = load
    assert load.next_s() == 0.0
    first, second = as_load.due(0.3)  # the engine comes late; the slots were free from the start
    assert (first.id, first.scheduled_s, second.id, second.scheduled_s) == (0, 0.0, 1, 0.0)
    assert (load.next_s(), load.due(1.0)) == (None, [])

    load.on_done(ended(second), 1.5)
    assert (load.next_s(), load.due(1.4)) == (1.5, [])
    (third,) = load.due(1.75)
    assert (third.id, third.scheduled_s) == (2, 1.5)
    load.on_done(ended(third, REJECTED), 1.75)
    (fourth,) = load.due(1.75)
    assert (fourth.id, fourth.scheduled_s) == (3, 1.75)
    assert (load.submitted, load.remaining, load.in_flight, load.last_issued_s) == (4, 0, 2, 1.75)

    load.on_done(ended(first), 2.0)
    load.on_done(ended(fourth), 2.0)
    assert (load.next_s(), load.due(9.0), load.in_flight) == (None, [], 0)


@given(st.integers(1, 6), st.integers(0, 20), st.data())
def test_a_closed_loop_holds_its_concurrency_and_leaks_no_slot(
    concurrency: int, extra: int, data: st.DataObject
) -> None:
    count = concurrency + extra
    load = ClosedLoop(draw_requests(DATASET, count, seed=0), concurrency)
    running: list[Request] = []
    freed = [0.0] * concurrency
    issued = 0
    for step in range(2 * count + 1):
        new = load.due(float(step))
        assert [request.id for request in new] == list(range(issued, issued + len(new)))
        assert [request.scheduled_s for request in new] == freed[issued : issued + len(new)]
        issued += len(new)
        running += new
        assert len(running) == load.in_flight == min(concurrency, count - issued + len(running))
        assert load.submitted + load.remaining == count
        ends = data.draw(st.lists(st.sampled_from(running), unique_by=id) if running else st.just([]))
        for request in ends or running[:1]:  # at least one ends in each step, as in an engine that makes progress
            running.remove(request)
            load.on_done(ended(request, data.draw(st.sampled_from([FINISHED, FAILED, REJECTED]))), step + 0.5)
            freed.append(step + 0.5)
    assert issued == load.submitted == count
    assert (load.in_flight, load.next_s()) == (0, None)


@pytest.mark.parametrize(("count", "concurrency"), [(10, 64), (1, 2)])
def test_fewer_requests_than_clients_are_refused(count: int, concurrency: int) -> None:  # sglang#39398
    with pytest.raises(KvbenchError, match=rf"^{count} requests never reach concurrency {concurrency}; "):
        ClosedLoop(draw_requests(DATASET, count, seed=0), concurrency)


@pytest.mark.parametrize("concurrency", [0, -1])
def test_no_clients_are_refused(concurrency: int) -> None:
    with pytest.raises(KvbenchError, match="--concurrency"):
        ClosedLoop(draw_requests(DATASET, 4, seed=0), concurrency)


def test_an_end_that_was_never_begun_is_a_fault() -> None:
    load = ClosedLoop(draw_requests(DATASET, 4, seed=0), 2)
    (first, _) = load.due(0.0)
    load.on_done(ended(first), 1.0)
    with pytest.raises(AssertionError):
        load.on_done(ended(first), 1.0)


def test_an_open_loop_does_not_drift_when_the_clock_stalls() -> None:
    times = schedule("constant", 6, 1.0, seed=0)
    load = OpenLoop(draw_requests(DATASET, 6, seed=0, arrivals=times))
    as_load: Load = load
    assert (as_load.next_s(), as_load.due(0.999)) == (1.0, [])
    assert [request.scheduled_s for request in load.due(1.0)] == [1.0]
    assert [request.scheduled_s for request in load.due(4.5)] == [2.0, 3.0, 4.0]  # a stall of 3.5 s
    assert load.next_s() == 5.0
    assert (load.submitted, load.remaining, load.in_flight, load.last_issued_s) == (4, 2, 4, 4.5)
    assert [request.scheduled_s for request in load.due(5.0)] == [5.0]
    assert [request.scheduled_s for request in load.due(6.0)] == [6.0]
    assert load.next_s() is None


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30), st.lists(st.floats(0, 110), max_size=10))
def test_an_open_loop_hands_out_each_request_once_and_on_time(times: list[float], looks: list[float]) -> None:
    load = OpenLoop(draw_requests(DATASET, len(times), seed=0, arrivals=times))
    issued: list[Request] = []
    for now_s in [*sorted(looks), 200.0]:
        new = load.due(now_s)
        issued += new
        assert [request.scheduled_s for request in issued] == sorted(time for time in times if time <= now_s)
        if new:
            load.on_done(ended(new[0], FAILED), now_s)  # how one ends changes nothing for the others
    assert sorted(request.id for request in issued) == list(range(len(times)))


def test_requests_carry_what_was_drawn() -> None:
    requests = draw_requests(DATASET, 50, seed=9, sampling=Sampling(0.5, 0.9, 1.2), stop_ids=frozenset({2}))
    rows = DATASET.draw(50, seed=9)
    assert [request.id for request in requests] == list(range(50))
    assert [(request.prompt, request.output_tokens) for request in requests] == [
        (row.prompt, row.output_tokens) for row in rows
    ]
    assert {request.max_tokens for request in requests} == {DATASET.longest_output} == {7}
    assert {(request.stop_ids, request.scheduled_s) for request in requests} == {(frozenset(), 0.0)}
    assert {replace(request.sampling, seed=0) for request in requests} == {Sampling(0.5, 0.9, 1.2)}
    assert len({request.sampling.seed for request in requests}) == 50
    assert draw_requests(DATASET, 50, seed=9)[7].sampling.seed == requests[7].sampling.seed


def test_requests_may_end_by_themselves() -> None:
    requests = draw_requests(DATASET, 9, seed=0, max_tokens=3, ignore_eos=False, stop_ids=frozenset({2}))
    assert {(request.max_tokens, request.output_tokens, request.stop_ids) for request in requests} == {
        (3, None, frozenset({2}))
    }


def test_the_arrivals_move_no_prompt_and_no_sampling_seed() -> None:
    closed = draw_requests(DATASET, 20, seed=4)
    opened = draw_requests(DATASET, 20, seed=4, arrivals=schedule("gamma", 20, 2.0, seed=4, burstiness=0.5))
    assert [(one.prompt, one.output_tokens, one.sampling.seed) for one in opened] == [
        (one.prompt, one.output_tokens, one.sampling.seed) for one in closed
    ]


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(KvbenchError, match="--num-prompts"):
        draw_requests(DATASET, 0, seed=0)
    with pytest.raises(KvbenchError, match="--max-tokens"):
        draw_requests(DATASET, 1, seed=0, max_tokens=0)
    with pytest.raises(KvbenchError, match="--max-tokens 6 is less than the 7 tokens"):
        draw_requests(DATASET, 1, seed=0, max_tokens=6)


def test_samples_change_how_many_answers_are_asked_and_nothing_else() -> None:
    single, four = (draw_requests(DATASET, 9, seed=3, samples=samples) for samples in (1, 4))
    assert {request.n for request in four} == {4} and [replace(request, n=1) for request in four] == single
    with pytest.raises(KvbenchError, match="0 samples"):
        draw_requests(DATASET, 1, seed=0, samples=0)
