"""Conversations and caps: what is asked next and when, on whole runs over simulated rows."""

from __future__ import annotations

from itertools import pairwise

import pytest
from fakes import answer, asking, make_pool, serve_on
from hypothesis import given
from hypothesis import strategies as st

from kvbench.engine.scheduler import Limits
from kvbench.engine.types import Request
from kvbench.errors import KvbenchError
from kvbench.metrics.rate import rates
from kvbench.metrics.records import ABORTED, FINISHED, REJECTED, RequestRecord
from kvbench.workloads.datasets import Groups, RandomTokens
from kvbench.workloads.facts import hit_rate
from kvbench.workloads.lengths import Lengths
from kvbench.workloads.load import ClosedLoop, OpenLoop, draw_requests

THREE = RandomTokens(Lengths(6, 0.4), Lengths(5, 0.4), vocab_size=40, prefix=4, turns=3)
LIMITS = Limits(max_model_len=80, max_batched_tokens=64)


def ended(request: Request, at_s: float, output: list[int] | None, status: str = FINISHED) -> RequestRecord:
    return RequestRecord(
        request.id, request.scheduled_s, request.scheduled_s, 8, request.max_tokens, last_s=at_s, status=status,
        turn=request.turn, output_token_ids=output,
    )  # fmt: skip


def test_a_later_turn_carries_the_answer_really_given_and_comes_after_a_thought() -> None:
    drawn = THREE.draw(6, seed=1)
    load = OpenLoop(draw_requests(THREE, 6, seed=1, arrivals=[1.0, 2.0], think_s=0.5))
    assert load.remaining == 6
    (first,) = load.due(1.5)
    assert (first.prompt, first.turn, first.scheduled_s, load.next_s()) == (drawn[0].prompt, 0, 1.0, 2.0)
    load.on_done(ended(first, 1.5, [3, 1, 4]), 1.6)
    second, other = load.due(2.0)
    assert second.prompt == (*first.prompt, 3, 1, 4, *drawn[0].later[0].prompt)
    assert (second.id, second.turn, second.scheduled_s, second.output_tokens) == (
        *(1, 1, 2.0),
        drawn[0].later[0].output_tokens,
    )
    assert (other.id, other.prompt) == (3, drawn[1].prompt)
    load.on_done(ended(second, 4.0, [1, 5]), 4.0)
    (third,) = load.due(9.0)
    assert third.prompt == (*second.prompt, 1, 5, *drawn[0].later[1].prompt) and third.scheduled_s == 4.5
    load.on_done(ended(third, 9.5, [9]), 9.5)
    assert (load.remaining, load.in_flight, load.next_s(), load.unasked) == (2, 1, None, 0)


@pytest.mark.parametrize("status", [REJECTED, ABORTED])
def test_after_a_turn_that_failed_its_conversation_is_over_and_counted(status: str) -> None:
    load = ClosedLoop(draw_requests(THREE, 6, seed=1), 1)
    (first,) = load.due(0.0)
    load.on_done(ended(first, 1.0, [], status), 1.0)
    assert (load.unasked, load.remaining, load.submitted) == (2, 3, 1)
    (second,) = load.due(1.0)
    assert (second.id, second.scheduled_s, second.turn) == (3, 1.0, 0)


def test_a_conversation_needs_the_ids_of_its_answers() -> None:
    load = ClosedLoop(draw_requests(THREE, 3, seed=1), 1)
    (first,) = load.due(0.0)
    with pytest.raises(KvbenchError, match="--turns needs the ids"):
        load.on_done(ended(first, 1.0, None), 1.0)


def test_a_client_thinks_and_holds_its_place() -> None:
    """With one client nobody else begins while it thinks."""
    served = serve_on(make_pool("paged-3", 300, 80), ClosedLoop(draw_requests(THREE, 6, 1, think_s=2.0), 1), LIMITS)
    records = served.run.requests
    assert [one.request for one in records] == list(range(6)) and {one.status for one in records} == {FINISHED}
    assert [one.turn for one in records] == [0, 1, 2, 0, 1, 2]
    for before, after in pairwise(records):
        assert before.last_s is not None
        assert after.scheduled_s == before.last_s + (2.0 if after.turn else 0.0)


