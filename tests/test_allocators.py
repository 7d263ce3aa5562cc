"""One machine tries every allocator in any order of calls; the buddies are also held against a naive list of ranges."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from fakes import KINDS, make_pool, request, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvbench.contiguous.buddy import BuddyChunks
from kvbench.contiguous.slots import Slots
from kvbench.engine.sequence import Sequence
from kvbench.engine.types import Holding, Usage
from kvbench.errors import KvbenchError
from kvbench.paged.blocks import BlockPool

COUNTERS = {"external_fragmentation_events", "_refused"}


def state(thing: object) -> dict[str, Any]:
    """All that an allocator knows, but for what it counts."""
    return {
        name: state(value) if hasattr(value, "__dict__") else copy.deepcopy(value)
        for name, value in vars(thing).items()
        if name not in COUNTERS
    }


class Books(RuleBasedStateMachine):
    """Random reservations, growth, filling and freeing. `holders` are the sequences that hold rows, `held` is what the
    allocator's own announcements add up to, `rows` where each sequence's rows lay when last seen."""

    kind = ""

    @initialize(pool=st.integers(0, 700), max_model_len=st.integers(2, 160))
    def begin(self, pool: int, max_model_len: int) -> None:
        self.pool = make_pool(self.kind, pool, max_model_len)
        self.max_model_len = max_model_len
        self.arrived = 0
        self.holders: list[Sequence] = []
        self.held: dict[int, int] = {}
        self.rows: dict[int, list[int]] = {}

    def fresh(self) -> Slots | BlockPool:
        return make_pool(self.kind, self.pool.pool_tokens, self.max_model_len)

    def reserve(self, sequence: Sequence, rows: int) -> bool:
        before = state(self.pool)
        done = self.pool.reserve(sequence, rows)
        assert done or state(self.pool) == before, "a failed reservation left a trace"
        if done:
            assert len(set(rows_of(self.pool, sequence, rows))) == rows, "the rows asked for are not all addressable"
        return done

    def note(self) -> None:
        for change in self.pool.take_holdings():
            if change.held:
                assert change.held > self.held.get(change.sequence, 0), "a change that changes nothing"
                self.held[change.sequence] = change.held
            else:
                del self.held[change.sequence]
                self.rows.pop(change.sequence, None)

    def pick(self, data: st.DataObject) -> Sequence:
        return data.draw(st.sampled_from(self.holders))

    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        """A sequence asks for the first time, for as many rows as the engine could ask of it."""
        prompt = data.draw(st.integers(1, self.max_model_len - 1))
        declared = data.draw(st.integers(1, self.max_model_len - prompt))
        output = data.draw(st.integers(1, declared))
        sequence = Sequence.of(request(self.arrived, prompt, output, max_tokens=declared))
        self.arrived += 1
        rows = data.draw(st.integers(1, prompt + output - 1))
        before = state(self.pool)
        assert self.pool.could_hold(sequence, rows) == self.fresh().reserve(sequence, rows)
        assert state(self.pool) == before, "a question left a trace"
        if self.reserve(sequence, rows):
            self.holders.append(sequence)
        else:
            self.pool.free(sequence)
            assert state(self.pool) == before, "freeing what holds nothing left a trace"

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        self.reserve(sequence, data.draw(st.integers(1, sequence.prompt_tokens + sequence.request.max_tokens)))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        sequence.computed = data.draw(st.integers(sequence.computed, self.held[sequence.id]))
        self.pool.commit(sequence)

    @precondition(lambda self: self.holders and isinstance(self.pool, Slots))
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        """It ends and keeps its rows, in a stay of its own in which nothing is filled."""
        sequence = self.pick(data)
        assert isinstance(self.pool, Slots)
        held = self.held[sequence.id]
        self.pool.retire(sequence)
        changes = self.pool.take_holdings()
        assert changes == [Holding(sequence.id, 0, 0, sequence.computed), Holding(sequence.id, held, held, 0)]
        sequence.computed = 0

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        self.holders.remove(sequence)
        self.pool.free(sequence)
        *_, last = changes = self.pool.take_holdings()
        assert (len(changes), last.sequence, last.held, last.filled) == (1, sequence.id, 0, sequence.computed)
        del self.held[sequence.id], self.rows[sequence.id]

    @invariant()
    def every_row_has_one_owner(self) -> None:
        self.note()
        assert set(self.held) == {sequence.id for sequence in self.holders}
        for sequence in self.holders:
            now = rows_of(self.pool, sequence, self.held[sequence.id])
            before = self.rows.get(sequence.id, [])
            assert now[: len(before)] == before, "rows moved under their sequence"
            self.rows[sequence.id] = now
        rows = [row for mine in self.rows.values() for row in mine]
        assert len(set(rows)) == len(rows), "a row has two owners"
        if isinstance(self.pool, BlockPool):
            size = self.pool.block_size
            allowed = range(size, size + self.pool.pool_tokens)
            assert all(len(self.pool.table(one)) * size == self.held[one.id] for one in self.holders)
        else:
            allowed = range(self.pool.pool_tokens)
        assert not rows or (min(rows) in allowed and max(rows) in allowed)

    @invariant()
    def usage_adds_up(self) -> None:
        filled, held = sum(one.computed for one in self.holders), sum(self.held.values())
        assert self.pool.usage() == Usage(filled, held, self.pool.pool_tokens - held)

    def teardown(self) -> None:
        """Everything returns: the pool takes the largest sequences again, as many as a new one and in as many rows."""
        if not hasattr(self, "pool"):
            return
        for sequence in self.holders:
            self.pool.free(sequence)
        self.note()
        assert not self.held
        assert self.pool.usage() == Usage(0, 0, self.pool.pool_tokens)
        fresh, longest = self.fresh(), self.max_model_len
        for number in range(-2, 800):
            if self.kind == "oracle":
                large = Sequence.of(request(number, longest, 1))
            else:
                large = Sequence.of(request(number, longest - 1, 1))
            taken = self.pool.reserve(large, large.known)
            assert taken == fresh.reserve(large, large.known)
            assert self.pool.usage() == fresh.usage()
            if not taken:
                break
        else:
            raise AssertionError("an endless pool")


@pytest.mark.parametrize("kind", KINDS)
def test_books_of(kind: str) -> None:
    machine = type(f"Books of {kind}", (Books,), {"kind": kind})
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=40))


class Ranges:
    """A buddy system as a list of what is taken: an aligned range is free if nothing taken overlaps it."""

    def __init__(self, pool: int, chunk: int) -> None:
        self.pool, self.chunk = pool // chunk * chunk, chunk
        self.taken: list[tuple[int, int]] = []

    def is_free(self, base: int, size: int) -> bool:
        return all(base + size <= other or other + length <= base for other, length in self.taken)

    def around(self, base: int, size: int) -> int:
        """Size of the largest aligned free range around a free one."""
        while size < self.chunk and self.is_free(base - base % (2 * size), 2 * size):
            size *= 2
        return size

    def take(self, size: int) -> int | None:
        """The tightest fit, the lowest of them."""
        fits = [base for base in range(0, self.pool, size) if size <= self.chunk and self.is_free(base, size)]
        if not fits:
            return None
        base = min(fits, key=lambda base: (self.around(base, size), base))
        self.taken.append((base, size))
        return base


@settings(max_examples=150)
@given(st.integers(0, 5), st.integers(0, 300), st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_buddies_do_what_a_list_of_ranges_does(log_chunk: int, pool: int, calls: list[tuple[bool, int]]) -> None:
    buddies, naive = BuddyChunks(pool, 1 << log_chunk), Ranges(pool, 1 << log_chunk)
    assert buddies.largest == (naive.chunk if naive.pool else 0)
    for give_back, number in calls:
        if give_back and naive.taken:
            base, size = naive.taken.pop(number % len(naive.taken))
            buddies.give_back(base, size)
        else:
            size = buddies.rounded(number)
            assert size // 2 < number <= size
            assert buddies.take(size) == naive.take(size)


def test_a_reservation_is_refused_once_for_external_fragmentation() -> None:
    pool = Slots(32, 32, "declared")
    eights = [Sequence.of(request(number, 5, 3)) for number in range(4)]
    assert all(pool.reserve(eight, 5) for eight in eights)
    pool.free(eights[0])
    pool.free(eights[2])
    large = Sequence.of(request(9, 10, 5))
    for _ in range(3):
        assert not pool.reserve(large, 10)  # 16 rows are free, but 8 here and 8 there
    assert pool.external_fragmentation_events == 1
    pool.free(eights[1])
    assert pool.reserve(large, 10)
    pool.free(large)
    assert pool.reserve(eights[0], 5)
    assert pool.reserve(eights[2], 5)
    assert not pool.reserve(large, 10)  # only 8 are free: shortage, not fragmentation
    assert pool.external_fragmentation_events == 1
    pool.free(eights[0])
    assert not pool.reserve(large, 10)  # again 8 here and 8 there, in another stay in the queue
    assert pool.external_fragmentation_events == 2


@pytest.mark.parametrize("rows", [7, 9])
def test_an_answer_and_a_reservation_agree_beyond_what_the_policy_asks_for(rows: int) -> None:
    """The policy asks for 5 rows and gets 8."""
    pool, sequence = Slots(64, 16, "declared"), Sequence.of(request(0, 3, 2))
    assert pool.could_hold(sequence, rows) == pool.reserve(sequence, rows) == (rows <= 8)


@pytest.mark.parametrize(
    ("policy", "asked"), [("max", 40), ("declared", 5 + 20), ("pow2", 5 + 16), ("oracle", 5 + 9 - 1)]
)
def test_what_a_policy_asks_for(policy: str, asked: int) -> None:
    pool = Slots(200, 40, policy)
    sequence = Sequence.of(request(0, 5, 9, max_tokens=20))
    assert pool.reserve(sequence, 5)
    (holding,) = pool.take_holdings()
    assert (holding.asked, holding.held) == (asked, asked if policy == "max" else 1 << (asked - 1).bit_length())


def test_pow2_never_asks_for_more_than_the_longest_request() -> None:
    assert Slots(64, 40, "pow2").asked(Sequence.of(request(0, 20, 17, max_tokens=20))) == 40
    assert Slots(64, 64, "pow2").asked(Sequence.of(request(0, 8, 25))) == 8 + 32  # the paper's example


@pytest.mark.parametrize(("pool", "block", "blocks"), [(64, 1, 64), (64, 3, 21), (64, 16, 4), (64, 256, 0), (0, 1, 0)])
def test_rows_that_fill_no_block_stay_free(pool: int, block: int, blocks: int) -> None:
    books = BlockPool(pool, block)
    all_of_it = Sequence.of(request(0, max(1, blocks * block), 1))
    assert books.blocks == blocks
    assert books.reserve(all_of_it, all_of_it.known) == bool(blocks)
    assert books.usage().free == pool - blocks * block


def test_what_cannot_be_an_allocator() -> None:
    with pytest.raises(KvbenchError, match="block size"):
        BlockPool(64, 0)
    with pytest.raises(KvbenchError, match="unknown reservation policy 'pow3'; choose from max, declared"):
        Slots(64, 8, "pow3")


@pytest.mark.parametrize("kind", ["paged-4", "max", "declared"])
def test_filling_more_than_is_held_is_a_fault(kind: str) -> None:
    pool = make_pool(kind, 64, 16)
    sequence = Sequence.of(request(0, 4, 4))
    assert pool.reserve(sequence, 4)
    sequence.computed = 17
    with pytest.raises(AssertionError, match="rows it does not hold"):
        pool.commit(sequence)
