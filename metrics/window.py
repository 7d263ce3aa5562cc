"""The stretch of a run that its numbers speak of: the whole, or what is left of it once it has settled.

    total    first scheduled to last event
    steady   from when the run has settled to when its last request is asked

A closed loop has settled when every one of its opening requests has ended, an open loop when the first answer is whole:
until then requests only come. Neither has before the last change in its output tokens per interval (see change). The
steady window is the headline where it is worth quoting, else the total one, with the reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvbench.metrics.change import settled_from
from kvbench.metrics.points import LoadPoint
from kvbench.metrics.records import FINISHED, UNFINISHED, RequestRecord, Run

TOTAL, STEADY = "total", "steady"

INTERVALS = 32
"""In so many equal parts of the time the detector looks for changes: few enough that neighbours hardly hang together,
enough that a change in the first two is told from chance (2 of 496 pairs lie at an end: 0.4 %)."""
FEWEST_REQUESTS = 30
"""Of fewer a mean has no normal distribution to speak of."""
GENERATIONS = 3
"""A window of fewer mean durations of its requests has seen too few of them follow each other."""


@dataclass(frozen=True, slots=True)
class Window:
    """From `start_s` to `end_s` on the run's clock. `name` goes into the column `window`.

    Both ends are inside, but where the window cuts a run (not `whole`) a token at `start_s` was made before it and a
    request at `end_s` asks for what comes after it: so a rate over the window counts neither.
    """

    name: str
    start_s: float
    end_s: float
    whole: bool = False

    def __post_init__(self) -> None:
        assert -math.inf < self.start_s <= self.end_s < math.inf, f"no window of time: {self}"

    def __contains__(self, at_s: float | None) -> bool:
        """Whether the moment lies inside; one that never came (None) does not."""
        return at_s is not None and self.start_s <= at_s <= self.end_s

    def made(self, at_s: float | None) -> bool:
        """Whether a token of that time stamp belongs to the window."""
        return at_s in self and (self.whole or at_s != self.start_s)

    def asked(self, request: RequestRecord) -> bool:
        """Whether the request belongs to the window: it was scheduled in it."""
        return request.scheduled_s in self and (self.whole or request.scheduled_s != self.end_s)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


def total(run: Run) -> Window:
    """The whole run: first scheduled to last event. Without requests it is empty."""
    assert all(step.end_s <= run.end_s for step in run.steps), "a step ends after the run's last event"
    start_s = min((request.scheduled_s for request in run.requests), default=run.end_s)
    return Window(TOTAL, start_s, run.end_s, whole=True)


def steady(run: Run, load: LoadPoint) -> tuple[Window | None, str]:
    """The steady window of a run under `load`; None, and why, where there is none worth quoting."""
    settled_s, why = _settled(run, load)
    if settled_s is None:
        return None, why
    end_s = max(request.sent_s for request in run.requests)
    if end_s <= settled_s:
        return None, "the last request was asked before the run had settled"
    window = _after_changes(run, Window(STEADY, settled_s, end_s))
    if window is None:
        return None, "output tokens/s never settled"
    why = _too_little(run, window)
    return (None, why) if why else (window, "")


def _settled(run: Run, load: LoadPoint) -> tuple[float | None, str]:
    """When the opening of the load is over."""
    if load.concurrency is None:
        whole = [
            request.last_s for request in run.requests if request.status == FINISHED and request.last_s is not None
        ]
        return (min(whole), "") if whole else (None, "no request finished")
    first = sorted(run.requests, key=lambda request: (request.scheduled_s, request.request))
    opening = list(dict.fromkeys(request.request for request in first))[: load.concurrency]
    members = [request for request in run.requests if request.request in set(opening)]
    if not members or any(request.status == UNFINISHED for request in members):
        return None, "not every opening request ended"
    return max(last_seen_s(request) for request in members), ""


def last_seen_s(request: RequestRecord) -> float:
    """Its last token, or where it never had one the last moment known of it."""
    return max(
        at_s for at_s in (request.scheduled_s, request.sent_s, request.admitted_s, request.last_s) if at_s is not None
    )


def _after_changes(run: Run, window: Window) -> Window | None:
    """The part of the window behind the last change in the output tokens of its `INTERVALS` equal parts. None after a
    change in the second half: it leaves less behind it than it cuts off (White's rule for MSER, 1997)."""
    import numpy as np

    token_s = np.array([at_s for request in run.requests for at_s in request.token_s if window.made(at_s)])
    counts, edges = np.histogram(token_s, INTERVALS, (window.start_s, window.end_s))
    cut = settled_from(counts.tolist())
    return Window(window.name, float(edges[cut]), window.end_s) if cut <= INTERVALS // 2 else None


def _too_little(run: Run, window: Window) -> str:
    """Why the window is not worth quoting; empty where it is."""
    requests = [request for request in run.requests if window.asked(request)]
    count = len({request.request for request in requests})
    if count < FEWEST_REQUESTS:
        return f"fewer than {FEWEST_REQUESTS} requests were asked between its settling and its last request"
    lasted_s = [one.last_s - one.scheduled_s for one in requests if one.status == FINISHED and one.last_s is not None]
    if not lasted_s:
        return "no request asked after its settling finished"
    if window.duration_s < GENERATIONS * math.fsum(lasted_s) / len(lasted_s):
        return f"settled, it ran for less than {GENERATIONS} mean durations of its requests"
    return ""
