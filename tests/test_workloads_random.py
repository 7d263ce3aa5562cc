"""What is random about a load: streams, lengths and arrivals, against numbers worked out by hand or by theory.

Bounds are five standard errors of the estimator at a fixed seed.
"""

import math
from itertools import pairwise
from statistics import mean, stdev

import numpy as np
import pytest

from kvbench.errors import KvbenchError
from kvbench.workloads.arrivals import schedule
from kvbench.workloads.lengths import Lengths
from kvbench.workloads.streams import stream


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise([0.0, *times])]


def variation(times: list[float]) -> float:
    return stdev(gaps(times)) / mean(gaps(times))


def test_a_stream_repeats_and_is_its_own() -> None:
    first = stream(3, "arrivals").random(4).tolist()
    assert stream(3, "arrivals").random(4).tolist() == first
    for other in (stream(4, "arrivals"), stream(3, "tokens"), stream(3, "arrival"), stream(3, "slavirra")):
        assert not set(other.random(4).tolist()) & set(first)


@pytest.mark.parametrize("other", [(0, "sampling"), (1, "tokens")])
def test_streams_are_uncorrelated(other: tuple[int, str]) -> None:
    count = 20_000
    r = np.corrcoef(stream(0, "tokens").random(count), stream(*other).random(count))[0, 1]
    assert abs(r) < 5 / math.sqrt(count)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(KvbenchError, match="--seed"):
        stream(-1, "tokens")


@pytest.mark.parametrize(
    ("average", "ratio", "shortest", "longest"),
    [
        (1, 0.0, 1, 1),
        (8192, 0.0, 8192, 8192),
        (100, 0.5, 50, 150),
        (10, 0.3, 7, 13),
        (100, 0.9, 10, 190),  # 100 * (1 - 0.9) is 9.999… in floating point
        (128, 0.1, 115, 141),
        (1, 0.9, 1, 2),
    ],
)
def test_length_bounds(average: int, ratio: float, shortest: int, longest: int) -> None:
    lengths = Lengths(average, ratio)
    assert (lengths.shortest, lengths.longest) == (shortest, longest)
    assert {shortest, longest} <= set(lengths.draw(5_000, stream(0, "lengths"))) <= set(range(shortest, longest + 1))


def test_ranged_lengths_are_uniform() -> None:
    count, values = 21_000, range(90, 111)
    drawn = Lengths(100, 0.1).draw(count, stream(0, "lengths"))
    expected = count / len(values)
    chi_square = sum((drawn.count(value) - expected) ** 2 / expected for value in values)
    freedom = len(values) - 1
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


def test_a_longer_draw_begins_with_the_shorter_one() -> None:
    lengths = Lengths(100, 0.5)
    assert lengths.draw(20, stream(7, "lengths"))[:9] == lengths.draw(9, stream(7, "lengths"))


@pytest.mark.parametrize("average", [0, -1])
def test_impossible_lengths_are_refused(average: int) -> None:
    with pytest.raises(KvbenchError, match="--input-len"):
        Lengths(average)


@pytest.mark.parametrize("ratio", [-0.1, 1.0, math.nan, math.inf])
def test_impossible_ranges_are_refused(ratio: float) -> None:
    with pytest.raises(KvbenchError, match="--range-ratio"):
        Lengths(10, ratio)


def test_constant_arrivals_have_no_variation() -> None:
    times = schedule("constant", 1_000, 0.5, seed=0)
    assert times[:3] == [2.0, 4.0, 6.0]
    assert variation(times) == 0


def test_poisson_arrivals_keep_no_whole_seconds() -> None:
    count = 10_000
    times = schedule("poisson", count, 0.5, seed=0)
    assert abs(variation(times) - 1) < 5 / math.sqrt(count)
    near = sum(abs(time - round(time)) < 0.0005 for time in times) / count
    assert near < 0.001 + 5 * math.sqrt(0.001 / count)
    assert not any(time.is_integer() for time in times)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_arrivals_follow_their_burstiness(burstiness: float) -> None:
    """The gaps' coefficient of variation c is 1 / sqrt(burstiness); its estimate from n gamma gaps has the standard
    error c sqrt((1 + c²) / 2n), by the delta method."""
    count, rate = 20_000, 8.0
    times = schedule("gamma", count, rate, seed=1, burstiness=burstiness)
    c = 1 / math.sqrt(burstiness)
    assert abs(variation(times) - c) < 5 * c * math.sqrt((1 + c * c) / (2 * count))
    assert abs(mean(gaps(times)) - 1 / rate) < 5 * c / rate / math.sqrt(count)
    assert all(gap >= 0 for gap in gaps(times))
    assert times[0] > 0


def test_gamma_with_burstiness_1_is_poisson() -> None:
    assert schedule("gamma", 50, 3.0, seed=2) == schedule("poisson", 50, 3.0, seed=2)


def test_a_schedule_follows_its_seed_and_its_rate() -> None:
    slow = schedule("poisson", 50, 1.0, seed=5)
    assert schedule("poisson", 50, 1.0, seed=5) == slow
    assert schedule("poisson", 50, 1.0, seed=6) != slow
    assert schedule("poisson", 50, 4.0, seed=5) == pytest.approx([time / 4 for time in slow])
    assert schedule("poisson", 80, 1.0, seed=5)[:50] == slow


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("kind", ["poisson", "gamma", "constant"])
def test_impossible_rates_are_refused(kind: str, rate: float) -> None:
    with pytest.raises(KvbenchError, match="--request-rate"):
        schedule(kind, 5, rate, seed=0)


@pytest.mark.parametrize("burstiness", [0.0, -1.0, math.nan, math.inf])
def test_impossible_burstiness_is_refused(burstiness: float) -> None:
    with pytest.raises(KvbenchError, match="--burstiness"):
        schedule("gamma", 5, 1.0, seed=0, burstiness=burstiness)


@pytest.mark.parametrize(
    ("kind", "count", "rate", "burstiness", "named"),
    [
        ("uniform", 5, 1.0, 1.0, "--arrivals"),
        ("poisson", 0, 1.0, 1.0, "--num-prompts"),
        ("constant", 5, 1.0, 2.0, "--burstiness"),
        ("gamma", 5, 1e-300, 1e-300, "--request-rate"),
        ("constant", 5, 5e-324, 1.0, "--request-rate"),
    ],
)
def test_other_bad_schedules_are_refused(kind: str, count: int, rate: float, burstiness: float, named: str) -> None:
    with pytest.raises(KvbenchError, match=named):
        schedule(kind, count, rate, seed=0, burstiness=burstiness)
