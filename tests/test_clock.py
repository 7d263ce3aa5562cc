"""The two clocks, and `serve` between them: time is read once a step, and what was recorded replays exactly."""

from __future__ import annotations

import gc
import random

import pytest
from fakes import FakeExecutor, make_pool, request

from kvbench.engine import clock
from kvbench.engine.clock import VirtualClock, WallClock
from kvbench.engine.engine import Engine, serve
from kvbench.engine.interfaces import Clock, Load
from kvbench.engine.scheduler import Limits
from kvbench.metrics.records import Run, StepRecord
from kvbench.workloads.load import ClosedLoop, OpenLoop


class Timer:
    """Stands in for the module `time`: a sleep that ends too early and a read that takes a little."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def perf_counter(self) -> float:
        self.now_s += 0.001
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.now_s += seconds / 2 + 0.01


def test_the_wall_clock_starts_at_zero_and_sleeps_until_the_time_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = Timer()
    monkeypatch.setattr(clock, "time", timer)
    wall: Clock = WallClock()
    assert wall.now() == pytest.approx(0.001)
    ended_s = wall.wait_until(1.0)
    assert ended_s >= 1.0 and len(timer.slept) > 3
    assert wall.now() > ended_s
    slept = len(timer.slept)
    assert wall.wait_until(0.5) > ended_s
    assert len(timer.slept) == slept, "slept for a time that is past"
    assert wall.after(99.0) < 2.0, "a prediction moved the real clock"


def test_virtual_time_moves_when_told_and_never_back() -> None:
    virtual: Clock = VirtualClock()
    assert virtual.now() == 0.0
    assert (virtual.wait_until(2.5), virtual.wait_until(1.0), virtual.after(2.0), virtual.after(3.0)) == (
        2.5,
        2.5,
        2.5,
        3,
    )
    assert virtual.now() == 3.0
    with pytest.raises(AssertionError):
        virtual.after(None)


def test_the_cycle_collector_rests_while_time_is_virtual() -> None:
    assert gc.isenabled()
    with VirtualClock() as virtual:
        assert virtual.now() == 0.0 and not gc.isenabled()
        with VirtualClock():
            pass
        assert not gc.isenabled(), "who found it at rest leaves it so"
    assert gc.isenabled()


class UnevenClock:
    """Like a real clock, without waiting: each step takes what it takes, each wait ends late. `reads` counts looks."""

    def __init__(self) -> None:
        self._chance = random.Random(7)
        self._now_s = 0.0
        self.reads = 0
        self.waits = 0

    def now(self) -> float:
        self.reads += 1
        self._now_s += self._chance.uniform(1e-6, 1e-5)
        return self._now_s

    def wait_until(self, at_s: float) -> float:
        self.waits += 1
        self._now_s = max(self._now_s, at_s) + self._chance.expovariate(200.0)
        return self._now_s

    def after(self, done_s: float | None) -> float:
        self._now_s += self._chance.expovariate(50.0)
        return self.now()


class Replay:
    """Virtual time on which an idle wait ends where the recorded one did: at the start of the step it led to."""

    def __init__(self, steps: list[StepRecord]) -> None:
        self._starts_s = [step.start_s for step in steps]
        self._time = VirtualClock()
        self._time.wait_until(self._starts_s[0])
        self.now, self.after = self._time.now, self._time.after

    def wait_until(self, at_s: float) -> float:
        return self._time.wait_until(next(start_s for start_s in self._starts_s if start_s >= at_s))


def load_of(concurrency: int) -> Load:
    requests = [request(number, 3 + number % 9, 2 + number % 11, scheduled_s=number * 0.07) for number in range(30)]
    return ClosedLoop(requests, concurrency) if concurrency else OpenLoop(requests)


def run_on(kind: str, concurrency: int, time: Clock, ends_s: list[float]) -> tuple[Run, FakeExecutor]:
    pool = make_pool(kind, 60, 24)
    executor = FakeExecutor(pool, ends_s=ends_s)
    return serve(load_of(concurrency), Engine(pool, executor, Limits(24, 8), save_tokens=True), time), executor


@pytest.mark.parametrize("kind", ["paged-3", "max", "declared"])
@pytest.mark.parametrize("concurrency", [0, 1, 6])
def test_a_recorded_run_replays_on_virtual_time(kind: str, concurrency: int) -> None:
    real = UnevenClock()
    recorded, first = run_on(kind, concurrency, real, [])
    assert real.reads == 1 + len(recorded.steps), "one look at the start and one a step"
    assert bool(real.waits) == (not concurrency)
    ends_s = [step.end_s for step in recorded.steps]
    replayed, second = run_on(kind, concurrency, Replay(recorded.steps), ends_s)
    assert second.batches == first.batches
    assert [step.start_s for step in replayed.steps] == [step.start_s for step in recorded.steps]
    assert (replayed.holds, replayed.requests) == (recorded.holds, recorded.requests)


def test_a_run_without_requests_ends_at_once() -> None:
    pool = make_pool("paged-3", 60, 24)
    run = serve(OpenLoop([]), Engine(pool, FakeExecutor(pool), Limits(24)), VirtualClock())
    assert run == Run([], [], [], 60, 0.0)


def test_an_idle_engine_waits_for_the_next_arrival_and_no_longer() -> None:
    pool = make_pool("paged-3", 60, 24)
    load = OpenLoop([request(0, 3, 1, scheduled_s=2.0), request(1, 3, 1, scheduled_s=5.0)])
    run = serve(load, Engine(pool, FakeExecutor(pool), Limits(24)), VirtualClock())
    assert [step.start_s for step in run.steps] == [2.0, 5.0]
    assert [one.admitted_s for one in run.requests] == [2.0, 5.0]
    assert run.end_s == run.steps[-1].end_s
