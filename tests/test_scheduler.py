"""Which tokens a step computes, by hand; and what happens where memory runs out, in the cases that broke others."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import pytest
from fakes import KINDS, FaultyAllocator, answer, make_pool, request, serve_on

from kvbench.engine.interfaces import Allocator
from kvbench.engine.scheduler import Limits, Plan, Scheduler
from kvbench.engine.sequence import Sequence
from kvbench.engine.types import Request, Usage
from kvbench.errors import KvbenchError
from kvbench.metrics.memory import split
from kvbench.metrics.records import FAILED, FINISHED, REJECTED
from kvbench.paged.blocks import BlockPool
from kvbench.workloads.load import ClosedLoop, OpenLoop, draw_requests
from kvbench.workloads.support import Support

Chunks = list[tuple[int, int, int]]


class Steps:
    """A scheduler whose batches are done at once; every token is 0."""

    def __init__(self, pool: Allocator, *requests: Request, budget: int = 100, sequences: int = 100) -> None:
        self.scheduler = Scheduler(pool, Limits(1000, budget, sequences))
        self.step = 0
        for one in requests:
            self.scheduler.add([Sequence.of(one)])

    def next(self) -> Plan:
        """The plan of the next step, after which its tokens exist and what ended is gone."""
        plan = self.scheduler.schedule()
        for chunk in plan.chunks:
            chunk.sequence.computed = chunk.end
            self.scheduler.allocator.commit(chunk.sequence)
            if chunk.samples:
                chunk.sequence.emit(0, self.step)
                if chunk.sequence.ended:
                    self.scheduler.finish(chunk.sequence)
        self.step += 1
        return plan

    def chunks(self) -> Chunks:
        return [(chunk.sequence.id, chunk.start, chunk.end) for chunk in self.next().chunks]

    def waiting(self) -> list[int]:
        return [sequence.id for sequence in self.scheduler.waiting]


def ids(sequences: list[Sequence]) -> list[int]:
    return [sequence.id for sequence in sequences]


def test_long_prompts_come_in_chunks_and_share_steps_with_decodes() -> None:
    steps = Steps(BlockPool(64, 4), request(0, 12, 3), request(1, 3, 2), request(2, 9, 1), budget=5)
    assert [steps.chunks() for _ in range(8)] == [
        [(0, 0, 5)],
        [(0, 5, 10)],
        [(0, 10, 12), (1, 0, 3)],
        [(0, 12, 13), (1, 3, 4), (2, 0, 3)],
        [(0, 13, 14), (2, 3, 7)],
        [(2, 7, 9)],
        [],
        [],
    ]


def test_a_budget_of_one_token_serves_one_sequence_at_a_time() -> None:
    steps = Steps(BlockPool(64, 4), request(0, 2, 2), request(1, 1, 2), budget=1)
    assert [steps.chunks() for _ in range(5)] == [[(0, 0, 1)], [(0, 1, 2)], [(0, 2, 3)], [(1, 0, 1)], [(1, 1, 2)]]


def test_no_more_run_than_may() -> None:
    steps = Steps(BlockPool(64, 4), *(request(number, 2, 2) for number in range(3)), sequences=2)
    assert [len(steps.chunks()) for _ in range(4)] == [2, 2, 1, 1]


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    steps = Steps(BlockPool(16, 4), request(0, 5, 3), request(1, 12, 1), request(2, 1, 1))
    assert [steps.chunks() for _ in range(4)] == [[(0, 0, 5)], [(0, 5, 6)], [(0, 6, 7)], [(1, 0, 12), (2, 0, 1)]]


def test_shortage_takes_from_the_latest_and_it_comes_back_first() -> None:
    """Three of 4 rows in 12: the oldest needs a fifth row, then the second does; both victims wait in their order,
    before a later arrival, and start over with what they had generated."""
    steps = Steps(BlockPool(12, 4), *(request(number, 4, 4) for number in range(3)))
    assert steps.chunks() == [(0, 0, 4), (1, 0, 4), (2, 0, 4)]
    steps.scheduler.add([Sequence.of(request(3, 1, 1))])
    plan = steps.next()
    assert ([chunk.sequence.id for chunk in plan.chunks], ids(plan.preempted), plan.admitted) == ([0], [2, 1], [])
    assert steps.waiting() == [1, 2, 3]
    assert [(one.computed, one.known, one.preemptions) for one in steps.scheduler.waiting][:2] == [(0, 5, 1)] * 2
    assert [steps.chunks() for _ in range(3)] == [[(0, 5, 6)], [(0, 6, 7)], [(1, 0, 5)]]
    assert [steps.chunks() for _ in range(3)] == [[(1, 5, 6)], [(1, 6, 7)], [(2, 0, 5), (3, 0, 1)]]


def test_a_sequence_that_outgrows_the_pool_alone_is_hopeless() -> None:
    steps = Steps(BlockPool(10, 3), request(0, 8, 5))
    assert [steps.chunks() for _ in range(2)] == [[(0, 0, 8)], [(0, 8, 9)]]
    plan = steps.next()
    ((sequence, reason),) = plan.hopeless
    assert reason == "outgrew the whole KV pool: 10 tokens do not fit in 10 (8 of prompt, 2 generated)"
    assert (sequence.id, plan.chunks, plan.preempted, steps.scheduler.running, steps.waiting()) == (0, [], [], [], [])
    assert steps.scheduler.allocator.usage() == Usage(0, 0, 10)


class Shrunk(FaultyAllocator):
    """An allocator that could hold only `most` rows of a sequence that was preempted."""

    most = 4

    def could_hold(self, sequence: Sequence, rows: int) -> bool:
        return not sequence.preemptions or rows <= self.most


def test_a_preempted_sequence_that_no_longer_fits_fails_and_does_not_block_the_queue() -> None:
    steps = Steps(Shrunk(BlockPool(64, 4), {3}), request(0, 2, 2), request(1, 4, 2), request(2, 1, 1), sequences=2)
    assert steps.chunks() == [(0, 0, 2), (1, 0, 4)]
    assert ids(steps.next().preempted) == [1]  # the fault meets its own growth
    plan = steps.next()
    assert [(one.id, "outgrew" in reason) for one, reason in plan.hopeless] == [(1, True)]
    assert ids(plan.admitted) == [2]


@pytest.mark.parametrize("name", ["max_model_len", "max_batched_tokens", "max_sequences"])
@pytest.mark.parametrize("value", [0, -1])
def test_limits_below_one_are_refused(name: str, value: int) -> None:
    change: dict[str, Any] = {name: value}
    with pytest.raises(KvbenchError, match=f"{name} must be at least 1, not {value}"):
        replace(Limits(8), **change)


def test_the_request_that_cannot_end_fails_and_the_others_go_on() -> None:  # nano-vllm#274
    requests = [request(0, 60, 20), request(1, 20, 10), request(2, 5, 5)]
    run, *_ = serve_on(BlockPool(4 * 16, 16), ClosedLoop(requests, 3), Limits(128))
    outgrown, *others = run.requests
    assert (outgrown.status, outgrown.output_tokens) == (FAILED, 5)  # rows 60 to 63, and a last one that needs none
    assert outgrown.reason.startswith("outgrew the whole KV pool: 65 tokens do not fit in 64 ")
    assert outgrown.output_token_ids == answer(requests[0])[:5]
    assert [one.status for one in others] == [FINISHED, FINISHED]
    assert [one.output_token_ids for one in others] == [answer(one) for one in requests[1:]]


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("budget", [1, 8, 64])
def test_two_prompts_in_a_pool_for_one_and_a_half_cost_at_most_one_preemption(  # vllm PR#21809
    budget: int, caching: bool
) -> None:
    requests = [request(0, 32, 16), request(1, 32, 16)]
    pool = BlockPool(72, 4, prefix_caching=caching)
    run, *_ = serve_on(pool, ClosedLoop(requests, 2), Limits(64, budget))
    assert sum(one.preemptions for one in run.requests) <= 1
    assert [one.output_token_ids for one in run.requests] == [answer(one) for one in requests]


@pytest.mark.parametrize("block", [1, 3, 16])
def test_under_a_full_pool_and_steady_arrivals_the_oldest_goes_on(block: int) -> None:  # inference-sim#529
    requests = [request(number, 20, 30, scheduled_s=number * 2**-7) for number in range(40)]
    run, batches, _ = serve_on(BlockPool(96, block), OpenLoop(requests), Limits(64, 16))
    assert all(one.status == FINISHED for one in run.requests)
    assert sum(one.preemptions for one in run.requests) > 0
    assert len(run.steps) <= sum(20 + 30 - 1 for _ in requests)  # no slower than one token a step, one at a time
    assert [one.output_token_ids for one in run.requests] == [answer(one) for one in requests]
    oldest = [batch[0] for batch in batches]
    turns = [oldest[0].id] + [after.id for before, after in pairwise(oldest) if after.id != before.id]
    assert len(turns) == len(set(turns)), "a sequence was the oldest twice: it lost its turn before it ended"
    assert all(after.start == before.end for before, after in pairwise(oldest) if after.id == before.id)


@pytest.mark.parametrize("kind", KINDS)
def test_one_block_or_slot_serves_one_after_the_other(kind: str) -> None:
    rows = int(kind.removeprefix("paged-")) if kind.startswith("paged-") else 8
    prompts = [1, min(2, rows), 1, rows]
    requests = [request(number, prompt, max(1, min(4, rows - prompt))) for number, prompt in enumerate(prompts)]
    if kind == "max":
        requests.pop()  # a prompt of the whole slot leaves no room for the answer it declares
    run, *_ = serve_on(make_pool(kind, rows, 8), ClosedLoop(requests, 2), Limits(500))
    split(run)
    assert {one.status for one in run.requests} <= {FINISHED, "rejected"}
    served = [one for one in run.requests if one.status == FINISHED]
    assert [one.output_token_ids for one in served] == [answer(requests[one.request]) for one in served]
    assert len(served) >= 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_allocation_at_any_call_changes_no_token(kind: str) -> None:  # vllm#16832
    requests = [request(number, 5 + 3 * number, 9) for number in range(5)]
    expected = [answer(one) for one in requests]
    preempted = 0
    for fails in count():
        pool = make_pool(kind, 512 if kind == "paged-256" else 72, 32)
        run, _, reservations = serve_on(pool, ClosedLoop(requests, 5), Limits(32, 7, 4), fails={fails})
        assert [one.output_token_ids for one in run.requests] == expected, f"call {fails}"
        assert pool.usage() == Usage(0, 0, pool.pool_tokens)
        split(run)
        preempted += sum(one.preemptions for one in run.requests)
        if fails >= reservations:
            break
    assert fails > 40 and preempted > 20


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("truncate", [False, True])
def test_prompts_around_the_longest_that_fits(kind: str, truncate: bool) -> None:  # vllm#16445
    requests = [request(number, 31 + number, 1) for number in range(3)] + [request(3, 5, 32), request(4, 5, 33)]
    run, *_ = serve_on(make_pool(kind, 512, 32), ClosedLoop(requests, 1), Limits(32, 10, truncate=truncate))
    fits, longest, longer, no_room, never = run.requests
    assert (fits.status, fits.input_tokens, fits.output_tokens, fits.truncated_tokens) == (FINISHED, 31, 1, 0)
    for one, cut in ((longest, 1), (longer, 2)):
        if truncate:
            prompt = requests[one.request].prompt[cut:]
            assert (one.status, one.truncated_tokens, one.input_tokens) == (FINISHED, cut, 31)
            assert one.output_token_ids == answer(requests[one.request], prompt)
        else:
            assert (one.status, one.output_tokens, one.admitted_s) == (REJECTED, 0, None)
            assert one.reason == f"prompt of {31 + cut} tokens and 1 declared go beyond max_model_len 32"
    assert no_room.status == never.status == REJECTED


@pytest.mark.parametrize("kind", KINDS)
def test_a_rejected_request_frees_its_client(kind: str) -> None:
    requests = [request(number, 40, 1) for number in range(20)] + [request(20, 4, 2)]
    run, *_ = serve_on(make_pool(kind, 512, 32), ClosedLoop(requests, 1), Limits(32))
    assert [one.status for one in run.requests] == [REJECTED] * 20 + [FINISHED]
    run, *_ = serve_on(make_pool(kind, 0, 32), ClosedLoop(requests[20:], 1), Limits(32))
    assert [one.status for one in run.requests] == [REJECTED]
    assert run.requests[0].reason.startswith("its first reservation under this policy cannot fit even an empty KV pool")


@pytest.mark.parametrize("kind", KINDS)
def test_a_rejection_costs_its_client_no_step(kind: str) -> None:
    requests = [request(number, 40 if number % 2 else 4, 5) for number in range(40)]
    run, *_ = serve_on(make_pool(kind, 512, 32), ClosedLoop(requests, 2), Limits(32))
    assert [step.sequences for step in run.steps] == [2] * 50


@pytest.mark.parametrize("kind", ["paged-3", "max", "declared"])
def test_an_answer_ends_with_its_stop_token(kind: str) -> None:  # sglang#24254
    asked = request(0, 10, 64, output_tokens=None, stop_ids=frozenset({2}))
    pool = make_pool(kind, 128, 80)
    run, *_ = serve_on(pool, ClosedLoop([asked], 1), Limits(80), token=lambda known, _: 2 if len(known) == 16 else 7)
    (record,) = run.requests
    assert (record.status, record.reason, record.output_tokens) == (FINISHED, "stop", 7)
    assert record.output_token_ids == [7] * 6 + [2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": ()}, "request 8 has an empty prompt"),
        ({"scheduled_s": float("nan")}, "request 8 is scheduled at nan"),
        ({"max_tokens": 0}, "request 8 declares max_tokens 0"),
        ({"max_tokens": -1}, "request 8 declares max_tokens -1"),
        ({"output_tokens": 0}, "request 8 answers 0 tokens but declares 4"),
        ({"output_tokens": 5}, "request 8 answers 5 tokens but declares 4"),
    ],
)
def test_requests_that_cannot_be(change: dict[str, Any], message: str) -> None:  # evalchemy#152
    with pytest.raises(KvbenchError, match=f"^{message}") as refused:
        replace(request(8, 3, 4), **change)
    assert "\n" not in str(refused.value)


def test_at_equal_bytes_slots_of_the_longest_request_admit_the_fewest() -> None:
    """A support desk's chats, none longer than 253 tokens, where the longest request may have 1.2 times as many."""
    support = Support(None, vocab_size=4096)
    requests = draw_requests(support, 64, seed=0)
    pool, longest = 2048, 303
    assert longest <= 1.2 * max(len(one.prompt) + (one.output_tokens or 0) for one in requests)
    peak, tokens = {}, []
    for kind in ("max", "declared", "pow2", "oracle", "paged-16"):
        run, *_ = serve_on(make_pool(kind, pool, longest), ClosedLoop(requests, 64), Limits(longest))
        assert all(one.status == FINISHED for one in run.requests)
        peak[kind] = max(step.running for step in run.steps)
        tokens.append([one.output_token_ids for one in run.requests])
        split(run)
    assert peak["max"] == pool // longest == 6
    assert peak["max"] < peak["declared"] < peak["oracle"] < peak["paged-16"]
    assert peak["declared"] <= peak["pow2"] <= peak["oracle"]
    assert all(one == tokens[0] for one in tokens)
