"""The prefix cache in any order of calls, against a naive list of blocks and a memory in which every row says which
text it holds; and its cases by hand."""

from __future__ import annotations

import copy
import random
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from fakes import asking, request, rows_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from test_allocators import state

from kvbench.engine.types import COMMON, Holding, Sequence, Usage
from kvbench.paged.blocks import BlockPool

DRAWS = st.randoms(use_true_random=False)

Text = tuple[str, tuple[int, ...]]
"""A cache salt and all tokens from the first on: what the keys and values of a row depend on."""


class Naive:
    """The free blocks in one list, the next to be taken first, and what each indexed block is the end of. Looking
    anything up reads everything."""

    def __init__(self, blocks: int, size: int, reached: Counter[str]) -> None:
        self.size = size
        self.reached = reached
        self.free = list(range(1, blocks + 1))
        self.holds: dict[int, Text] = {}
        self.full: dict[int, int] = {}

    def find(self, salt: str, tokens: list[int], most: int) -> list[int]:
        found: list[int] = []
        for count in range(1, most + 1):
            text = salt, tuple(tokens[: count * self.size])
            block = [block for block, held in self.holds.items() if held == text]
            if not block:
                break
            found += block
        return found

    def taken(self, block: int) -> None:
        """A fresh block was handed out: any without content, else what was used longest ago and all that follows it."""
        contents = [free for free in self.free if free not in self.holds]
        if not contents:
            salt, tokens = self.holds[self.free[0]]
            lost = [b for b, (s, t) in self.holds.items() if s == salt and t[: len(tokens)] == tokens]
            for each in lost:
                del self.holds[each]
            contents = [free for free in self.free if free in lost]
            self.reached["evicted" if len(lost) == 1 else "evicted with what followed"] += 1
        assert block in contents, f"block {block} was taken before its turn"
        self.free.remove(block)

    def keep(self, sequence: Sequence, table: list[int]) -> None:
        full = sequence.computed // self.size
        if full > self.full.get(sequence.id, 0):
            self.full[sequence.id] = full
            for count, block in enumerate(table[:full], 1):
                text = sequence.request.cache_salt, tuple(sequence.tokens[: count * self.size])
                if text not in self.holds.values():
                    self.holds[block] = text

    def give_back(self, sequence_id: int, blocks: list[int]) -> None:
        self.full.pop(sequence_id, None)
        for block in blocks:
            if block in self.holds:
                self.free.append(block)
            else:
                self.free.insert(0, block)


