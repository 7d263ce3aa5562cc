"""Runs batches on a card one does not own: nothing is computed, a cost model says how long it takes.

`SimExecutor` stands where a `ModelRunner` stands, on a `VirtualClock`; engine, allocators and load are the very same.
It computes no tokens: stand-ins take their place, each made of its sequence and position, so no two texts are equal by
chance, a recomputed one is what it was, and the next turn of a conversation finds the answer before it.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol

from kvbench.engine.types import Batch, Sampled, Ticket
from kvbench.planner.work import StepWork

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class StepCost(Protocol):
    """How long a step takes."""

    def seconds(self, work: StepWork) -> float:
        """Seconds of one step; above 0."""

    def decode_seconds(self, sequences: int, context_tokens: int, steps: int) -> NDArray[np.float64]:
        """Seconds of each of `steps` steps [steps] in which so many sequences decode and nothing else happens, having
        computed so many tokens together before the first: to the last bit what `seconds` says of each."""


class SimExecutor:
    """Executor of predicted time."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost

    def launch(self, batch: Batch, now_s: float) -> Ticket:
        took_s = self._cost.seconds(StepWork.of(batch))
        return Ticket(batch, done_s=now_s + took_s, pending=took_s)

    def ahead(self, batch: Batch, now_s: float, steps: int, until_s: float) -> list[float]:
        took_s: list[float] = self._cost.decode_seconds(len(batch.decodes), batch.context, steps).tolist()
        begins_s = itertools.accumulate(took_s, initial=now_s)
        return took_s[: sum(1 for _ in itertools.takewhile(until_s.__gt__, itertools.islice(begins_s, steps)))]

    def collect(self, ticket: Ticket) -> Sampled:
        assert isinstance(ticket.pending, float)
        return Sampled(None, ticket.pending)
