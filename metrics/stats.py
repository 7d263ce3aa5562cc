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


ROUNDING = 1e-9
"""Differences of differences below this share are those of floats: 0.95 - 0.9 is not quite 0.9 - 0.85."""


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
    """`effect` is b / a or b - a, its samples the pairs; `verdict` judges b against a: BETTER, WORSE or UNPROVEN. `p`
    is that of no difference (two-sided, over the pairs), None below two pairs."""

    effect: Interval
    verdict: str
    p: float | None = None


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
    logs = [_log_ratio(x, y) for x, y in _pairs(a, b)]
    found = mean_interval(logs, level)
    value, low, high = (None if log is None else math.exp(log) for log in (found.value, found.low, found.high))
    effect = Interval(value, low, high, found.n, found.dropped)
    return Comparison(effect, _verdict(found, higher_is_better), _p_value(logs))


def paired_difference(
    a: Sequence[float | None], b: Sequence[float | None], *, higher_is_better: bool, level: float = 0.95
) -> Comparison:
    """By how much `b` is more than `a`: as `paired_ratio`, of b - a and with 0 for no difference. For what may be 0.

    Such things are mostly counts or shares of counts, whose differences may all be the same by chance: of 20 requests
    one more is in time in each of two pairs. Student's t knows no chance without a spread and would find that
    infinitely clear. So these are judged by their signs: where nothing differs either sign is as likely, and all n
    pairs have the same one with a probability of 2 ^ (1 - n). From six pairs on that proves something at 5 %; with
    fewer there is no interval. (A ratio of two times or rates is no count: what is the same there is no chance.)
    """
    steps = [None if x is None or y is None else y - x for x, y in _pairs(a, b)]
    found, p = mean_interval(steps, level), _p_value(steps)
    known = [step for step in steps if step is not None]
    if len(known) > 1 and max(known) - min(known) <= ROUNDING * max(map(abs, known)):
        by_sign = 2.0 ** (1 - len(known))
        p = by_sign if found.value else 1.0
        if by_sign > 1 - level:
            found = Interval(found.value, None, None, found.n, found.dropped)
    return Comparison(found, _verdict(found, higher_is_better), p)


def holm_levels(p_values: Sequence[float | None], level: float = 0.95) -> list[float]:
    """At which level each of several hypotheses is judged, so that all true ones together are rejected with a
    probability of 1 - `level` at most, however they hang together (Holm 1979).

    The smallest of m p-values is held against alpha / m, the next against alpha / (m - 1) and so on; from the first
    that is not below on, none is rejected, and all of them have its level. So an interval at the level given here
    leaves out the null where Holm rejects it, and nowhere else. Those without a p-value are no hypotheses.
    """
    alpha = 1 - level
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    levels = [level] * len(p_values)
    each = alpha
    rejecting = True
    for rank, (p, place) in enumerate(known):
        if rejecting:
            each = alpha / (len(known) - rank)
            rejecting = p < each
        levels[place] = 1 - each
    return levels


def _pairs(a: Sequence[float | None], b: Sequence[float | None]) -> zip[tuple[float | None, float | None]]:
    assert len(a) == len(b), f"{len(a)} values against {len(b)} are no pairs"
    return zip(a, b, strict=True)


def _verdict(difference: Interval, higher_is_better: bool) -> str:
    """What an interval that has 0 for no difference proves."""
    low, high = difference.low, difference.high
    if low is None or high is None or low <= 0 <= high:
        return UNPROVEN
    return BETTER if (low > 0) == higher_is_better else WORSE


def _p_value(differences: Sequence[float | None]) -> float | None:
    from scipy.special import stdtr

    known = [value for value in differences if value is not None]
    spread = standard_deviation(known)
    if spread is None:
        return None
    mean = math.fsum(known) / len(known)
    if not spread:
        return float(not mean)
    return 2 * float(stdtr(len(known) - 1, -abs(mean) / spread * math.sqrt(len(known))))


def _log_ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None or a <= 0 or b <= 0 else math.log(b) - math.log(a)
