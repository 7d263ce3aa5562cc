"""The run's time: real, or moved by the engine's own predictions. Both start at 0."""

from __future__ import annotations

import gc
import time


class WallClock:
    """Monotonic seconds since the clock was made."""

    def __init__(self) -> None:
        self._origin_s = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._origin_s

    def wait_until(self, at_s: float) -> float:
        """Sleep until `at_s`; the time at which the sleep really ended."""
        while (left_s := at_s - self.now()) > 0:
            time.sleep(left_s)
        return self.now()

    def after(self, done_s: float | None) -> float:
        """A collected batch is done by now, whatever was predicted."""
        return self.now()


class VirtualClock:
    """Seconds that pass only when `serve` says so: the same engine, allocators and load on predicted time.

    As a context it keeps Python's cycle collector at rest: a simulated run makes rows by the million, none of them in a
    cycle, and looking for one among them takes as long as the run itself.
    """

    def __enter__(self) -> VirtualClock:
        self._collects = gc.isenabled()
        gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        if self._collects:
            gc.enable()

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        return self._now_s

    def wait_until(self, at_s: float) -> float:
        self._now_s = max(self._now_s, at_s)
        return self._now_s

    def after(self, done_s: float | None) -> float:
        assert done_s is not None, "a batch without a predicted end cannot run on virtual time"
        return self.wait_until(done_s)