class Shared(RuleBasedStateMachine):
    """Sequences of few different tokens arrive, grow, are computed, preempted and freed. `memory` says of every row
    which text its keys and values were computed from."""

    size = 0
    reached: Counter[str]

    @initialize(blocks=st.one_of(st.integers(4, 12), st.integers(0, 4)))
    def begin(self, blocks: int) -> None:
        self.pool = BlockPool(blocks * self.size + self.size - 1, self.size, prefix_caching=True)
        self.naive = Naive(blocks, self.size, self.reached)
        self.arrived = 0
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.rows: dict[int, int] = {}  # each may fill
        self.asked: dict[int, int] = {}
        self.memory: dict[int, Text] = {}
        self.announced: dict[int, Holding] = {}

    def admit(self, sequence: Sequence, rows: int) -> bool:
        before = state(self.pool)
        hits = self.naive.find(sequence.request.cache_salt, sequence.tokens, min(rows, sequence.known - 1) // self.size)
        fresh = -(-rows // self.size) - len(hits)
        possible = fresh <= len([block for block in self.naive.free if block not in hits])
        assert self.pool.reserve(sequence, rows) == possible
        if not possible:
            assert state(self.pool) == before and sequence.computed == 0, "a failed reservation left a trace"
            return False
        table = self.pool.table(sequence)
        assert table[: len(hits)] == hits and len(table) == len(hits) + fresh
        assert sequence.computed == len(hits) * self.size < sequence.known
        for block in hits:
            self.reached["hit a free block" if block in self.naive.free else "hit a held block"] += 1
        self.naive.free = [block for block in self.naive.free if block not in hits]
        for block in table[len(hits) :]:
            self.naive.taken(block)
        self.running.append(sequence)
        self.rows[sequence.id] = self.asked[sequence.id] = rows
        return True

    @rule(draw=DRAWS)
    def arrive(self, draw: random.Random) -> None:
        """A new text, which often begins like one that is known, or is one; sometimes it is computed at once."""
        known = [list(tokens) for _, tokens in self.memory.values() if len(tokens) % self.size == 0]
        twins = [sequence.tokens for sequence in (*self.running, *self.waiting)]
        tokens = list(draw.choice([[], draw.choice(known or [[]]), draw.choice(twins or [[]])]))
        tokens += (draw.randint(0, 1) for _ in range(draw.randint(not tokens, 2 * self.size)))
        sequence = Sequence.of(asking(self.arrived, tokens, cache_salt=draw.choice(["", "", "", "b"])))
        self.arrived += 1
        rows = draw.choice([len(tokens), draw.randint(1, len(tokens))])
        if self.admit(sequence, rows) and draw.randint(0, 1):
            self.fill(sequence, rows)

    @precondition(lambda self: self.waiting)
    @rule(draw=DRAWS)
    def come_back(self, draw: random.Random) -> None:
        sequence = draw.choice(self.waiting)
        if self.admit(sequence, sequence.known):
            self.waiting.remove(sequence)

    @precondition(lambda self: self.running)
    @rule(draw=DRAWS)
    def grow(self, draw: random.Random) -> None:
        """The sequence learns more tokens and wants room for some of what it knows."""
        sequence = draw.choice(self.running)
        sequence.tokens += (draw.randint(0, 1) for _ in range(draw.randint(0, 3)))
        rows = draw.randint(1, sequence.known)
        before, table = state(self.pool), list(self.pool.table(sequence))
        done = self.pool.reserve(sequence, rows)
        assert done or state(self.pool) == before, "a failed reservation left a trace"
        assert done == (-(-rows // self.size) - len(table) <= len(self.naive.free))
        now = self.pool.table(sequence)
        assert now[: len(table)] == table, "blocks moved under their sequence"
        for block in now[len(table) :]:
            self.naive.taken(block)
        if done:
            self.rows[sequence.id] = max(rows, self.rows[sequence.id])
        if len(now) > len(table):
            self.asked[sequence.id] = rows

    @precondition(lambda self: self.running)
    @rule(draw=DRAWS)
    def compute(self, draw: random.Random) -> None:
        sequence = draw.choice(self.running)
        most = self.rows[sequence.id]
        self.fill(sequence, draw.choice([most, draw.randint(0, most)]))

    def fill(self, sequence: Sequence, end: int) -> None:
        """Rows are written and committed, here and nowhere else."""
        start = sequence.computed
        sequence.computed = max(start, end)
        rows = rows_of(self.pool, sequence, sequence.computed)
        for position in range(start, sequence.computed):
            self.memory[rows[position]] = sequence.request.cache_salt, tuple(sequence.tokens[: position + 1])
        self.pool.commit(sequence)
        self.naive.keep(sequence, self.pool.table(sequence))

    @precondition(lambda self: self.running)
    @rule(draw=DRAWS)
    def leave(self, draw: random.Random) -> None:
        """For good, or to come back later and be computed again."""
        sequence = draw.choice(self.running)
        self.running.remove(sequence)
        others = {block for other in self.running for block in self.pool.table(other)}
        table = [block for block in reversed(self.pool.table(sequence)) if block not in others]
        self.pool.free(sequence)
        self.naive.give_back(sequence.id, table)
        self.note()
        assert sequence.id not in self.announced
        if draw.randint(0, 1):
            sequence.computed = 0
            self.waiting.append(sequence)

    def note(self) -> None:
        for change in self.pool.take_holdings():
            if change.held or change.shared:
                self.announced[change.sequence] = change
            else:
                last = self.announced.pop(change.sequence)
                assert change.sequence != COMMON or change.filled == last.held

    @invariant()
    def every_row_holds_what_each_of_its_sequences_computed(self) -> None:
        for sequence in self.running:
            for position, row in enumerate(rows_of(self.pool, sequence, sequence.computed)):
                text = sequence.request.cache_salt, tuple(sequence.tokens[: position + 1])
                assert self.memory[row] == text

    @invariant()
    def a_block_is_free_or_in_as_many_tables_as_hold_it(self) -> None:
        """And the announcements, usage and the naive list agree with what the tables say."""
        tables = {sequence.id: self.pool.table(sequence) for sequence in self.running}
        holders: dict[int, list[int]] = defaultdict(list)
        for number, table in tables.items():
            assert len(set(table)) == len(table), "a block is twice in a table"
            for block in table:
                holders[block].append(number)
        assert sorted([*holders, *self.naive.free]) == list(range(1, self.pool.blocks + 1))
        self.note()
        common = [block for block, those in holders.items() if len(those) > 1]
        expected = {COMMON: (len(common) * self.size, 0)} if common else {}
        for number, table in tables.items():
            shared = sum(block in common for block in table) * self.size
            expected[number] = len(table) * self.size - shared, shared
        assert {one.sequence: (one.held, one.shared) for one in self.announced.values()} == expected
        for sequence in self.running:
            holding = self.announced[sequence.id]
            assert holding.asked == max(0, self.asked[sequence.id] - holding.shared)
        filled = {row for one in self.running for row in rows_of(self.pool, one, one.computed)}
        logical, held = sum(one.computed for one in self.running), len(holders) * self.size
        cached = sum(block in self.naive.holds for block in self.naive.free) * self.size
        free = self.pool.pool_tokens - held
        assert self.pool.usage() == Usage(len(filled), held, free, cached, logical - len(filled))

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for sequence in self.running:
            self.pool.free(sequence)
        assert replace(self.pool.usage(), cached=0) == Usage(0, 0, self.pool.pool_tokens)
        large = Sequence.of(request(-2, max(1, self.pool.blocks * self.size), 1, cache_salt="nobody's"))
        assert self.pool.reserve(large, large.known) == bool(self.pool.blocks)
        assert self.pool.usage().cached == 0


def machine(size: int) -> type[Shared]:
    return type(f"Shared in {size}", (Shared,), {"size": size, "reached": Counter()})


@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_order_of_calls_with_blocks_of(size: int) -> None:  # sglang#11970
    run_state_machine_as_test(machine(size), settings=settings(max_examples=50, stateful_step_count=40))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_long_walk_reaches_every_case_with_blocks_of(size: int) -> None:
    draw, pool = random.Random(size), machine(size)()
    pool.begin(blocks=20)
    for _ in range(8000):
        moves = [pool.arrive, *([pool.grow, pool.compute, pool.leave, pool.leave] if pool.running else [])]
        draw.choice(moves + [pool.come_back] * bool(pool.waiting))(draw)
        pool.every_row_holds_what_each_of_its_sequences_computed()
        pool.a_block_is_free_or_in_as_many_tables_as_hold_it()
    pool.teardown()
    assert len(pool.reached) == 4, pool.reached


def letters(text: str) -> list[int]:
    """A token a letter."""
    return list(map(ord, text))


def served(pool: BlockPool, number: int, prompt: str, salt: str = "", *, leave: bool = False) -> Sequence:
    """A sequence whose prompt, a token a letter, has been computed, and who may have gone again."""
    sequence = Sequence.of(asking(number, letters(prompt), cache_salt=salt))
    assert pool.reserve(sequence, sequence.known)
    sequence.cached_tokens, sequence.computed = sequence.computed, sequence.known
    pool.commit(sequence)
    if leave:
        pool.free(sequence)
    return sequence


def hit(pool: BlockPool, prompt: str, salt: str = "") -> int:
    """How many tokens of a prompt would be found."""
    return served(copy.deepcopy(pool), 10**6, prompt, salt).cached_tokens


@pytest.mark.parametrize(
    ("prompt", "rows"),
    [("abcd", 2), ("abcde", 4), ("abc", 2), ("ab", 0), ("a", 0), ("abcdefgh", 4), ("abxd", 2), ("xbcde", 0)],
)
def test_a_hit_is_of_full_blocks_and_leaves_the_last_token_to_run(prompt: str, rows: int) -> None:
    pool = BlockPool(40, 2, prefix_caching=True)
    served(pool, 0, "abcd", leave=True)
    assert hit(pool, prompt) == rows


def test_equal_tokens_after_different_beginnings_are_different_texts() -> None:
    pool = BlockPool(40, 2, prefix_caching=True)
    served(pool, 0, "aabb", leave=True)
    assert hit(pool, "ccbbx") == 0
    assert hit(pool, "bbx") == 0


def test_two_salts_share_nothing() -> None:  # vllm#44701
    pool = BlockPool(60, 2, prefix_caching=True)
    for number, salt in enumerate(["", "a", "b"]):
        assert served(pool, number, "abcdef", salt).cached_tokens == 0
    assert [hit(pool, "abcdef", salt) for salt in ("", "a", "b", "c")] == [4, 4, 4, 0]
    assert pool.usage().saved == 0


def test_without_the_cache_nothing_is_looked_up_or_kept() -> None:
    pool = BlockPool(40, 2)
    served(pool, 0, "abcd", leave=True)
    assert hit(pool, "abcdef") == 0 and pool.usage() == Usage(0, 0, 40)


def test_the_least_recently_used_is_evicted_first_and_ends_before_beginnings() -> None:
    pool = BlockPool(12, 2, prefix_caching=True)
    served(pool, 0, "aaAA", leave=True)
    served(pool, 1, "bbBB", leave=True)
    served(pool, 2, "aax", leave=True)  # now `aa` was used last; its end `AA` was not
    assert pool.usage().cached == 8
    found = []
    for number, taken in enumerate(["zzzzzz", "yy", "ww"], 3):  # the first takes the two blocks without content too
        served(pool, number, taken, leave=True)
        found.append((hit(pool, "aaAAx"), hit(pool, "bbBBx")))
    assert found == [(2, 4), (2, 2), (2, 0)] and pool.usage().cached == 12


def test_a_block_that_was_found_is_taken_back_from_the_free_ones() -> None:
    pool = BlockPool(6, 2, prefix_caching=True)
    served(pool, 0, "aabb", leave=True)
    again = served(pool, 1, "aabbc")
    assert again.cached_tokens == 4 and pool.usage() == Usage(5, 6, 0)
    assert not pool.reserve(Sequence.of(request(2, 1, 1)), 1)


def test_a_hit_that_lacks_room_for_the_rest_holds_nothing() -> None:
    pool = BlockPool(8, 2, prefix_caching=True)
    served(pool, 0, "aabb", leave=True)
    served(pool, 1, "cc")
    long = Sequence.of(asking(2, letters("aabbdddd")))
    before = state(pool)
    assert not pool.reserve(long, 8) and long.computed == 0 and state(pool) == before


def test_equal_texts_computed_at_once_stay_apart_and_what_follows_can_be_found_after_either() -> None:
    """Two twins compute the same block; the second's stays out of the index. When the first's is evicted, what hung on
    it can no longer be found, until the second grows and brings its own in."""
    pool = BlockPool(12, 2, prefix_caching=True)
    twins = [Sequence.of(asking(number, letters("tt"))) for number in range(2)]
    for twin in twins:
        assert pool.reserve(twin, 2)
    for twin in twins:
        twin.computed = 2
        pool.commit(twin)
    first, second = twins
    second.tokens += letters("ss")
    assert pool.reserve(second, 4)
    second.computed = 4
    pool.commit(second)
    assert pool.usage() == Usage(6, 6, 6) and hit(pool, "ttssx") == 4  # one's beginning and the other's end
    pool.free(first)
    served(pool, 2, "zzzzzzzz", leave=True)  # evicts the first's block, and with it the way to the second's
    assert hit(pool, "ttx") == 0
    second.tokens += letters("uu")
    assert pool.reserve(second, 6)
    second.computed = 6
    pool.commit(second)
    assert hit(pool, "ttssx") == 4
    pool.free(second)


def test_what_is_shared_is_held_once_by_hand() -> None:
    """Blocks of 2. The second finds 2 of the first's blocks, the third finds 1: it is common to three, then to two, and
    the one whom the others leave has it to itself again."""
    pool = BlockPool(40, 2, prefix_caching=True)
    one = served(pool, 1, "aabbc")
    assert pool.take_holdings() == [Holding(1, 6, 5, 0)]
    two = served(pool, 2, "aabbdd")
    assert pool.take_holdings() == [Holding(1, 2, 1, 0, 4), Holding(COMMON, 4, 4, 0), Holding(2, 2, 2, 0, 4)]
    three = served(pool, 3, "aaee")
    assert pool.take_holdings() == [Holding(3, 2, 2, 0, 2)]
    assert pool.usage() == Usage(filled=9, held=10, free=30, cached=0, saved=6)
    pool.free(two)
    changes = [Holding(2, 0, 0, 6), Holding(1, 4, 3, 0, 2), Holding(COMMON, 0, 0, 4), Holding(COMMON, 2, 2, 0)]
    assert pool.take_holdings() == changes
    pool.free(one)
    assert pool.take_holdings() == [Holding(1, 0, 0, 5), Holding(3, 4, 4, 0), Holding(COMMON, 0, 0, 2)]
    assert pool.usage() == Usage(filled=4, held=4, free=36, cached=4)
    pool.free(three)
    assert pool.take_holdings() == [Holding(3, 0, 0, 4)]