@given(st.integers(1, 4), st.integers(4, 20), st.sampled_from(["paged-3", "cached-3", "cached_swapping-3", "max"]))
def test_every_answer_is_that_of_the_whole_conversation(turns: int, count: int, kind: str) -> None:
    dataset = RandomTokens(Lengths(5, 0.5), Lengths(4, 0.5), vocab_size=40, turns=turns)
    asked = draw_requests(dataset, count, seed=0, think_s=0.01)
    clients = min(3, sum(not request.turn for request in asked))
    served = serve_on(make_pool(kind, 200, 64), ClosedLoop(asked, clients), Limits(64, 32))
    records = {one.request: one for one in served.run.requests}
    assert len(records) == count and {one.status for one in records.values()} == {FINISHED}
    for request in asked:
        prompt = list(request.prompt)
        if request.turn:
            before = records[request.id - 1]
            prompt = [*(before.prompt_token_ids or []), *(before.output_token_ids or []), *prompt]
        record = records[request.id]
        assert record.prompt_token_ids == prompt and len(prompt) <= dataset.longest_input
        assert record.output_token_ids == answer(request, prompt)


@pytest.mark.parametrize("size", [1, 3, 16])
def test_later_turns_hit_what_their_conversation_left_and_the_outline_knows_it(size: int) -> None:
    """One conversation after the other, in a pool where nothing is evicted: hits are exactly those foretold, turn by
    turn the full blocks of all that came before."""
    dataset = RandomTokens(Lengths(9, 0.8), Lengths(7, 0.8), vocab_size=5_000, prefix=10, groups=Groups(2), turns=3)
    for cached in (True, False):
        kind = f"{'cached' if cached else 'paged'}-{size}"
        load = ClosedLoop(draw_requests(dataset, 24, seed=5), 1)
        run = serve_on(make_pool(kind, 5_000, 200), load, Limits(200, 256)).run
        found = sum(one.cached_tokens for one in run.requests) / sum(one.input_tokens for one in run.requests)
        assert found == (hit_rate(dataset.outline(24, 5), size) if cached else 0)
        for before, after in pairwise(run.requests):
            if after.turn and cached:
                left = before.input_tokens + before.output_tokens - 1
                assert after.cached_tokens == left // size * size
    outlines = dataset.outline(24, 5)
    assert [(one.input_tokens, one.output_tokens, one.turn) for one in outlines] == [
        (one.input_tokens, one.output_tokens, one.turn) for one in run.requests
    ]


def test_groups_share_their_prefix_and_the_popular_one_is_drawn_more() -> None:
    dataset = RandomTokens(
        Lengths(4), Lengths(3), vocab_size=5_000, prefix=20, groups=Groups(3, 1.0), excluded=frozenset()
    )
    prompts = [row.prompt for row in dataset.draw(2_000, 0)]
    beginnings = [prompt[:20] for prompt in prompts]
    counts = sorted((beginnings.count(one) for one in set(beginnings)), reverse=True)
    total = 1 + 1 / 2 + 1 / 3
    for rank, found in enumerate(counts, 1):
        share = 1 / rank / total
        assert abs(found - 2_000 * share) < 5 * (2_000 * share * (1 - share)) ** 0.5
    plain = RandomTokens(Lengths(4), Lengths(3), vocab_size=5_000, prefix=20)
    assert [prompt[20:] for prompt in prompts] == [row.prompt[20:] for row in plain.draw(2_000, 0)]
    assert set(Groups(4).draw(100, 0)) == {0, 1, 2, 3} and set(Groups().draw(100, 0)) == {0}


def test_under_a_cap_who_is_due_waits_and_its_latency_counts_from_its_schedule() -> None:
    """Cap 2, three due at 1 s: the third is sent when the first ends, at 4 s."""
    load = OpenLoop([asking(id, [1, 2], scheduled_s=at_s) for id, at_s in enumerate((1.0, 1.0, 1.5, 9.0))], 2)
    assert [(one.id, one.sent_s) for one in load.due(1.0)] == [(0, None), (1, None)]
    assert load.next_s() is None and load.due(3.0) == []
    load.on_done(ended(asking(0, [1, 2]), 4.0, [1]), 4.0)
    assert load.next_s() == 4.0
    assert [(one.id, one.scheduled_s, one.sent_s) for one in load.due(4.25)] == [(2, 1.5, 4.0)]
    load.on_done(ended(asking(1, [1, 2]), 5.0, [1]), 5.0)
    assert (load.next_s(), load.due(8.0)) == (9.0, [])
    assert [(one.id, one.sent_s) for one in load.due(9.0)] == [(3, None)]
    with pytest.raises(KvbenchError, match="--max-concurrency"):
        OpenLoop([], 0)


