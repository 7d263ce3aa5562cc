"""What a score comes to: errors and coverage by metric and class, the ranges of classes, and what was refused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvbench.planner.intervals import ranges_of
from kvbench.planner.residuals import FAMILIES
from kvbench.planner.score import CLASSES, SAME, Outcome, residuals_of


@dataclass(frozen=True, slots=True)
class Line:
    """One metric in one class."""

    metric: str
    kind: str
    n: int
    mape: float | None
    median: float | None
    bias: float | None
    p90: float | None
    refused: int
    excluded: int
    baseline_n: int
    baseline_mape: float | None
    baseline_bias: float | None
    baseline_p90: float | None
    ranged: int
    covered: float | None

    def as_row(self) -> dict[str, str | int | float | None]:
        """As it is stored: relative errors, not per cent."""
        return {
            "metric": self.metric,
            "class": self.kind,
            "n": self.n,
            "mape": self.mape,
            "bias": self.bias,
            "p90": self.p90,
            "refused": self.refused,
            "excluded": self.excluded,
            "median": self.median,
            "baseline_n": self.baseline_n,
            "baseline_mape": self.baseline_mape,
            "baseline_bias": self.baseline_bias,
            "baseline_p90": self.baseline_p90,
            "ranged": self.ranged,
            "covered": self.covered,
        }


def summarise(outcomes: Iterable[Outcome]) -> list[Line]:
    """Errors by metric and class, in the order of classes."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.kind, outcome.row.metric), []).append(outcome)
    lines = []
    for kind, metric in sorted(groups, key=lambda key: (CLASSES.index(key[0]), key[1])):
        members = groups[kind, metric]
        own = [one.predicted / one.row.value - 1 for one in members if one.predicted is not None]
        plain = [one.baseline / one.row.value - 1 for one in members if one.baseline is not None]
        mape, median, bias, p90 = _errors(own)
        plain_mape, _, plain_bias, plain_p90 = _errors(plain)
        refused = sum(bool(one.refused) for one in members)
        excluded = sum(bool(one.excluded) for one in members)
        within = [one.covered for one in members if one.covered is not None]
        lines.append(
            Line(
                *(metric, kind, len(own), mape, median, bias, p90, refused, excluded),
                *(len(plain), plain_mape, plain_bias, plain_p90),
                *(len(within), sum(within) / len(within) if within else None),
            )
        )
    return lines


def _errors(errors: Sequence[float]) -> tuple[float | None, float | None, float | None, float | None]:
    """Mean and median absolute error, mean error, 90th percentile of the absolute one (linear interpolation)."""
    if not errors:
        return None, None, None, None
    sizes = sorted(abs(error) for error in errors)

    def at(share: float) -> float:
        place = share * (len(sizes) - 1)
        low = math.floor(place)
        return sizes[low] + (place - low) * (sizes[min(low + 1, len(sizes) - 1)] - sizes[low])

    return sum(sizes) / len(sizes), at(0.5), sum(errors) / len(errors), at(0.9)


def refusals(outcomes: Iterable[Outcome]) -> tuple[Counter[str], Counter[str], float]:
    """Rows refused and excluded by rule, and the share refused of those with a known card and shape; each row once."""
    seen: dict[int, Outcome] = {}
    for outcome in outcomes:
        seen.setdefault(outcome.row.line, outcome)
    refused = Counter(one.refused for one in seen.values() if one.refused)
    excluded = Counter(one.excluded for one in seen.values() if one.excluded)
    known = sum(one.refused != "card or shape" and not one.excluded for one in seen.values())
    of_known = sum(count for rule, count in refused.items() if rule != "card or shape")
    return refused, excluded, of_known / known if known else 0.0


def coverage(outcomes: Sequence[Outcome]) -> list[dict[str, str | int | float | None]]:
    """By class and family: the range of all folds, and how many held-out rows those of the other folds held."""
    within: dict[tuple[str, str], list[bool]] = {}
    for one in outcomes:
        if one.covered is not None:
            family = FAMILIES[SAME.get(one.row.metric, one.row.metric)]
            within.setdefault((one.kind, family), []).append(one.covered)
    ranges = sorted(ranges_of(residuals_of(outcomes)).items(), key=lambda item: (CLASSES.index(item[0][0]), item[0][1]))
    rows: list[dict[str, str | int | float | None]] = []
    for (kind, family), found in ranges:
        held = within.get((kind, family), [])
        share = sum(held) / len(held) if held else None
        row: dict[str, str | int | float | None] = {"class": kind, "family": family, "n": found.n}
        rows.append(row | {"low": found.low, "high": found.high, "ranged": len(held), "covered": share})
    return rows
