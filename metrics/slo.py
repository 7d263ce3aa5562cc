"""What counts as fast enough: service level objectives, how they are written and when they hold."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal

from kvbench.errors import KvbenchError
from kvbench.metrics.latency import PER_REQUEST
from kvbench.metrics.records import FINISHED, RequestRecord
from kvbench.metrics.stats import percentile

METRICS = ("ttft", "tpot", "e2e")
ATTAINMENT_TARGET = 0.99


@dataclass(frozen=True, slots=True)
class Slo:
    """At most `limit_s` seconds of `metric`: for each request, or at a `percentile` of all requests where one is given.

    Raises KvbenchError where the metric is unknown or a number makes no sense.
    """

    metric: str
    limit_s: float
    percentile: float | None = None

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            near = difflib.get_close_matches(self.metric, METRICS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(METRICS)}"
            raise KvbenchError(f"unknown SLO metric {self.metric!r}; {hint}")
        if not (math.isfinite(self.limit_s) and self.limit_s > 0):
            raise KvbenchError(f"the limit of SLO {self.metric} must be a time above 0, not {self.limit_s} s")
        if self.percentile is not None and not 0 < self.percentile <= 100:
            raise KvbenchError(f"the percentile of SLO {self.metric} must be above p0 and at most p100")

    def __str__(self) -> str:
        """As the user may write it; parsing it again gives the same objective."""
        return ":".join([self.metric, *([] if self.percentile is None else [self.rank]), f"{self.limit_s!r}s"])

    @property
    def rank(self) -> str:
        """`p99`, `p99.9`; the empty string where each request is asked."""
        return "" if self.percentile is None else f"p{self.percentile:.15g}"

    def met_by(self, request: RequestRecord) -> bool:
        """Whether one request is in time. An error never is; one token has no TPOT and is, vacuously."""
        value_s = PER_REQUEST[self.metric](request)
        return request.status == FINISHED and (value_s is None or value_s <= self.limit_s)

    def judge(self, requests: Iterable[RequestRecord]) -> tuple[float | None, bool]:
        """The percentile over all `requests` in seconds, and whether it is in time.

        Errors count as +infinity: a percentile that reaches into them is None and fails. One over no values and no
        errors (every answer has one token) is None and holds vacuously.
        """
        assert self.percentile is not None, f"{self} asks each request"
        requests = list(requests)
        values = [value for request in requests if (value := PER_REQUEST[self.metric](request)) is not None]
        errors = sum(request.status != FINISHED for request in requests)
        value_s = percentile(values, self.percentile, errors)
        return value_s, value_s <= self.limit_s if value_s is not None else not errors


DEFAULT_SLOS = (Slo("ttft", 1.5), Slo("tpot", 0.05))


def parse_slo(text: str) -> Slo:
    """`METRIC[:PERCENTILE]:VALUE`, the value with a unit (`500ms`, `1.5s`) or in milliseconds: `ttft:p99:1500`."""
    match [part.strip().lower() for part in text.split(":")]:
        case [metric, value]:
            rank = None
        case [metric, rank, value]:
            pass
        case _:
            raise KvbenchError(f"SLO {text!r} is not METRIC:VALUE or METRIC:PERCENTILE:VALUE, as in ttft:p99:1500")
    return Slo(metric, _seconds(value, text), None if rank is None else _percentile(rank, text))


def parse_slos(texts: Iterable[str]) -> tuple[Slo, ...]:
    """Several objectives, each text one of them or a list with commas: `ttft:1500,tpot:50`."""
    return tuple(parse_slo(part) for text in texts for part in text.split(","))


def _seconds(value: str, text: str) -> float:
    number, scale = value, 1000
    for unit, divisor in (("ms", 1000), ("s", 1)):
        if value.endswith(unit):
            number, scale = value.removesuffix(unit), divisor
            break
    try:
        return float(Decimal(number) / scale)  # in decimals: 0.0001 ms are exactly what 1e-07 s are
    except (ValueError, ArithmeticError):
        raise KvbenchError(f"SLO {text!r}: {value!r} is no time; write 1500 (milliseconds), 500ms or 1.5s") from None


def _percentile(rank: str, text: str) -> float:
    try:
        return float(rank.removeprefix("p"))
    except ValueError:
        raise KvbenchError(f"SLO {text!r}: {rank!r} is no percentile; write p50, p90 or p99") from None