def test_a_cap_that_binds_is_a_rate_not_held_and_hides_no_wait() -> None:  # vllm#45502
    """Cap 8, 10 requests/s, eight answers that take 1 s and all end at once: 8 a second at most, in bursts."""
    requests = [asking(id, [1], output=4, scheduled_s=id / 10) for id in range(200)]
    free = OpenLoop(requests, 8)
    sent: list[tuple[float, Request]] = []
    running: list[Request] = []
    now_s = 0.0
    while free.remaining or running:
        new = free.due(now_s)
        sent += [(now_s, request) for request in new]
        running += new
        if len(running) == 8 or not free.remaining:
            now_s += 1.0
            for request in running:
                free.on_done(ended(request, now_s, [1]), now_s)
            running = []
        else:
            next_s = free.next_s()
            assert next_s is not None
            now_s = max(now_s, next_s)
    records = []
    for _, request in sent:
        record = ended(request, 0.0, [1])
        record.sent_s = request.scheduled_s if request.sent_s is None else request.sent_s
        records.append(record)
    assert [record.sent_s for record in records] == [at_s for at_s, _ in sent]
    told = rates(records)
    assert told["drawn_rate_per_s"] == pytest.approx(10.0) and told["rate_held"] is False
    achieved = told["achieved_rate_per_s"]
    assert achieved is not None and 5 < achieved < 8.1 and told["largest_rate_1s_per_s"] == 8
    assert [record.scheduled_s for record in records] == [id / 10 for id in range(200)]


def test_ttft_counts_the_wait_for_a_slot_in_a_whole_run() -> None:
    requests = [asking(id, [id, 2], output=30, scheduled_s=0.0) for id in range(6)]
    limits = Limits(64, 64)
    capped = serve_on(make_pool("paged-3", 500, 64), OpenLoop(requests, 2), limits).run
    free = serve_on(make_pool("paged-3", 500, 64), OpenLoop(requests), limits).run
    assert max(step.running for step in capped.steps) == 2 and max(step.running for step in free.steps) == 6
    assert [one.scheduled_s for one in capped.requests] == [0.0] * 6
    ends = sorted(one.last_s for one in capped.requests if one.last_s is not None)
    assert [one.sent_s for one in capped.requests] == [0.0, 0.0, ends[0], ends[1], ends[2], ends[3]]
    assert [one.output_token_ids for one in capped.requests] == [one.output_token_ids for one in free.requests]


RATES = [
    ([], [], (None, None, None, None)),
    ([1.0], [1.0], (None, None, None, None)),
    ([1.0, 1.0], [1.0, 1.0], (None, None, None, None)),
    ([0.0, 0.5, 1.0], [0.0, 0.5, 1.0], (2.0, 2.0, 2.0, True)),
    ([0.0, 1.0, 2.0, 3.0], [0.0, 3.0, 3.5, 3.75], (1.0, 0.8, 3.0, False)),
    ([0.0, 50.0, 100.0], [0.0, 102.0, 102.0], (0.02, 2 / 102, 2.0, True)),  # 1.96 % slower
    ([0.0, 50.0, 100.0], [0.0, 102.1, 102.1], (0.02, 2 / 102.1, 2.0, False)),
]


@pytest.mark.parametrize(("scheduled", "sent", "wanted"), RATES)
def test_rates_by_hand(scheduled: list[float], sent: list[float], wanted: tuple[float | bool | None, ...]) -> None:
    records = [RequestRecord(id, due, at, 1, 1) for id, (due, at) in enumerate(zip(scheduled, sent, strict=True))]
    later = [RequestRecord(id + 50, 9e3 + id, 9e3 + id, 1, 1, turn=1) for id in range(3)]
    samples = [RequestRecord(one.request, one.scheduled_s, one.sent_s, 1, 1, sample=1) for one in records]
    assert tuple(rates([*records, *later, *samples]).values()) == pytest.approx(wanted, nan_ok=False)
