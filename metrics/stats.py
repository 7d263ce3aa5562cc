"""What numbers prove: percentiles, intervals over repeats, and the paired comparison of two backends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BETTER = "better"
WORSE = "worse"
UNPROVEN = "no proven difference"

BETWEEN, WITHIN = "between repeats", "within one repeat"

P99_SAMPLES = 299
"""A p99 of fewer samples is flagged: with 299, one of them lies beyond the true p99 with a probability of 95 %."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its confidence interval. `value` is None without samples, `low` and `high` below two ("needs
    two repeats"). `n` samples were used, `dropped` were undefined and left out. The samples are repeats (BETWEEN), or
    the batches of a single one (WITHIN)."""

    value: float | None
    low: float | None
    high: float | None
    n: int
    dropped: int
    over: str = BETWEEN


@dataclass(frozen=True, slots=True)
class Comparison:
    """`effect` is b / a, its samples the pairs; `verdict` judges b against a: BETTER, WORSE or UNPROVEN."""

    effect: Interval
    verdict: str


def percentile(values: Sequence[float], q: float, errors: int = 0) -> float | None:
    """The `q`-th percentile (0 to 100) by linear interpolation, numpy's default; None of nothing.

    `errors` more samples count as +infinity. Only finite neighbours are interpolated: a percentile that reaches into
    the errors is None.
    """
    import numpy as np

    reach = math.ceil(q * (len(values) + errors - 1) / 100)
    if not values or reach >= len(values):
        return None
    return float(np.percentile([*values, *[max(values)] * errors], q))  # below `reach` all are finite


def standard_deviation(values: Sequence[float]) -> float | None:
    """Of a sample (ddof 1); None below two values."""
    import numpy as np

    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def mean_interval(values: Iterable[float | None], level: float = 0.95) -> Interval:
    """Mean of independent repeats with its Student-t interval, mean ± t(n - 1) · s / √n. None values are dropped."""
    from scipy.special import stdtrit

    assert 0 < level < 1, level
    values = list(values)
    known = [value for value in values if value is not None]
    assert all(math.isfinite(value) for value in known), f"not numbers: {known}"
    dropped = len(values) - len(known)
    if not known:
        return Interval(None, None, None, 0, dropped)
    mean = math.fsum(known) / len(known)
    spread = standard_deviation(known)
    if spread is None:
        return Interval(mean, None, None, 1, dropped)
    half = float(stdtrit(len(known) - 1, (1 + level) / 2)) * spread / math.sqrt(len(known))
    return Interval(mean, mean - half, mean + half, len(known), dropped)


def paired_ratio(
    a: Sequence[float | None], b: Sequence[float | None], *, higher_is_better: bool, level: float = 0.95
) -> Comparison:
    """How many times `a` is `b`, where a[i] and b[i] share a seed: the geometric mean of b / a.

    The interval is Student's t on the logarithms of the ratios. A pair with None or without a logarithm (zero or less)
    is dropped and counted. Without an interval, or with 1 inside it, nothing is proven.
    """
    assert len(a) == len(b), f"{len(a)} values against {len(b)} are no pairs"
    logs = mean_interval([_log_ratio(x, y) for x, y in zip(a, b, strict=True)], level)
    value, low, high = (None if log is None else math.exp(log) for log in (logs.value, logs.low, logs.high))
    verdict = UNPROVEN
    if low is not None and high is not None and not low <= 1 <= high:
        verdict = BETTER if (low > 1) == higher_is_better else WORSE
    return Comparison(Interval(value, low, high, logs.n, logs.dropped), verdict)


def _log_ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None or a <= 0 or b <= 0 else math.log(b) - math.log(a)
