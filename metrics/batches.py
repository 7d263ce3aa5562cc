"""What one run alone says of the precision of its own rate: batch means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from kvbench.metrics.stats import Interval, mean_interval

COUNTS = (30, 20, 15, 10)
"""Between 10 and 30 batches nearly all is won (Schmeiser 1982): with fewer the interval is wide, with more they hang
together."""
CORRELATED = 1.2815515655446004
"""The 90 % quantile of the normal distribution: neighbours that agree more than this are not independent."""


def rate_interval(at_s: Sequence[float], start_s: float, end_s: float, level: float = 0.95) -> Interval | None:
    """Events a second between two moments with Student's interval over equal batches of the time; `n` counts them.

    The most batches of `COUNTS` whose neighbours do not hang together (see `correlated`); None where even the fewest
    do, or where nothing happened.
    """
    import numpy as np

    if not at_s or end_s <= start_s:
        return None
    for count in COUNTS:
        events, _ = np.histogram(at_s, count, (start_s, end_s))
        rates = (events * (count / (end_s - start_s))).tolist()
        if not correlated(rates):
            return mean_interval(rates, level)
    return None


def correlated(values: Sequence[float]) -> bool:
    """Whether neighbours agree more than independent ones would in 9 of 10 cases (von Neumann 1941; Fishman 1978).

    C = 1 - Σ (x[i] - x[i-1])² / (2 Σ (x[i] - mean)²) has mean 0 and variance (n - 2) / (n² - 1) where they do not.
    """
    n = len(values)
    mean = math.fsum(values) / n
    spread = math.fsum((value - mean) ** 2 for value in values)
    if not spread:
        return False
    steps = math.fsum((after - before) ** 2 for before, after in pairwise(values))
    return 1 - steps / (2 * spread) > CORRELATED * math.sqrt((n - 2) / (n * n - 1))
