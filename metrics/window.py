"""The stretch of a run that its numbers speak of."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvbench.metrics.records import Run


@dataclass(frozen=True, slots=True)
class Window:
    """From `start_s` to `end_s` on the run's clock, both ends included. `name` goes into the column `window`."""

    name: str
    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        assert -math.inf < self.start_s <= self.end_s < math.inf, f"no window of time: {self}"

    def __contains__(self, at_s: float | None) -> bool:
        """Whether the moment lies inside; one that never came (None) does not."""
        return at_s is not None and self.start_s <= at_s <= self.end_s

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


def total(run: Run) -> Window:
    """The whole run: first scheduled to last event. Without requests it is empty."""
    assert all(step.end_s <= run.end_s for step in run.steps), "a step ends after the run's last event"
    return Window("total", min((request.scheduled_s for request in run.requests), default=run.end_s), run.end_s)
