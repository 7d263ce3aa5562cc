"""Percentiles, intervals and the paired comparison, against hand-worked and textbook numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.metrics.stats import (
    BETTER,
    UNPROVEN,
    WORSE,
    Interval,
    mean_interval,
    paired_ratio,
    percentile,
    standard_deviation,
)

finite = st.floats(-1e6, 1e6)


@given(st.lists(finite, min_size=1, max_size=30), st.integers(0, 100))
def test_percentile_is_numpys(values: list[float], q: int) -> None:
    assert percentile(values, q) == np.percentile(values, q)


@given(st.lists(finite, max_size=20), st.integers(0, 20), st.integers(0, 100))
def test_errors_are_samples_of_infinity(values: list[float], errors: int, q: int) -> None:
    samples = sorted(values) + [math.inf] * errors
    result = percentile(values, q, errors)
    if not samples:
        assert result is None
        return
    below, part = divmod(q * (len(samples) - 1), 100)
    pair = samples[below], samples[below + (part > 0)]
    if math.inf in pair:
        assert result is None
    else:
        assert result == pytest.approx(pair[0] + (pair[1] - pair[0]) * part / 100, abs=1e-6)


def test_standard_deviation_of_a_sample() -> None:
    """llama.cpp#22300: five throughputs in nanoseconds."""
    values = [12140144300.0, 12308847400.0, 12225136900.0, 12154929400.0, 11909783400.0]
    assert standard_deviation(values) == pytest.approx(148_894_758, abs=0.5)
    assert standard_deviation(values[:1]) is standard_deviation([]) is None


def test_mean_interval_by_the_t_table() -> None:
    interval = mean_interval([1.0, 2.0, 3.0])  # s = 1, t(2) = 4.302653
    assert interval.value == 2
    assert interval.high == pytest.approx(2 + 4.302652729911275 / math.sqrt(3))
    assert interval.low == pytest.approx(2 - 4.302652729911275 / math.sqrt(3))
    assert mean_interval([1.0, 2.0, 3.0], level=0.9).high == pytest.approx(2 + 2.919985580355516 / math.sqrt(3))


def test_an_interval_needs_two_repeats() -> None:
    assert mean_interval([]) == Interval(None, None, None, 0, 0)
    assert mean_interval([None, 5.0]) == Interval(5.0, None, None, 1, 1)
    assert mean_interval([4.0, 4.0, None]) == Interval(4.0, 4.0, 4.0, 2, 1)
    with pytest.raises(AssertionError, match="not numbers"):
        mean_interval([1.0, math.nan])


def test_paired_ratio_by_hand() -> None:
    logs = [math.log(2), math.log(2.2), math.log(1.8)]
    mean, spread = sum(logs) / 3, standard_deviation(logs)
    assert spread is not None
    half = 4.302652729911275 * spread / math.sqrt(3)
    result = paired_ratio([10.0, 10.0, 100.0], [20.0, 22.0, 180.0], higher_is_better=True)
    effect = result.effect
    assert effect.value == pytest.approx((2 * 2.2 * 1.8) ** (1 / 3))
    assert effect.low == pytest.approx(math.exp(mean - half))
    assert effect.high == pytest.approx(math.exp(mean + half))
    assert (effect.n, effect.dropped) == (3, 0)
    assert result.verdict == BETTER
    assert paired_ratio([10.0, 10.0, 100.0], [20.0, 22.0, 180.0], higher_is_better=False).verdict == WORSE
    assert paired_ratio([20.0, 22.0, 180.0], [10.0, 10.0, 100.0], higher_is_better=False).verdict == BETTER


def test_pairing_proves_what_the_means_hide() -> None:
    """Seeds differ tenfold, the backends by two percent: only the pairs show it."""
    a, b = [10.0, 100.0, 31.0], [10.2, 102.1, 31.59]
    assert paired_ratio(a, b, higher_is_better=True).verdict == BETTER
    assert paired_ratio(a, [b[1], b[2], b[0]], higher_is_better=True).verdict == UNPROVEN


def test_pairs_without_a_ratio_are_dropped_and_counted() -> None:
    result = paired_ratio([0.0, 1.0, None, 2.0, 3.0], [1.0, 0.0, 1.0, None, 6.0], higher_is_better=True)
    assert result.effect.value == pytest.approx(2)
    assert replace(result.effect, value=2.0) == Interval(2.0, None, None, 1, 4)
    assert result.verdict == UNPROVEN
    assert paired_ratio([], [], higher_is_better=True).effect == Interval(None, None, None, 0, 0)


def test_equal_values_prove_nothing_and_a_fixed_difference_is_proven() -> None:
    same = paired_ratio([3.0, 7.0], [3.0, 7.0], higher_is_better=True)
    assert (same.effect, same.verdict) == (Interval(1.0, 1.0, 1.0, 2, 0), UNPROVEN)
    fixed = paired_ratio([4.0, 4.0], [8.0, 8.0], higher_is_better=True)
    assert fixed.effect.low == fixed.effect.value == fixed.effect.high == pytest.approx(2)
    assert fixed.verdict == BETTER
