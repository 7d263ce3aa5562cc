"""The books that every allocator keeps: who holds how many rows, how many of them are filled, what changed hands."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.engine.types import COMMON, Holding, Sequence, Usage


@dataclass(slots=True)
class _Stay:
    """Rows of one sequence: it `held` them, `asked` for some and `filled` some. `shared` of them, all full, are held by
    others too."""

    held: int = 0
    asked: int = 0
    filled: int = 0
    shared: int = 0


class Accounts:
    """Running totals in rows, each update O(1). A row that several sequences share counts once, as a common one."""

    def __init__(self, pool_tokens: int) -> None:
        self.pool_tokens = pool_tokens
        self._stays: dict[int, _Stay] = {}
        self._held_total = self._filled_total = self._shared_total = 0  # over the stays: a common row counts for each
        self._common = 0
        self._changes: list[Holding] = []

    def held(self, sequence: Sequence) -> int:
        """Rows the sequence holds now, shared ones included."""
        stay = self._stays.get(sequence.id)
        return 0 if stay is None else stay.held

    def hold(self, sequence: Sequence, held: int, asked: int, shared: int = 0) -> None:
        """From now on the sequence holds `held` rows, of which its policy asked for `asked`; `shared` more of them than
        before are held by others too."""
        stay = self._stays.setdefault(sequence.id, _Stay())
        self._held_total += held - stay.held
        stay.held, stay.asked = held, asked
        self.share(sequence.id, shared)

    def share(self, sequence_id: int, rows: int) -> None:
        """So many more of a holder's rows, all of them full, are now held by others too; fewer where negative."""
        stay = self._stays[sequence_id]
        stay.shared += rows
        self._shared_total += rows
        assert 0 <= stay.shared <= stay.held, f"sequence {sequence_id} shares rows it does not hold"
        own = stay.held - stay.shared
        self._changes.append(Holding(sequence_id, own, max(0, stay.asked - stay.shared), 0, stay.shared))

    def common(self, rows: int) -> None:
        """So many more rows are held by several sequences, each counted once; fewer where negative."""
        if not rows:
            return
        if self._common:  # all of them are full at any time, so each number of them is a stay of its own
            self._changes.append(Holding(COMMON, 0, 0, self._common))
        self._common += rows
        if self._common:
            self._changes.append(Holding(COMMON, self._common, self._common, 0))

    def fill(self, sequence: Sequence) -> None:
        """The rows below `sequence.computed` are filled."""
        stay = self._stays[sequence.id]
        assert sequence.computed <= stay.held, f"sequence {sequence.id} filled rows it does not hold"
        self._filled_total += sequence.computed - stay.filled
        stay.filled = sequence.computed

    def retire(self, sequence: Sequence) -> None:
        """The sequence's stay ends here, but its rows stay held, all of them asked for and none ever filled."""
        held = self.held(sequence)
        self.release(sequence)
        self.hold(sequence, held, held)

    def release(self, sequence: Sequence) -> None:
        """The sequence holds nothing any more."""
        stay = self._stays.pop(sequence.id)
        self._held_total -= stay.held
        self._filled_total -= stay.filled
        self._shared_total -= stay.shared
        self._changes.append(Holding(sequence.id, 0, 0, stay.filled))

    def usage(self, cached: int = 0) -> Usage:
        """Present facts; `cached` of the free rows could be reused."""
        saved = self._shared_total - self._common
        held = self._held_total - saved
        return Usage(self._filled_total - saved, held, self.pool_tokens - held, cached, saved)

    def take(self) -> list[Holding]:
        """The changes since the last call."""
        changes, self._changes = self._changes, []
        return changes
