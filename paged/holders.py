"""Who holds which block. The books learn from here which rows are shared, so that each counts once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvbench.engine.accounts import Accounts

Shared = tuple[int, int]
"""Rows that others hold too, and how many of them are filled."""


class Holders:
    """The sequences that hold each block that is held.

    Whoever shares a block only reads it. Its rows are all filled but for those of `partial` blocks, with their counts:
    the last block of a sequence that was forked.
    """

    def __init__(self, accounts: Accounts, block_size: int) -> None:
        self.partial: dict[int, int] = {}
        self._accounts = accounts
        self._size = block_size
        self._of: dict[int, set[int]] = {}

    def own(self, blocks: Iterable[int], holder: int) -> None:
        """Blocks that nobody held belong to one sequence."""
        self._of.update((block, {holder}) for block in blocks)

    def join(self, blocks: list[int], holder: int, filled: int) -> Shared:
        """One more sequence holds these blocks, which have `filled` rows, all but the last one full. Returns what of it
        others hold; whoever held a block alone no longer does."""
        met = _Met()
        rows = full = 0
        for number, block in enumerate(blocks):
            here = min(self._size, filled - number * self._size)
            holders = self._of.setdefault(block, set())
            if holders:
                rows, full = rows + self._size, full + here
            if len(holders) == 1:
                met.note(holders, self._size, here)
                if here < self._size:
                    self.partial[block] = here
            holders.add(holder)
        self._settle(met, 1)
        return rows, full

    def leave(self, blocks: Iterable[int], holder: int) -> list[int]:
        """The sequence no longer holds these blocks. Returns those that nobody holds now, in the order given; of the
        others, one that a single sequence is left with is its own again."""
        met = _Met()
        left: list[int] = []
        for block in blocks:
            holders = self._of[block]
            holders.remove(holder)
            if len(holders) == 1:
                met.note(holders, self._size, self.partial.pop(block, self._size))
            elif not holders:
                del self._of[block]
                left.append(block)
        self._settle(met, -1)
        return left

    def _settle(self, met: _Met, sign: int) -> None:
        """So much of each sequence in `met` is now shared (+1), or its own again (-1)."""
        for other, rows in met.rows.items():
            self._accounts.share(other, sign * rows, sign * met.filled[other])
        self._accounts.common(sign * met.rows.total(), sign * met.filled.total())


class _Met:
    """Rows of each sequence, and filled ones, whose being shared changes."""

    def __init__(self) -> None:
        self.rows = Counter[int]()
        self.filled = Counter[int]()

    def note(self, holder: set[int], rows: int, filled: int) -> None:
        (one,) = holder
        self.rows[one] += rows
        self.filled[one] += filled
