"""Whole runs with the prefix cache on: any workload gives the tokens of a machine without limits, the books are those
of somebody who looks at every row in every step, and hits are counted once."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace

import pytest
from fakes import CACHED_KINDS, VOCABULARY, answer, asking, make_pool, request, serve_on
from hypothesis import event, given, settings
from hypothesis import strategies as st
from test_engine import Cell, check_requests, check_steps, check_times

from kvbench.engine.ledger import Ledger
from kvbench.engine.scheduler import Limits
from kvbench.engine.types import COMMON, Holding, Sequence, Usage
from kvbench.metrics.memory import split
from kvbench.metrics.records import FINISHED, Hold, Run
from kvbench.paged.blocks import BlockPool
from kvbench.workloads.load import ClosedLoop, OpenLoop


@dataclass(slots=True, eq=False)
class Stay:
    """A sequence's time in memory; `final` rows are filled when it ends, `asked` as it was when blocks were taken."""

    sequence: Sequence
    asked: int = 0
    final: int = 0


class Watched(BlockPool):
    """A pool that keeps what it is asked about once a step: each stay with its table, rows asked for and filled."""

    def __init__(self, pool_tokens: int, block_size: int, *, prefix_caching: bool = True, swap_tokens: int = 0) -> None:
        super().__init__(pool_tokens, block_size, prefix_caching=prefix_caching, swap_tokens=swap_tokens)
        self.log: list[list[tuple[Stay, list[int], int, int]]] = []
        self.stays: dict[int, Stay] = {}

    def reserve(self, sequence: Sequence, rows: int) -> bool:
        before = list(self._tables.get(sequence.id, []))
        if not super().reserve(sequence, rows):
            return False
        if self.table(sequence) != before:
            self.stays.setdefault(sequence.id, Stay(sequence)).asked = rows
        return True

    def grow(self, sequences: Ordered[Sequence]) -> int:
        for sequence in sequences:
            self.stays[sequence.id].asked = sequence.computed + 1
        return super().grow(sequences)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        super().fork(parent, child)
        self.stays[child.id] = Stay(child, asked=child.computed)

    def swap_out(self, sequence: Sequence) -> bool:
        if done := super().swap_out(sequence):
            self.stays.pop(sequence.id).final = sequence.computed
        return done

    def free(self, sequence: Sequence) -> None:
        if sequence.id in self.stays:
            self.stays.pop(sequence.id).final = sequence.computed
        super().free(sequence)

    def usage(self) -> Usage:
        now = [(s, list(self.table(s.sequence)), s.asked, s.sequence.computed) for s in self.stays.values()]
        self.log.append(now)
        return super().usage()


@st.composite
def cells(draw: st.DrawFn) -> Cell:
    """Requests of a few texts, cut anywhere and followed by a few tokens of their own."""
    kind = draw(st.sampled_from(CACHED_KINDS))
    limits = Limits(
        max_model_len=60,
        max_batched_tokens=draw(st.one_of(st.integers(1, 8), st.integers(9, 80))),
        max_sequences=draw(st.integers(1, 8)),
    )
    requests = []
    for number in range(draw(st.one_of(st.integers(6, 12), st.integers(1, 12)))):
        text, own = draw(st.integers(0, 1)), draw(st.integers(0, 6))
        length = draw(st.one_of(st.integers(not own, 40), st.integers(16, 20)))
        common = [(7 * text + position) % VOCABULARY for position in range(length)]
        prompt = common + [(number + position) % VOCABULARY for position in range(own)]
        declared = draw(st.one_of(st.integers(10, 14), st.integers(1, 14)))
        requests.append(
            asking(
                number,
                prompt,
                declared,
                output_tokens=draw(st.integers(1, declared)),
                cache_salt=draw(st.sampled_from(["", "", "", "b"])),
                scheduled_s=draw(st.integers(0, 64)) * 2**-9,
            )
        )
    concurrency = draw(st.one_of(st.just(len(requests)), st.integers(0, len(requests))))
    return Cell(kind, draw(st.one_of(st.integers(48, 80), st.integers(16, 160))), limits, tuple(requests), concurrency)


@settings(max_examples=200)
@given(cells())
def test_any_workload_with_the_cache_on(cell: Cell) -> None:  # inference-sim#529
    pool = Watched(cell.pool_tokens, cell.block)
    served = cell.serve(pool)
    check_requests(cell, served)
    check_times(served)
    check_steps(cell, served)
    check_rows(served.run, pool)
    assert cell.serve() == served, "the same run twice gave other records"
    shared = any(hold.request == COMMON for hold in served.run.holds)
    hit, preempted = (any(getattr(r, name) for r in served.run.requests) for name in ("cached_tokens", "preemptions"))
    event(f"hit: {hit}, shared: {shared}, preempted: {preempted}")


def check_rows(run: Run, pool: Watched) -> None:
    """The five parts of the pool, row by row: one that several hold is filled or was only rounded up to, any other is
    its sequence's."""
    parts, size = split(run), pool.block_size
    for number, (step, stays) in enumerate(zip(run.steps, pool.log, strict=False)):
        holders: dict[int, list[tuple[Stay, int, int, int]]] = defaultdict(list)
        for stay, table, asked, filled in stays:
            for place, block in enumerate(table):
                holders[block].append((stay, place * size, asked, filled))
        rows = Counter[str](free=step.pool_tokens - len(holders) * size)
        for those in holders.values():
            if len(those) > 1:
                (full,) = {min(size, filled - first) for _, first, _, filled in those}
                rows["used"] += full
                rows["rounding"] += size - full
                continue
            ((stay, first, asked, filled),) = those
            for row in range(first, first + size):
                used, reserved, internal = row < filled, row < stay.final, row < asked
                rows["used" if used else "reserved" if reserved else "internal" if internal else "rounding"] += 1
        names = ("used", "reserved", "internal", "rounding", "free")
        assert [int(getattr(parts, name)[number]) for name in names] == [rows[name] for name in names]
        assert step.logical_tokens == step.context_tokens == sum(filled for *_, filled in stays)
        assert 0 <= step.cached_tokens <= step.free_tokens


