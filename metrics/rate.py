"""How fast requests were sent, beside how fast the load wanted them sent."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from kvbench.metrics.records import RequestRecord

RATE_SLACK = 0.02
"""A load is held where the achieved rate is at most this share below the drawn one."""


def rates(requests: Sequence[RequestRecord]) -> dict[str, float | bool | None]:
    """The drawn schedule's own rate, (N - 1) / (last - first scheduled), the achieved one, (N - 1) / (last - first
    sent), and the most that were sent within a second; None for one request or no span. `rate_held`: the achieved rate
    is at most 2 % below the drawn one.

    A later turn of a conversation is scheduled by the answer before it, so only those that open one count. Samples of a
    request are one.
    """
    opening = {one.request: one for one in requests if one.turn == 0}.values()
    drawn = _rate([one.scheduled_s for one in opening])
    sent = sorted(one.sent_s for one in opening)
    achieved = _rate(sent)
    held = None if drawn is None or achieved is None else achieved >= (1 - RATE_SLACK) * drawn
    return {
        "drawn_rate_per_s": drawn,
        "achieved_rate_per_s": achieved,
        "largest_rate_1s_per_s": _most_in_a_second(sent) if achieved is not None else None,
        "rate_held": held,
    }


def _rate(times_s: Sequence[float]) -> float | None:
    span_s = max(times_s) - min(times_s) if times_s else 0.0
    return (len(times_s) - 1) / span_s if span_s > 0 else None


def _most_in_a_second(sent: Sequence[float]) -> float:
    """The most of these times, in order, in any half-open second."""
    return float(max(bisect_left(sent, at_s + 1, lo=first) - first for first, at_s in enumerate(sent)))
