"""Blocks that are shared, copied and moved, in any order of calls: against a naive list of blocks and a memory in which
every row says which text it holds."""

from __future__ import annotations

import os
import pickle
import random
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from fakes import asking, rows_of
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

from kvbench.engine.types import COMMON, COPY, IN, OUT, Holding, Sequence, Usage
from kvbench.paged.blocks import BlockPool

DRAWS = st.randoms(use_true_random=False)

Text = tuple[str, tuple[int, ...]]
"""A cache salt and all tokens from the first on: what the keys and values of a row depend on."""

CASES = {
    *("evicted", "evicted with what followed", "hit a free block", "hit a held block", "hit while coming back in"),
    *("grown at once", "not sure to grow"),
    *("forked", "forked at a block's end", "copied on write", "left alone with the original", "a copy given up"),
    *(
        "hit another sample's prompt",
        "swapped out",
        "no room to swap",
        "swapped in",
        "given up while outside",
        "preempted",
    ),
}


def state(pool: BlockPool) -> bytes:
    """All that a pool knows."""
    return pickle.dumps(vars(pool))


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
        blocks = {text: block for block, text in self.holds.items()}
        while len(found) < most and (salt, tuple(tokens[: (len(found) + 1) * self.size])) in blocks:
            found.append(blocks[salt, tuple(tokens[: (len(found) + 1) * self.size])])
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
    """Sequences of few different tokens arrive, grow, are forked, computed, preempted, put aside and given up.

    `memory` and `outside` say of every row of the pool and of the host which text its keys and values were computed
    from. As in an engine, moves are owed until something is computed (`owed`), whoever was given rows meanwhile is not
    put aside, and nobody writes to rows that were not asked for since the last fork (`rows`).
    """

    size = 0
    caching = True
    reached: Counter[str]

    @initialize(blocks=st.one_of(st.integers(4, 12), st.integers(0, 4)), host=st.integers(0, 8))
    def begin(self, blocks: int, host: int) -> None:
        self.pool = BlockPool(
            blocks * self.size + self.size - 1, self.size, prefix_caching=self.caching, swap_tokens=host * self.size
        )
        self.longest = (blocks + 2) * self.size  # a little more than the pool holds
        self.naive = Naive(blocks, self.size, self.reached)
        self.host_free = host
        self.host_read = 0
        self.arrived = 0
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.aside: list[Sequence] = []
        self.rows: dict[int, int] = {}
        self.asked: dict[int, int] = {}
        self.memory: dict[int, Text] = {}
        self.outside: dict[int, Text] = {}
        self.owed: set[int] = set()  # the ids of those who were given rows, or lost them
        self.committed: dict[int, int] = {}  # how much each had computed when the pool was told so
        self.announced: dict[int, Holding] = {}

    def count(self, rows: int) -> int:
        return -(-rows // self.size)

    def move(self) -> None:
        """All that goes out, then the copies, then all that comes in; no row is the target of two."""
        moves = self.pool.take_moves()
        assert [move.way for move in moves] == sorted((move.way for move in moves), key=[OUT, COPY, IN].index)
        for way, source, target in (
            (OUT, self.memory, self.outside),
            (COPY, self.memory, self.memory),
            (IN, self.outside, self.memory),
        ):
            rows = [(m.source + row, m.target + row) for m in moves if m.way == way for row in range(m.rows)]
            assert len({to for _, to in rows}) == len(rows), "two moves to one row"
            found = [source[row] for row, _ in rows]
            target.update((to, text) for (_, to), text in zip(rows, found, strict=True))
        self.owed.clear()
        self.host_free, self.host_read = self.host_free + self.host_read, 0

    def admit(self, sequence: Sequence, rows: int) -> bool:
        before, outside = state(self.pool), sequence in self.aside
        computed = sequence.computed
        most = min(rows, sequence.known - 1) // self.size
        hits = self.naive.find(sequence.request.cache_salt, sequence.tokens, most) if self.caching else []
        for other in self.running:  # the other samples of its request, by what their prompts have in common
            common = min(sequence.prompt_tokens, other.prompt_tokens, other.computed, most * self.size) // self.size
            if other.request is sequence.request and common > len(hits):
                hits = self.pool.table(other)[:common]
                self.reached["hit another sample's prompt"] += 1
        fresh = self.count(max(rows, computed)) - len(hits)
        possible = fresh <= len([block for block in self.naive.free if block not in hits])
        assert self.pool.reserve(sequence, rows) == possible
        if not possible:
            assert state(self.pool) == before and sequence.computed == computed, "a failed reservation left a trace"
            return False
        table = self.pool.table(sequence)
        assert table[: len(hits)] == hits and len(table) == len(hits) + fresh
        assert sequence.computed == max(computed, len(hits) * self.size) < sequence.known
        for block in hits:
            self.reached["hit a free block" if block in self.naive.free else "hit a held block"] += 1
        self.naive.free = [block for block in self.naive.free if block not in hits]
        for block in table[len(hits) :]:
            self.naive.taken(block)
        if outside:
            self.aside.remove(sequence)
            self.host_read += self.count(computed)
            self.reached["hit while coming back in" if hits else "swapped in"] += 1
        self.running.append(sequence)
        self.rows[sequence.id] = self.asked[sequence.id] = rows
        self.owed.add(sequence.id)
        return True

    @rule(draw=DRAWS)
    def arrive(self, draw: random.Random) -> None:
        """A new text, which often begins like one that is known, or is one; sometimes it is computed at once."""
        known = [list(tokens) for _, tokens in self.memory.values() if len(tokens) % self.size == 0]
        twins = [sequence.tokens for sequence in (*self.running, *self.waiting)]
        tokens = list(draw.choice([[], draw.choice(known or [[]]), draw.choice(twins or [[]])]))
        tokens += (draw.randint(0, 1) for _ in range(draw.randint(not tokens, 2 * self.size)))
        tokens = tokens[: self.longest]
        sequence = Sequence.of(asking(self.arrived, tokens, cache_salt=draw.choice(["", "", "", "b"]), n=99))
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

    @precondition(lambda self: any(sequence.computed for sequence in self.running))
    @rule(draw=DRAWS)
    def fork(self, draw: random.Random) -> None:
        """After something was computed, a sample joins one that knows as much as it has computed."""
        self.move()
        parent = draw.choice([sequence for sequence in self.running if sequence.computed])
        child = Sequence.of(parent.request, parent.tokens[: parent.computed], self.arrived)
        self.arrived += 1
        child.computed = parent.computed
        child.prompt_tokens = min(parent.prompt_tokens, child.computed)  # all samples have one prompt
        self.pool.fork(parent, child)
        child.tokens.append(draw.randint(0, 1))
        if parent.known == parent.computed:
            parent.tokens.append(draw.randint(0, 1))
        self.running.append(child)
        for each in (parent, child):
            self.rows[each.id] = each.computed
        self.asked[child.id] = child.computed
        self.reached["forked" if child.computed % self.size else "forked at a block's end"] += 1

    def others_of(self, block: int, sequence: Sequence) -> int:
        return sum(block in self.pool.table(other) for other in self.running if other is not sequence)

    @precondition(lambda self: self.running)
    @rule(draw=DRAWS)
    def grow(self, draw: random.Random) -> None:
        """The sequence learns more tokens and wants room for some of what it knows."""
        sequence = draw.choice(self.running)
        more_tokens = min(draw.randint(0, 3), max(0, self.longest - sequence.known))
        sequence.tokens.extend(draw.randint(0, 1) for _ in range(more_tokens))
        rows = draw.randint(1, sequence.known)
        before, table = state(self.pool), list(self.pool.table(sequence))
        number, filled = divmod(sequence.computed, self.size)
        to_copy = filled > 0 and rows > sequence.computed and number < len(table)
        to_copy = to_copy and self.others_of(table[number], sequence) > 0
        more = max(0, self.count(rows) - len(table))
        done = self.pool.reserve(sequence, rows)
        assert done or state(self.pool) == before, "a failed reservation left a trace"
        assert done == (more + to_copy <= len(self.naive.free))
        if not done:
            return
        now = self.pool.table(sequence)
        changed = [at for at, block in enumerate(table) if now[at] != block]
        assert changed == [number] * to_copy, "blocks moved under their sequence"
        for block in [now[at] for at in changed] + now[len(table) :]:
            self.naive.taken(block)
        self.rows[sequence.id] = max(rows, self.rows[sequence.id])
        if more or to_copy:
            self.asked[sequence.id] = rows
        if to_copy:
            alone = self.others_of(table[number], sequence) == 1
            self.reached["left alone with the original" if alone else "copied on write"] += 1
        self.owed.add(sequence.id)

    @precondition(lambda self: any(self.full(sequence) for sequence in self.running))
    @rule(draw=DRAWS)
    def decode(self, draw: random.Random) -> None:
        """Some of those that have filled all they hold get memory for one more token, all at once."""
        full = [sequence for sequence in self.running if self.full(sequence)]
        chosen = draw.sample(full, draw.randint(1, len(full)))
        before = state(self.pool)
        sure = self.pool.could_grow(len(chosen), 1)
        assert state(self.pool) == before and not (sure and len(chosen) > len(self.naive.free))
        self.reached["grown at once" if sure else "not sure to grow"] += 1
        if not sure:
            return
        assert self.pool.grow(chosen) == self.size
        for sequence in chosen:
            self.naive.taken(self.pool.table(sequence)[-1])
            sequence.tokens.extend([draw.randint(0, 1)] * (sequence.known == sequence.computed))
            self.rows[sequence.id] = self.asked[sequence.id] = sequence.computed + 1

    def full(self, sequence: Sequence) -> bool:
        """Whether it could decode but has no room to: a text without a block that others read in part."""
        held = len(self.pool.table(sequence)) * self.size
        whole = self.committed.get(sequence.id) == sequence.computed == held
        return whole and self.pool.room(sequence) == held < self.longest

    @precondition(lambda self: self.running)
    @rule(draw=DRAWS)
    def compute(self, draw: random.Random) -> None:
        sequence = draw.choice(self.running)
        most = self.rows[sequence.id]
        self.fill(sequence, draw.choice([most, draw.randint(0, most)]))

    def fill(self, sequence: Sequence, end: int) -> None:
        """What is owed is moved, then rows are written and committed: here and nowhere else."""
        self.move()
        start = sequence.computed
        sequence.computed = max(start, end)
        rows = rows_of(self.pool, sequence, sequence.computed)
        for position in range(start, sequence.computed):
            assert not self.others_of(rows[position] // self.size, sequence), "a write into what others read"
            self.memory[rows[position]] = sequence.request.cache_salt, tuple(sequence.tokens[: position + 1])
        self.pool.commit(sequence)
        self.committed[sequence.id] = sequence.computed
        if self.caching:
            self.naive.keep(sequence, self.pool.table(sequence))

    @precondition(lambda self: self.running)
    @rule(draw=DRAWS)
    def leave(self, draw: random.Random) -> None:
        """For good, or to come back later and be computed again, or with its rows put aside."""
        sequence = draw.choice(self.running)
        way = draw.choice(["abort", "recompute", "swap", "swap"])
        others = {block for other in self.running if other is not sequence for block in self.pool.table(other)}
        table = [block for block in reversed(self.pool.table(sequence)) if block not in others]
        if way == "swap":
            if sequence.id in self.owed:
                self.move()
            before, blocks = state(self.pool), self.count(sequence.computed)
            done = self.pool.swap_out(sequence)
            assert done == (0 < blocks <= self.host_free)
            self.reached["swapped out" if done else "no room to swap"] += 1
            if not done:
                assert state(self.pool) == before, "a refused swap left a trace"
                return
            self.host_free -= blocks
            self.aside.append(sequence)
            if sequence.known == sequence.computed:  # whoever runs has a token that is still to be computed
                sequence.tokens.append(draw.randint(0, 1))
        else:
            self.reached["a copy given up"] += sequence.id in self.owed
            self.pool.free(sequence)
        self.running.remove(sequence)
        self.committed.pop(sequence.id, None)
        self.naive.give_back(sequence.id, table)
        self.note()
        assert sequence.id not in self.announced
        if way == "recompute":
            self.reached["preempted"] += 1
            sequence.computed = 0
        if way != "abort":
            self.waiting.append(sequence)
        if len(self.waiting) > 8 and self.waiting[0] not in self.aside:
            self.waiting.pop(0)  # it holds nothing, and has waited long enough

    @precondition(lambda self: self.aside)
    @rule(draw=DRAWS)
    def give_up(self, draw: random.Random) -> None:
        """One whose rows were put aside is not wanted any more."""
        sequence = draw.choice(self.aside)
        self.aside.remove(sequence)
        self.waiting.remove(sequence)
        self.pool.free(sequence)
        self.host_free += self.count(sequence.computed)
        self.reached["given up while outside"] += 1

    def note(self) -> None:
        for change in self.pool.take_holdings():
            if change.held or change.shared:
                self.announced[change.sequence] = change
            else:
                last = self.announced.pop(change.sequence)
                assert change.sequence != COMMON or change.filled == last.asked

    @invariant()
    def every_row_holds_what_each_of_its_sequences_computed(self) -> None:
        for sequence in self.running:
            if sequence.id not in self.owed:
                for position, row in enumerate(rows_of(self.pool, sequence, sequence.computed)):
                    text = sequence.request.cache_salt, tuple(sequence.tokens[: position + 1])
                    assert self.memory[row] == text

    @invariant()
    def a_block_is_free_or_in_as_many_tables_as_hold_it(self) -> None:
        """And the announcements, usage and the naive list agree with what the tables say."""
        tables = {sequence.id: self.pool.table(sequence) for sequence in self.running}
        holders: dict[int, list[int]] = defaultdict(list)
        full: dict[int, int] = {}
        for sequence in self.running:
            table = tables[sequence.id]
            assert len(set(table)) == len(table), "a block is twice in a table"
            for number, block in enumerate(table):
                holders[block].append(sequence.id)
                full[block] = max(0, min(self.size, sequence.computed - number * self.size))
        assert sorted([*holders, *self.naive.free]) == list(range(1, self.pool.blocks + 1))
        self.note()
        common = [block for block, those in holders.items() if len(those) > 1]
        expected = {COMMON: (len(common) * self.size, 0)} if common else {}
        for number, table in tables.items():
            mine = [block for block in table if block in common]
            shared = sum(full[block] for block in mine)
            expected[number] = (len(table) - len(mine)) * self.size, shared
            assert self.announced[number].asked == max(0, self.asked[number] - len(mine) * self.size)
        assert {one.sequence: (one.held, one.shared) for one in self.announced.values()} == expected
        filled = {row for one in self.running for row in rows_of(self.pool, one, one.computed)}
        logical, held = sum(one.computed for one in self.running), len(holders) * self.size
        cached = sum(block in self.naive.holds for block in self.naive.free) * self.size
        all_held = sum(map(len, tables.values())) * self.size
        usage = Usage(len(filled), held, self.pool.pool_tokens - held, cached, logical - len(filled), all_held - held)
        assert self.pool.usage() == replace(usage, swapped=sum(one.computed for one in self.aside))

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for sequence in (*self.running, *self.aside):
            self.pool.free(sequence)
        assert replace(self.pool.usage(), cached=0) == Usage(0, 0, self.pool.pool_tokens)
        large = Sequence.of(asking(-2, [2] * max(1, self.pool.blocks * self.size), cache_salt="nobody's"))
        assert self.pool.reserve(large, large.known) == bool(self.pool.blocks)
        assert self.pool.usage().cached == 0


def machine(size: int, *, caching: bool) -> type[Shared]:
    return type(f"Shared in {size}", (Shared,), {"size": size, "caching": caching, "reached": Counter()})


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_order_of_calls_with_blocks_of(size: int, caching: bool) -> None:  # sglang#11970
    run_state_machine_as_test(
        machine(size, caching=caching), settings=settings(max_examples=40, stateful_step_count=40)
    )


MANY = 24


def walk(size: int, caching: bool, steps: int, seed: int) -> Counter[str]:
    """A long random walk; returns which cases it met how often. Nobody comes while many wait, and nobody forks while
    many run, so that an operation costs the same at any length of the walk."""
    draw, pool = random.Random(seed), machine(size, caching=caching)()
    pool.begin(blocks=20, host=12)
    for _ in range(steps):
        moves = [pool.decode] * any(map(pool.full, pool.running))
        moves += [pool.grow, pool.grow, pool.compute, pool.leave, pool.leave] if pool.running else []
        moves += [pool.come_back] * bool(pool.waiting) + [pool.give_up] * (len(pool.aside) > 3)
        if len(pool.running) + len(pool.waiting) < MANY:
            moves += [pool.arrive] + [pool.fork] * any(sequence.computed for sequence in pool.running)
        draw.choice(moves)(draw)
        pool.every_row_holds_what_each_of_its_sequences_computed()
        pool.a_block_is_free_or_in_as_many_tables_as_hold_it()
    pool.teardown()
    return pool.reached


@pytest.mark.parametrize("size", [2, 3])
def test_a_long_walk_reaches_every_case_with_blocks_of(size: int) -> None:
    reached = walk(size, caching=True, steps=20_000, seed=size) + walk(size, caching=False, steps=2000, seed=size)
    assert {case for case in CASES if reached[case]} == CASES, reached


OPERATIONS = int(os.environ.get("KVBENCH_SOAK_OPERATIONS", "1_000_000"))


@pytest.mark.soak
def test_a_million_operations_hold_the_partition() -> None:
    """Ten walks share `KVBENCH_SOAK_OPERATIONS` operations; every row is accounted for after each of them."""
    met = Counter[str]()
    for seed in range(10):
        met += walk(1 + seed % 4, caching=seed % 3 > 0, steps=OPERATIONS // 10, seed=seed)
    print(f"\n{OPERATIONS:,} operations:", ", ".join(f"{met[case]:,} {case}" for case in sorted(CASES)))
    assert {case for case in CASES if met[case]} == CASES
