"""Runs batches on a card one does not own: nothing is computed, a cost model says how long it takes.

`SimExecutor` stands where a `ModelRunner` stands, on a `VirtualClock`; engine, allocators and load are the very same.
The tokens it gives are stand-ins: negative numbers, each made of its sequence and position, so no two texts are equal
by chance, a recomputed one is what it was, and the next turn of a conversation finds the answer before it.
"""

from __future__ import annotations

from typing import Protocol

from kvbench.engine.types import Batch, Sampled, Sequence, Ticket
from kvbench.planner.work import StepWork


class StepCost(Protocol):
    """How long a step takes."""

    def seconds(self, work: StepWork) -> float:
        """Seconds of one step; above 0."""


class SimExecutor:
    """Executor of predicted time."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost

    def launch(self, batch: Batch, now_s: float) -> Ticket:
        took_s = self._cost.seconds(StepWork.of(batch))
        return Ticket(batch, done_s=now_s + took_s, pending=took_s)

    def collect(self, ticket: Ticket) -> Sampled:
        assert isinstance(ticket.pending, float)
        return Sampled([stand_in(sequence, sequence.known) for sequence in ticket.batch.drawn()], ticket.pending)


def stand_in(sequence: Sequence, position: int) -> int:
    """Stands for the token of a sequence at a position."""
    return -1 - (sequence.id << 24 | position)
