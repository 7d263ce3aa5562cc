"""The books that every allocator keeps: who holds how many rows, how many of them are filled, what changed hands."""

from __future__ import annotations

from kvbench.engine.types import Holding, Sequence, Usage


class Accounts:
    """Running totals in rows, each update O(1)."""

    def __init__(self, pool_tokens: int) -> None:
        self.pool_tokens = pool_tokens
        self._held: dict[int, int] = {}
        self._filled: dict[int, int] = {}
        self._held_total = 0
        self._filled_total = 0
        self._changes: list[Holding] = []

    def held(self, sequence: Sequence) -> int:
        """Rows the sequence holds now."""
        return self._held.get(sequence.id, 0)

    def hold(self, sequence: Sequence, held: int, asked: int) -> None:
        """From now on the sequence holds `held` rows, of which its policy asked for `asked`."""
        self._held_total += held - self.held(sequence)
        self._held[sequence.id] = held
        self._filled.setdefault(sequence.id, 0)
        self._changes.append(Holding(sequence.id, held, asked, 0))

    def fill(self, sequence: Sequence) -> None:
        """The rows below `sequence.computed` are filled."""
        assert sequence.computed <= self.held(sequence), f"sequence {sequence.id} filled rows it does not hold"
        self._filled_total += sequence.computed - self._filled[sequence.id]
        self._filled[sequence.id] = sequence.computed

    def retire(self, sequence: Sequence) -> None:
        """The sequence's stay ends here, but its rows stay held, all of them asked for and none ever filled."""
        held = self.held(sequence)
        self.release(sequence)
        self.hold(sequence, held, held)

    def release(self, sequence: Sequence) -> None:
        """The sequence holds nothing any more."""
        filled = self._filled.pop(sequence.id)
        self._held_total -= self._held.pop(sequence.id)
        self._filled_total -= filled
        self._changes.append(Holding(sequence.id, 0, 0, filled))

    def usage(self) -> Usage:
        return Usage(self._filled_total, self._held_total, self.pool_tokens - self._held_total)

    def take(self) -> list[Holding]:
        """The changes since the last call."""
        changes, self._changes = self._changes, []
        return changes
