"""When requests come: each process against its own theory at a fixed seed, and words that mean nothing.

A Kolmogorov-Smirnov distance of n draws is above 1.95 / sqrt(n) once in a thousand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from scipy import stats

from kvbench.errors import KvbenchError
from kvbench.workloads.arrivals import Arrivals
from kvbench.workloads.facts import dispersion, variation

COUNT = 10_000
BOUND = 1.95 / math.sqrt(COUNT)
RATE = 8.0


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise([0.0, *times])]


def distance(values: list[float], law: Any) -> float:
    """Between the draws and a frozen distribution of scipy's."""
    return float(stats.kstest(values, law.cdf).statistic)


@pytest.mark.parametrize(
    ("word", "burstiness", "law"),
    [
        ("poisson", None, stats.expon(scale=1 / RATE)),
        ("gamma", 0.25, stats.gamma(0.25, scale=4 / RATE)),
        ("gamma", 1.0, stats.expon(scale=1 / RATE)),
        ("gamma", 4.0, stats.gamma(4, scale=0.25 / RATE)),
    ],
)
def test_ten_thousand_gaps_follow_their_law(word: str, burstiness: float | None, law: Any) -> None:
    times = Arrivals.of(word, burstiness).schedule(RATE, 0, count=COUNT)
    assert len(times) == COUNT and distance(gaps(times), law) < BOUND


def test_constant_gaps_have_no_variation() -> None:
    times = Arrivals.of("constant").schedule(0.5, 3, count=COUNT)
    assert variation(gaps(times)) == 0 and times == [2.0 * (number + 1) for number in range(COUNT)]


def test_poisson_at_half_a_request_a_second_keeps_no_whole_seconds() -> None:  # inference-perf (source)
    times = Arrivals.of("poisson").schedule(0.5, 0, count=COUNT)
    cv = variation(gaps(times))
    assert cv is not None and abs(cv - 1) < 5 / math.sqrt(COUNT)
    assert sum(abs(time - round(time)) < 1e-6 for time in times) == 0
    assert Arrivals.of("poisson").schedule(0.5, 0, count=COUNT) == times
    assert Arrivals.of("poisson").schedule(0.5, 1, count=COUNT) != times


def ramp(first: float, last: float, span_s: float) -> Callable[[float], float]:
    """Expected arrivals until a time, for a rate that goes from `first` to `last` in `span_s`, then stays."""
    return lambda t: (
        first * t + (last - first) * t * t / 2 / span_s
        if t <= span_s
        else (first + last) / 2 * span_s + last * (t - span_s)
    )


def step(at_s: float, first: float, last: float) -> Callable[[float], float]:
    return lambda t: first * min(t, at_s) + last * max(0.0, t - at_s)


def bursts(on_s: float, off_s: float, mean: float) -> Callable[[float], float]:
    """All of a cycle's arrivals come while it is on."""
    cycle_s = on_s + off_s
    return lambda t: (t // cycle_s) * cycle_s * mean + min(t % cycle_s, on_s) / on_s * cycle_s * mean


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("ramp", ramp(0.2 * RATE, 1.8 * RATE, COUNT / RATE)),
        ("ramp:from=3:to=1", ramp(3 * RATE, RATE, COUNT / RATE / 2)),
        ("step", step(COUNT / RATE / 3, RATE, 2 * RATE)),  # half of the time at R, half at 2 R: 1.5 R on average
        ("step:at=0.25:to=0.5", step(COUNT / RATE / 2.5, RATE, RATE / 2)),
        ("onoff", bursts(5, 5, RATE)),
        ("onoff:on=500ms:off=4s", bursts(0.5, 4, RATE)),
    ],
)
def test_ten_thousand_arrivals_follow_their_rate(word: str, expected: Callable[[float], float]) -> None:
    """Time rescaling: of a Poisson process of any rate, what is expected between two arrivals is exponential with mean
    1. With a steady rate it would not be."""
    times = Arrivals.of(word).schedule(RATE, 0, count=COUNT)
    assert times == sorted(times) and times[0] > 0
    assert distance(gaps([expected(time) for time in times]), stats.expon()) < BOUND
    assert distance([gap * COUNT / times[-1] for gap in gaps(times)], stats.expon()) > BOUND


def test_bursts_keep_the_mean_rate_and_their_silence() -> None:
    times = Arrivals.of("onoff:on=1s:off=9s").schedule(2.0, 4, duration_s=5_000.0)
    assert abs(len(times) - 10_000) < 5 * math.sqrt(10_000)
    assert all(time % 10 <= 1 for time in times)
    assert (dispersion(times, 1.0) or 0) > 10


@pytest.mark.parametrize("word", ["poisson", "gamma", "constant", "ramp", "step", "onoff"])
def test_a_duration_takes_what_comes_within_it(word: str) -> None:
    process = Arrivals.of(word)
    times = process.schedule(5.0, 2, duration_s=200.0)
    assert times[-1] <= 200 and abs(len(times) - 200 * 5 * (1.5 if word == "step" else 1)) < 5 * math.sqrt(1_500)
    assert process.schedule(5.0, 2, duration_s=200.0, count=50) == times[:50]
    assert process.schedule(5.0, 2, duration_s=200.0, count=10**6) == times
    if word not in ("ramp", "step"):  # these span the load, whatever its length
        assert process.schedule(5.0, 2, count=len(times)) == times


@pytest.mark.parametrize(
    ("word", "burstiness", "says"),
    [
        ("possion", None, "did you mean poisson"),
        ("poisson:cv=1", None, "takes nothing more"),
        ("ramp:form=1", None, "did you mean from"),
        ("ramp:to=0", None, "above 0"),
        ("step:at=1", None, "share of the load below 1"),
        ("onoff:on=5", None, "with its unit"),
        ("onoff:off=0s", None, "above 0"),
        ("poisson", 2.0, "--burstiness"),
        ("gamma", math.nan, "--burstiness"),
        ("gamma", -1.0, "--burstiness"),
    ],
)
def test_a_process_that_cannot_be_is_one_line(word: str, burstiness: float | None, says: str) -> None:
    with pytest.raises(KvbenchError) as caught:
        Arrivals.of(word, burstiness)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_duration_without_requests_or_with_too_many_is_refused() -> None:
    with pytest.raises(KvbenchError, match=r"no request arrives within --duration 1s at --request-rate 1e-05; raise"):
        Arrivals.of("poisson").schedule(1e-5, 0, duration_s=1.0)
    with pytest.raises(KvbenchError, match="over 10,000,000 requests"):
        Arrivals.of("constant").schedule(1e6, 0, duration_s=1e6)
    with pytest.raises(KvbenchError, match="--duration 1000s brings over 10,000,000 requests"):
        Arrivals.of("gamma", 1e-300).schedule(1.0, 0, duration_s=1000.0)
