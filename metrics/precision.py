"""`--until-ci`: repeats are added until an interval is narrow enough.

Stopping looks at how wide an interval is and never at where it lies, so no difference is proven by waiting for one. A
small bias stays: repeats that happen to agree stop early, and their interval is too narrow (Chow and Robbins 1965: it
vanishes only with many repeats). A minimum of repeats bounds it; docs/statistics.md shows by how much.
"""

from __future__ import annotations

from kvbench.metrics.stats import Interval

FEWEST_REPEATS = 6
"""With fewer an interval that was waited for holds the truth in fewer than 93 of 100 cases instead of 95. Even, so that
neither backend comes first more often."""
REPEATS_CAP = 40
"""Without a word from the user no more are added."""


def wide(interval: Interval, share: float) -> bool:
    """Whether half the interval is more than `share` of the value; also where there is no interval."""
    if interval.value is None or interval.low is None or interval.high is None:
        return True
    return (interval.high - interval.low) / 2 > share * abs(interval.value)
