"""The books that every allocator keeps: who holds how many rows, how many of them are filled, what changed hands."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.engine.sequence import Sequence
from kvbench.engine.types import COMMON, Holding, Usage


@dataclass(slots=True)
class _Stay:
    """Rows of one sequence: it `held` them, `asked` for some and `filled` some. `shared` of those it held, and
    `shared_filled` of those it filled, are others' too."""

    held: int = 0
    asked: int = 0
    filled: int = 0
    shared: int = 0
    shared_filled: int = 0


class Accounts:
    """Running totals in rows, each update O(1). A row that several sequences share counts once, as a common one."""

    def __init__(self, pool_tokens: int) -> None:
        self.pool_tokens = pool_tokens
        self._stays: dict[int, _Stay] = {}
        self._all = _Stay()  # over the stays: a common row counts for each
        self._common = 0
        self._common_filled = 0
        self._changes: list[Holding] = []

    def held(self, sequence: Sequence) -> int:
        """Rows the sequence holds now, shared ones included."""
        stay = self._stays.get(sequence.id)
        return 0 if stay is None else stay.held

    def hold(self, sequence: Sequence, held: int, asked: int, shared: int = 0, shared_filled: int = 0) -> None:
        """From now on the sequence holds `held` rows, of which its policy asked for `asked`; `shared` more of them than
        before, `shared_filled` of these filled, are others' too."""
        stay = self._stays.get(sequence.id)
        if stay is None:
            stay = self._stays[sequence.id] = _Stay()
        self._all.held += held - stay.held
        stay.held, stay.asked = held, asked
        if shared or stay.shared:
            self.share(sequence.id, shared, shared_filled)
        else:
            self._changes.append(Holding(sequence.id, held, asked, 0))

    def grow(self, holders: list[int], rows: int) -> None:
        """Each of these, all of whose rows are filled, holds so many more; its policy asked for one of them."""
        stays, changes = self._stays, self._changes
        self._all.held += rows * len(holders)
        for holder in holders:
            stay = stays[holder]
            held = stay.held
            stay.asked, stay.held = held + 1, held + rows
            own = held - stay.shared
            changes.append(Holding(holder, own + rows, own + 1, 0, stay.shared_filled))

    def share(self, holder: int, rows: int, filled: int) -> None:
        """So many more of a holder's rows, `filled` of them filled, are now others' too; fewer where negative."""
        stay = self._stays[holder]
        stay.shared += rows
        stay.shared_filled += filled
        self._all.shared += rows
        self._all.shared_filled += filled
        assert 0 <= stay.shared_filled <= stay.shared <= stay.held, f"sequence {holder} shares rows it does not hold"
        own_asked = max(0, stay.asked - stay.shared)
        self._changes.append(Holding(holder, stay.held - stay.shared, own_asked, 0, stay.shared_filled))

    def common(self, rows: int, filled: int) -> None:
        """So many more rows, `filled` of them filled, are held by several sequences, each counted once; fewer where
        negative."""
        if not rows:
            return
        if self._common:  # what is shared is never written, so each amount of it is a stay of its own
            self._changes.append(Holding(COMMON, 0, 0, self._common_filled))
        self._common += rows
        self._common_filled += filled
        if self._common:
            self._changes.append(Holding(COMMON, self._common, self._common_filled, 0))

    def fill(self, sequence: Sequence) -> None:
        """The rows below `sequence.computed` are filled."""
        stay = self._stays[sequence.id]
        assert sequence.computed <= stay.held, f"sequence {sequence.id} filled rows it does not hold"
        self._all.filled += sequence.computed - stay.filled
        stay.filled = sequence.computed

    def retire(self, sequence: Sequence) -> None:
        """The sequence's stay ends here, but its rows stay held, all of them asked for and none ever filled."""
        held = self.held(sequence)
        self.release(sequence)
        self.hold(sequence, held, held)

    def release(self, sequence: Sequence) -> None:
        """The sequence holds nothing any more."""
        stay = self._stays.pop(sequence.id)
        self._all.held -= stay.held
        self._all.filled -= stay.filled
        self._all.shared -= stay.shared
        self._all.shared_filled -= stay.shared_filled
        self._changes.append(Holding(sequence.id, 0, 0, stay.filled))

    def usage(self, cached: int = 0, swapped: int = 0) -> Usage:
        """Present facts; `cached` of the free rows could be reused, `swapped` rows lie elsewhere."""
        saved, saved_held = self._all.shared_filled - self._common_filled, self._all.shared - self._common
        held = self._all.held - saved_held
        return Usage(self._all.filled - saved, held, self.pool_tokens - held, cached, saved, saved_held, swapped)

    def take(self) -> list[Holding]:
        """The changes since the last call."""
        changes, self._changes = self._changes, []
        return changes
