"""Turns an allocator's present facts (who holds how much from now on) into holds over ranges of steps."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.engine.types import COMMON, SAMPLE, Holding
from kvbench.metrics.records import Hold


@dataclass(slots=True)
class _Stay:
    """A sequence's time in memory: its closed pieces (first step, end step, held, asked, shared) and the open one.
    What it shared are filled rows."""

    pieces: list[tuple[int, int, int, int, int]]
    first_step: int
    held: int
    asked: int
    shared: int


class Ledger:
    """`holds` are the finished stays, in the order in which they ended. A stay within no step leaves none. What a
    sequence shared is not in its holds, but in those of `COMMON`."""

    def __init__(self) -> None:
        self.holds: list[Hold] = []
        self._open: dict[int, _Stay] = {}

    def note(self, changes: list[Holding], step: int) -> None:
        """The changes hold from `step` on."""
        for change in changes:
            stay = self._open.get(change.sequence)
            if stay is None:
                self._open[change.sequence] = _Stay([], step, change.held, change.asked, change.shared)
                continue
            if stay.first_step < step:
                stay.pieces.append((stay.first_step, step, stay.held, stay.asked, stay.shared))
            if change.held or change.shared:
                stay.first_step, stay.held, stay.asked, stay.shared = step, change.held, change.asked, change.shared
                continue
            del self._open[change.sequence]
            sample, request = (0, COMMON) if change.sequence == COMMON else divmod(change.sequence, SAMPLE)
            filled = change.filled
            self.holds += [
                Hold(request, first, end, held, asked, filled - shared, sample)
                for first, end, held, asked, shared in stay.pieces
            ]