def test_a_stay_goes_on_while_all_its_rows_are_shared() -> None:
    ledger = Ledger()
    ledger.note([Holding(0, 4, 3, 0)], 0)
    ledger.note([Holding(0, 0, 0, 0, shared=4), Holding(COMMON, 4, 4, 0)], 1)
    ledger.note([Holding(COMMON, 0, 0, 4), Holding(0, 4, 3, 0)], 2)
    ledger.note([Holding(0, 0, 0, 4)], 3)
    alone = [Hold(0, 0, 1, 4, 3, 4), Hold(0, 1, 2, 0, 0, 0), Hold(0, 2, 3, 4, 3, 4)]
    assert ledger.holds == [Hold(COMMON, 1, 2, 4, 4, 4), *alone]


def test_hits_by_hand() -> None:
    """Blocks of 4, one client. The second request finds 8 of its 11 tokens and runs 3; the third is the first's text to
    a block's end, and its last block must run again."""
    prompts = [list(range(10)), [*range(8), 40, 41, 42], list(range(8))]
    run, batches, _ = serve_on(
        BlockPool(64, 4, prefix_caching=True),
        ClosedLoop([asking(number, prompt, 1) for number, prompt in enumerate(prompts)], 1),
        Limits(32),
    )
    assert [(piece.id, piece.start, piece.end) for (piece,) in batches] == [(0, 0, 10), (1, 8, 11), (2, 4, 8)]
    assert [one.cached_tokens for one in run.requests] == [0, 8, 4]
    assert [step.cached_tokens for step in run.steps] == [0, 0, 4]


def test_random_prompts_in_a_tight_pool_hit_nothing() -> None:  # vllm#25780
    """Preempted sequences find what they had computed themselves; that is no hit."""
    draw = random.Random(5)
    requests = [asking(n, [draw.randrange(10**6) for _ in range(20)], 30) for n in range(12)]
    run, batches, _ = serve_on(BlockPool(96, 4, prefix_caching=True), ClosedLoop(requests, 6), Limits(64, 64))
    assert sum(one.preemptions for one in run.requests) > 3
    assert any(piece.stay and piece.start for batch in batches for piece in batch), "nothing was found again"
    first = {(piece.id, piece.stay): piece for batch in reversed(batches) for piece in batch}
    assert all(piece.start == 0 for (_, stay), piece in first.items() if not stay)
    assert [one.cached_tokens for one in run.requests] == [0] * 12
    assert [one.output_token_ids for one in run.requests] == [answer(one) for one in requests]


def test_a_preemption_resumes_behind_what_is_still_there_and_keeps_the_count() -> None:  # nano-vllm PR#211
    """Both begin alike. The second is preempted with 9 rows filled, finds its two full blocks again, and its record
    says what it found when it first came: one block of the first's."""
    common = [1, 2, 3, 4]
    requests = [asking(0, [*common, 5], 16), asking(1, [*common, 7, 8, 9], 9, scheduled_s=2**-9)]
    pool = BlockPool(24, 4, prefix_caching=True)
    run, batches, _ = serve_on(pool, OpenLoop(requests), Limits(32))
    second = run.requests[1]
    assert second.preemptions > 0 and second.cached_tokens == 4
    starts: dict[tuple[int, int], int] = {}
    for batch in batches:
        for piece in batch:
            starts.setdefault((piece.id, piece.stay), piece.start)
    assert all(start >= 8 for (number, stay), start in starts.items() if number == 1 and stay)
    assert [one.output_token_ids for one in run.requests] == [answer(one) for one in requests]
    assert replace(pool.usage(), cached=0) == Usage(0, 0, 24)


@pytest.mark.parametrize("kind", CACHED_KINDS)
def test_a_failed_allocation_at_any_call_changes_no_token(kind: str) -> None:  # vllm#16832
    requests = [asking(n, [*range(17), 30 + n, 31 + n], 9) for n in range(5)]
    expected = [answer(one) for one in requests]
    fails = hits = 0
    while True:
        run, _, calls = serve_on(make_pool(kind, 96, 32), ClosedLoop(requests, 5), Limits(32, 7, 4), fails={fails})
        assert [one.output_token_ids for one in run.requests] == expected, f"call {fails}"
        split(run)
        hits += sum(one.cached_tokens for one in run.requests)
        if (fails := fails + 1) > calls:
            break
    assert fails > 40 and hits > 20


def test_what_only_equal_salts_share() -> None:  # vllm#44701
    requests = [replace(request(0, 20, 2), id=n, cache_salt="ab"[n % 2]) for n in range(6)]
    run, *_ = serve_on(BlockPool(200, 4, prefix_caching=True), ClosedLoop(requests, 1), Limits(32))
    assert [one.cached_tokens for one in run.requests] == [0, 0, 16, 16, 16, 16]
    assert all(one.status == FINISHED for one in run.requests)
