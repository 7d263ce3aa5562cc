"""Turns an allocator's present facts (who holds how much from now on) into holds over ranges of steps."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.engine.types import Holding
from kvbench.metrics.records import Hold


@dataclass(slots=True)
class _Stay:
    """A sequence's time in memory: its closed pieces and the open one."""

    pieces: list[tuple[int, int, int, int]]
    first_step: int
    held: int
    asked: int


class Ledger:
    """`holds` are the finished stays, in the order in which they ended. A stay within no step leaves none."""

    def __init__(self) -> None:
        self.holds: list[Hold] = []
        self._open: dict[int, _Stay] = {}

    def note(self, changes: list[Holding], step: int) -> None:
        """The changes hold from `step` on."""
        for change in changes:
            stay = self._open.get(change.sequence)
            if stay is None:
                self._open[change.sequence] = _Stay([], step, change.held, change.asked)
                continue
            if stay.first_step < step:
                stay.pieces.append((stay.first_step, step, stay.held, stay.asked))
            if change.held:
                stay.first_step, stay.held, stay.asked = step, change.held, change.asked
                continue
            del self._open[change.sequence]
            self.holds.extend(Hold(change.sequence, *piece, final_tokens=change.filled) for piece in stay.pieces)
