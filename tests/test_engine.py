"""Whole runs on simulated rows: any workload on any allocator, held against a machine without limits and slow books."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from fakes import KINDS, FakeExecutor, Pool, Served, answer, make_pool, power_of_two, request, serve_on
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvbench.engine.clock import VirtualClock
from kvbench.engine.engine import Engine, serve
from kvbench.engine.interfaces import Load
from kvbench.engine.scheduler import Limits
from kvbench.engine.types import Batch, Request, Sampled, Ticket, Usage
from kvbench.errors import CellError, CellOutOfMemory
from kvbench.metrics.memory import split
from kvbench.metrics.records import ABORTED, FAILED, FINISHED, REJECTED, UNFINISHED, Hold
from kvbench.workloads.load import ClosedLoop, OpenLoop


@dataclass(frozen=True, slots=True)
class Cell:
    """One run to make; `concurrency` 0 is an open loop, `static` batches are for contiguous kinds."""

    kind: str
    pool_tokens: int
    limits: Limits
    requests: tuple[Request, ...]
    concurrency: int
    static: bool = False

    @property
    def block(self) -> int:
        """The block size, 0 on a contiguous allocator."""
        return int(self.kind.partition("-")[2] or 0)

    def serve(self, pool: Pool | None = None) -> Served:
        load: Load = ClosedLoop(self.requests, self.concurrency) if self.concurrency else OpenLoop(self.requests)
        pool = pool or make_pool(self.kind, self.pool_tokens, self.limits.max_model_len)
        served = serve_on(pool, load, self.limits, static=self.static)
        assert replace(pool.usage(), cached=0) == Usage(0, 0, self.pool_tokens), "rows leaked"
        assert load.next_s() is None and load.due(1e9) == [], "requests were never asked for"
        return served

    def fate(self, asked: Request) -> tuple[str, tuple[int, ...], list[int]]:
        """Status, prompt as served and output of a request, whatever else runs."""
        limit, prompt = self.limits.max_model_len, asked.prompt
        if len(prompt) + asked.max_tokens > limit:
            if not self.limits.truncate or asked.max_tokens >= limit:
                return REJECTED, prompt, []
            prompt = prompt[len(prompt) + asked.max_tokens - limit :]
        output = answer(asked, prompt)
        if self.block:
            rows = self.pool_tokens - self.pool_tokens % self.block
            if len(prompt) > rows:
                return REJECTED, prompt, []
            if len(prompt) + len(output) - 1 > rows:
                return FAILED, prompt, output[: rows + 1 - len(prompt)]
        elif self.pool_tokens < (limit if self.kind == "max" else power_of_two(limit)):
            return REJECTED, prompt, []
        return FINISHED, prompt, output


@st.composite
def cells(draw: st.DrawFn, kinds: Ordered[str] = (*KINDS, "paged-1", "paged-3", "paged-16")) -> Cell:
    kind = draw(st.sampled_from(kinds))
    limits = Limits(
        max_model_len=draw(st.one_of(st.integers(20, 40), st.integers(1, 40))),
        max_batched_tokens=draw(st.one_of(st.integers(1, 8), st.integers(9, 80))),
        max_sequences=draw(st.integers(1, 8)),
        truncate=draw(st.booleans()),
    )
    requests = []
    for number in range(draw(st.one_of(st.integers(4, 12), st.integers(0, 12)))):
        declared = draw(st.one_of(st.integers(8, 16), st.integers(1, 16)))
        own_end = kind not in ("pow2", "oracle") and draw(st.booleans())
        requests.append(
            request(
                number,
                draw(st.one_of(st.integers(1, 12), st.integers(1, 30))),
                declared,
                output_tokens=None if own_end else draw(st.integers(1, declared)),
                stop_ids=frozenset(range(5)) if own_end else frozenset(),
                scheduled_s=draw(st.integers(0, 64)) * 2**-9,
            )
        )
    concurrency = draw(st.one_of(st.just(len(requests)), st.integers(0, len(requests))))
    few = draw(st.one_of(st.integers(24, 72), st.integers(0, 130)))
    pool_tokens = few * 8 if kind == "paged-256" else few
    return Cell(kind, pool_tokens, limits, tuple(requests), concurrency)


@settings(max_examples=400)
@given(cells())
def test_any_workload_on_any_allocator(cell: Cell) -> None:  # inference-sim#529
    served = cell.serve()
    check_requests(cell, served)
    check_times(served)
    check_steps(cell, served)
    check_memory(cell, served)
    assert cell.serve() == served, "the same run twice gave other records"
    for record in served.run.requests:
        event(f"{record.status}, preempted: {record.preemptions > 0}, truncated: {record.truncated_tokens > 0}")


def check_requests(cell: Cell, served: Served) -> None:
    """Each request ends exactly as it must, with the tokens of a machine without limits."""
    records = served.run.requests
    assert [one.request for one in records] == sorted(asked.id for asked in cell.requests)
    for record, asked in zip(records, cell.requests, strict=True):
        status, prompt, output = cell.fate(asked)
        assert (record.status, record.output_tokens) == (status, len(output))
        assert (record.prompt_token_ids, record.output_token_ids) == (list(prompt), output)
        assert (record.input_tokens, record.truncated_tokens) == (len(prompt), len(asked.prompt) - len(prompt))
        if status == FINISHED:
            assert record.reason == ("stop" if output[-1] in asked.stop_ids else "length")
        else:
            assert "\n" not in record.reason and len(record.reason) > 20


def check_times(served: Served) -> None:
    """Every output token has the end of the step that sampled it; an admission the start of its first step."""
    run, batches = served.run, served.batches
    for record in run.requests:
        mine = [
            (run.steps[number], piece)
            for number, batch in enumerate(batches)
            for piece in batch
            if piece.id == record.request
        ]
        assert record.token_s == [step.end_s for step, piece in mine if piece.samples]
        assert all(early < late for early, late in pairwise(record.token_s))
        assert (record.first_s, record.last_s) == (
            (record.token_s[0], record.token_s[-1]) if record.token_s else (None, None)
        )
        assert record.admitted_s == (mine[0][0].start_s if mine else None)
        stays = [*dict.fromkeys(piece.stay for _, piece in mine)]
        gave_up = record.status == ABORTED and 0 < record.preemptions == len(stays)  # in the queue, preempted last
        assert stays == list(range(record.preemptions + bool(mine) - gave_up))
        assert record.cached_tokens == (mine[0][1].start if mine else 0)
        assert record.sent_s == record.scheduled_s <= (run.end_s if record.admitted_s is None else record.admitted_s)
    assert all(before.end_s <= after.start_s < after.end_s <= run.end_s for before, after in pairwise(run.steps))


def check_progress(cell: Cell, served: Served) -> None:
    """The oldest keeps its turn, and the work is bounded.

    A sequence is the oldest in one stretch that lasts to its end, and progresses by at least a token a step. So there
    are no more steps than one sequence at a time with one token a step would need.
    """
    steps, batches = served.run.steps, served.batches
    admitted = list(dict.fromkeys(piece.id for batch in batches for piece in batch))
    assert admitted == sorted(admitted, key=lambda id: (served.run.requests[id].scheduled_s, id)), "somebody overtook"
    turns = [batch[0].id for batch in batches]
    assert len(set(turns)) == bool(turns) + sum(before != after for before, after in pairwise(turns))
    accepted = [one for one in served.run.requests if one.status != REJECTED]
    assert len(steps) <= sum(one.input_tokens + one.output_tokens - 1 for one in accepted)


def check_steps(cell: Cell, served: Served) -> None:
    """All that run progress in each step, and steps record what was launched."""
    check_progress(cell, served)
    steps, batches = served.run.steps, served.batches
    generated: dict[int, int] = defaultdict(int)
    computed: dict[tuple[int, int], int] = {}
    for step, batch in zip(steps, batches, strict=True):
        assert 1 <= step.sequences == len(batch) == step.running <= cell.limits.max_sequences
        for piece in batch:
            if (piece.id, piece.stay) in computed:
                assert piece.start == computed[piece.id, piece.stay]
            elif cell.kind.startswith("cached"):
                assert piece.start % cell.block == 0
            else:
                assert piece.start == 0
        assert all(p.start < p.end <= p.known and p.samples == (p.end == p.known) for p in batch)
        computed.update({(piece.id, piece.stay): piece.end for piece in batch})
        decode = [p for p in batch if p.samples and p.end - p.start == 1 and generated[p.id]]
        for piece in batch:
            generated[piece.id] += piece.samples
        tokens = sum(piece.end - piece.start for piece in batch)
        assert tokens <= cell.limits.max_batched_tokens
        assert (step.decode_tokens, step.prefill_tokens) == (len(decode), tokens - len(decode))
        assert step.sampled_tokens == sum(piece.samples for piece in batch)
        assert step.context_tokens == sum(piece.end for piece in batch)
        assert step.attended_pairs == sum(position + 1 for p in batch for position in range(p.start, p.end))
        assert step.host_s == step.device_s == (step.end_s - step.start_s) / 2
    assert sum(step.preemptions for step in steps) == sum(one.preemptions for one in served.run.requests)


def check_memory(cell: Cell, served: Served) -> None:
    """The holds and the five parts of the pool are those of books that look at every sequence in every step."""
    run = served.run
    expected = slow_holds(cell, served)
    holds = {
        (step, hold.request): (hold.held_tokens, hold.asked_tokens, hold.final_tokens)
        for hold in run.holds
        for step in range(hold.first_step, hold.end_step)
    }
    assert holds == expected
    assert len(holds) == sum(hold.end_step - hold.first_step for hold in run.holds), "a step is in two holds"
    assert all(hold.first_step < hold.end_step for hold in run.holds)
    parts = split(run)
    for number, batch in enumerate(served.batches):
        used = reserved = internal = rounding = 0
        for piece in batch:
            held, asked, final = expected[number, piece.id]
            to_fill = max(0, min(final, held) - piece.end)
            round_up = held - max(min(asked, held), min(final, held))
            used, reserved, rounding = used + piece.end, reserved + to_fill, rounding + round_up
            internal += held - piece.end - to_fill - round_up
        free = cell.pool_tokens - used - reserved - internal - rounding
        found = (parts.used, parts.reserved, parts.internal, parts.rounding, parts.free)
        assert tuple(int(part[number]) for part in found) == (used, reserved, internal, rounding, free)
        assert min(used, reserved, internal, rounding, free) >= 0


def slow_holds(cell: Cell, served: Served) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Held, asked and final rows by step and request, from what was launched. A chunk from position 0 begins a stay."""
    inputs = {record.request: record.input_tokens for record in served.run.requests}
    asked_of = {asked.id: asked for asked in cell.requests}
    found: dict[tuple[int, int], tuple[int, int, int]] = {}
    stays: dict[int, list[tuple[int, int]]] = {}
    for number, batch in enumerate(served.batches):
        for piece in batch:
            if piece.start == 0:
                stays[piece.id] = []
            stay = stays[piece.id]
            held, asked = stay[-1] if stay else (0, 0)
            if not cell.block:
                asked = contiguous_need(cell, asked_of[piece.id], inputs[piece.id])
                held = asked if cell.kind == "max" else power_of_two(asked)
            elif piece.known > held:
                held, asked = -(-piece.known // cell.block) * cell.block, piece.known
            stay.append((held, asked))
            for back, (rows, need) in enumerate(reversed(stay)):
                found[number - back, piece.id] = (rows, need, piece.end)
    return found


def contiguous_need(cell: Cell, asked: Request, prompt: int) -> int:
    if cell.kind == "max":
        return cell.limits.max_model_len
    if cell.kind == "declared":
        return prompt + asked.max_tokens
    assert asked.output_tokens is not None
    if cell.kind == "oracle":
        return prompt + asked.output_tokens - 1
    return min(prompt + power_of_two(asked.output_tokens), cell.limits.max_model_len)


def test_what_a_step_records_by_hand() -> None:
    """Blocks of 4, five tokens a step. Request 0 (7 in, 3 out) prefills in two chunks, request 1 (2 in, 2 out) joins
    the second; both decode once together, then request 0 takes its third block for its last token."""
    requests = (request(0, 7, 3), request(1, 2, 2))
    run = Cell("paged-4", 32, Limits(16, 5), requests, 2).serve().run
    columns = "sequences prefill_tokens decode_tokens sampled_tokens attended_pairs context_tokens running waiting"
    columns += " used_tokens held_tokens free_tokens"
    assert [tuple(getattr(step, name) for name in columns.split()) for step in run.steps] == [
        (1, 5, 0, 0, 1 + 2 + 3 + 4 + 5, 5, 1, 1, 5, 8, 24),
        (2, 4, 0, 2, 6 + 7 + 1 + 2, 9, 2, 0, 9, 12, 20),
        (2, 0, 2, 2, 8 + 3, 11, 2, 0, 11, 12, 20),
        (1, 0, 1, 1, 9, 9, 1, 0, 9, 12, 20),
    ]
    assert run.holds == [Hold(1, 1, 3, 4, 2, 3), Hold(0, 0, 3, 8, 7, 9), Hold(0, 3, 4, 12, 9, 9)]
    assert [one.token_s for one in run.requests] == [
        [step.end_s for step in run.steps[first:end]] for first, end in ((1, 4), (1, 3))
    ]


@pytest.mark.parametrize("kind", ["paged-16", "max"])
def test_an_overload_shows_in_what_waits(kind: str) -> None:
    requests = tuple(request(number, 16, 8, scheduled_s=number * 2**-6) for number in range(50))
    run = Cell(kind, 64, Limits(24), requests, 0).serve().run
    waiting = [step.waiting for step in run.steps if step.end_s <= requests[-1].scheduled_s]
    third = len(waiting) // 3
    assert waiting[0] == 0 and max(waiting[:third]) < min(waiting[third:-third]) < min(waiting[-third:])
    assert max(one.admitted_s - one.scheduled_s for one in run.requests if one.admitted_s is not None) > 0.5


class Breaking(FakeExecutor):
    """Breaks at its second batch, in the verb that `when` names."""

    def __init__(self, pool: Pool, when: str) -> None:
        super().__init__(pool)
        self.when = when

    def launch(self, batch: Batch, now_s: float) -> Ticket:
        if self.when == "launch" and batch.step == 1:
            raise CellOutOfMemory("no room")
        return super().launch(batch, now_s)

    def collect(self, ticket: Ticket) -> Sampled:
        if self.when == "collect" and ticket.batch.step == 1:
            raise CellError("not a number")
        return super().collect(ticket)


@pytest.mark.parametrize("when", ["launch", "collect"])
@pytest.mark.parametrize("kind", ["paged-3", "declared"])
def test_a_run_that_breaks_off_leaves_whole_books(when: str, kind: str) -> None:
    pool = make_pool(kind, 64, 16)
    engine = Engine(pool, Breaking(pool, when), Limits(16, 8))
    load = ClosedLoop([request(number, 5, 1 + 3 * number) for number in range(4)], 3)
    with pytest.raises(CellError):
        serve(load, engine, VirtualClock())
    run = engine.run(engine.steps[-1].end_s)
    assert [one.status for one in run.requests] == [FINISHED] + [UNFINISHED] * 3
    assert [one.output_tokens for one in run.requests] == [len(one.token_s) for one in run.requests]
    assert len(run.steps) == 1 and split(run).pool.tolist() == [64]
    assert {hold.request for hold in run.holds} == {0, 1} and all(hold.first_step < hold.end_step for hold in run.holds)
    assert pool.usage() == Usage(0, 0, 64)
