"""Runs batches on a card one does not own: nothing is computed, a cost model says how long it takes.

`SimExecutor` stands where a `ModelRunner` stands, on a `VirtualClock`; engine, allocators and load are the very same.
It computes no tokens: stand-ins take their place, each made of its sequence and position, so no two texts are equal by
chance, a recomputed one is what it was, and the next turn of a conversation finds the answer before it.
"""

from __future__ import annotations

from typing import Protocol

from kvbench.engine.types import Batch, Sampled, Ticket
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
        return Sampled(None, ticket.pending)
