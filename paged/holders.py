"""Who holds which block. The books learn from here which rows are shared, so that each counts once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvbench.engine.accounts import Accounts

Shared = tuple[int, int]
"""Rows that others hold too, and how many of them are filled."""


class Holders:
    """The sequences that hold each of `blocks` blocks, which count from 1.

    Whoever shares a block only reads it. Its rows are all filled but for those of `partial` blocks, with their counts:
    the last block of a sequence that was forked.
    """

    def __init__(self, accounts: Accounts, blocks: int, block_size: int) -> None:
        self.partial: dict[int, int] = {}
        self._accounts = accounts
        self._size = block_size
        self._one: list[int | None] = [None] * (blocks + 1)  # who holds a block, where it is one sequence
        self._several: dict[int, set[int]] = {}  # and where they are more

    def own(self, blocks: Iterable[int], holder: int) -> None:
        """Blocks that nobody held belong to one sequence."""
        for block in blocks:
            self._one[block] = holder

    def own_each(self, blocks: Iterable[int], holders: Iterable[int]) -> None:
        """Blocks that nobody held belong to one sequence each."""
        for block, holder in zip(blocks, holders, strict=True):
            self._one[block] = holder

    def join(self, blocks: list[int], holder: int, filled: int) -> Shared:
        """One more sequence holds these blocks, which have `filled` rows, all but the last one full. Returns what of it
        others hold; whoever held a block alone no longer does."""
        if not blocks:
            return 0, 0
        met = _Met()
        rows = full = 0
        for number, block in enumerate(blocks):
            here = min(self._size, filled - number * self._size)
            other = self._one[block]
            if other is None and block not in self._several:
                self._one[block] = holder
                continue
            rows, full = rows + self._size, full + here
            if other is None:
                self._several[block].add(holder)
                continue
            self._one[block], self._several[block] = None, {other, holder}
            met.note(other, self._size, here)
            if here < self._size:
                self.partial[block] = here
        self._settle(met, 1)
        return rows, full

    def leave(self, blocks: Sequence[int], holder: int) -> Sequence[int]:
        """The sequence no longer holds these blocks. Returns those that nobody holds now, in the order given; of the
        others, one that a single sequence is left with is its own again."""
        if self._several.keys().isdisjoint(blocks):
            for block in blocks:
                self._one[block] = None
            return blocks
        met = _Met()
        left: list[int] = []
        for block in blocks:
            if (holders := self._several.get(block)) is None:
                self._one[block] = None
                left.append(block)
                continue
            holders.remove(holder)
            if len(holders) == 1:
                (other,) = self._several.pop(block)
                self._one[block] = other
                met.note(other, self._size, self.partial.pop(block, self._size))
        self._settle(met, -1)
        return left

    def _settle(self, met: _Met, sign: int) -> None:
        """So much of each sequence in `met` is now shared (+1), or its own again (-1)."""
        if not met.rows:
            return
        for other, rows in met.rows.items():
            self._accounts.share(other, sign * rows, sign * met.filled[other])
        self._accounts.common(sign * met.rows.total(), sign * met.filled.total())


class _Met:
    """Rows of each sequence, and filled ones, whose being shared changes."""

    def __init__(self) -> None:
        self.rows = Counter[int]()
        self.filled = Counter[int]()

    def note(self, holder: int, rows: int, filled: int) -> None:
        self.rows[holder] += rows
        self.filled[holder] += filled
