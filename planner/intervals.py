"""How far a measurement may lie from its prediction: ranges that held 90 % of what cross-validation left out.

A residual is the logarithm of measured over predicted, by a fit that has not seen the fold: it holds the scatter of
what is measured and the parameters' own uncertainty together, as every fold is a fit to other data (a jackknife over
configurations, models or cards). So quantiles of residuals are not widened by a bootstrap over parameters once more.
They are taken by class (how near a prediction is to what was fitted) and family of metrics, at the ranks that hold
of the next value too (conformal prediction), and `kvbench score --cross-validate --intervals` writes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from kvbench.planner.residuals import FAMILIES

FILE = "intervals.toml"
TAIL = 0.05
"""Of what is measured lies below a range, and above it."""

FEWEST = 10
"""With fewer residuals no range is given."""

FEWEST_FOLDS = 3
"""Rows that were left out together are off together: of fewer folds nothing is known of the next one."""

FEWEST_TAILS = 19
"""From so many on there is a rank that 5 % of the next values lie beyond; of fewer the range is their extremes."""

CALIBRATED, NEW_RATE, NEW_MODEL, NEW_CARD, NEW_ENGINE = (
    "calibrated",
    "new rate",
    "new model",
    "new card",
    "new card and engine",
)
KINDS = (CALIBRATED, NEW_RATE, NEW_MODEL, NEW_CARD, NEW_ENGINE)
"""From the nearest on."""

EVIDENCE = {
    CALIBRATED: "measured",
    NEW_RATE: "interpolated",
    NEW_MODEL: "transferred",
    NEW_CARD: "transferred",
    NEW_ENGINE: "datasheet-only",
}
"""What a class of predictions rests on. What was fitted to is held no nearer than a new rate."""


@dataclass(frozen=True, slots=True)
class Residual:
    """One held-out row: its class, family and fold, and the logarithm of measured over predicted."""

    kind: str
    family: str
    fold: str
    log_ratio: float


@dataclass(frozen=True, slots=True)
class Range:
    """Factors of a prediction between which 90 % of `n` residuals are."""

    low: float
    high: float
    n: int

    def around(self, predicted: float) -> tuple[float, float]:
        return predicted * self.low, predicted * self.high


Ranges = Mapping[tuple[str, str], Range]
"""By class and family."""


def range_of(log_ratios: Sequence[float]) -> Range | None:
    """The ranks that the next residual lies between with a probability of 90 %, and the prediction itself, where most
    were off to one side; None of too few."""
    n = len(log_ratios)
    if n < FEWEST:
        return None
    ordered = sorted(log_ratios)
    place = math.floor(TAIL * (n + 1)) - 1 if n >= FEWEST_TAILS else 0
    low, high = ordered[place], ordered[n - 1 - place]
    return Range(math.exp(min(low, 0.0)), math.exp(max(high, 0.0)), n)


def ranges_of(residuals: Iterable[Residual]) -> dict[tuple[str, str], Range]:
    """The range of every class and family that has residuals enough, of folds enough."""
    groups: dict[tuple[str, str], list[Residual]] = {}
    for one in residuals:
        groups.setdefault((one.kind, one.family), []).append(one)
    known = {key: rows for key, rows in groups.items() if len({row.fold for row in rows}) >= FEWEST_FOLDS}
    found = {key: range_of([row.log_ratio for row in rows]) for key, rows in known.items()}
    return {key: value for key, value in found.items() if value is not None}


class Nested:
    """Ranges for residuals themselves: each from the folds that it is not in."""

    def __init__(self, residuals: Sequence[Residual]) -> None:
        self._residuals = residuals
        self._known: dict[str, dict[tuple[str, str], Range]] = {}

    def find(self, kind: str, metric: str, fold: str) -> Range | None:
        if fold not in self._known:
            self._known[fold] = ranges_of(one for one in self._residuals if one.fold != fold)
        return find_range(self._known[fold], kind, metric)


def find_range(ranges: Ranges, kind: str, metric: str) -> Range | None:
    """That of a class and metric; what was fitted to has the range of a new rate."""
    return ranges.get((NEW_RATE if kind == CALIBRATED else kind, FAMILIES.get(metric, "")))


COLUMNS = {"output_tokens_per_s": "output_tput", "tpot_mean_s": "tpot_mean_ms", "ttft_mean_s": "ttft_mean_ms"}
"""What a run's row has a range of, and the metric whose it is."""


def columns_of(kind: str, beyond: bool, numbers: Mapping[str, object], ranges: Ranges) -> dict[str, object]:
    """What a predicted row rests on and its ranges. Beyond what was fitted a prediction is no better than a new card's,
    and its range holds those of all nearer classes."""
    nearer = [kind]
    if beyond and KINDS.index(kind) < KINDS.index(NEW_CARD):
        nearer, kind = list(KINDS[KINDS.index(kind) : KINDS.index(NEW_CARD) + 1]), NEW_CARD
    found: dict[str, object] = {"evidence_class": EVIDENCE[kind], "prediction_class": kind}
    for column, metric in COLUMNS.items():
        known = widest([one for name in nearer if (one := find_range(ranges, name, metric)) is not None])
        value = numbers.get(column)
        ends = known.around(value) if known and isinstance(value, float) else (None, None)
        found |= dict(zip((f"{column}_low", f"{column}_high"), ends, strict=True))
    return found


def widest(ranges: Sequence[Range]) -> Range | None:
    """What holds all of these; None of none."""
    if not ranges:
        return None
    return Range(min(one.low for one in ranges), max(one.high for one in ranges), sum(one.n for one in ranges))


@cache
def shipped_ranges() -> dict[tuple[str, str], Range]:
    """What the package has."""
    import tomllib

    table = tomllib.loads(files("kvbench.planner").joinpath(FILE).read_text(encoding="utf-8"))
    return {
        (kind, family): Range(math.exp(one["low"]), math.exp(one["high"]), one["n"])
        for kind, families in table.get("range", {}).items()
        for family, one in families.items()
    }


def write(ranges: Ranges, source: str, date: str) -> str:
    """The text of `intervals.toml`."""
    lines = [
        "# Written by `kvbench score FILE --cross-validate --intervals`; not to be edited by hand. Logarithms of",
        "# measured over predicted, of n rows predicted without their fold: 5 % lie below low, 5 % above high.",
        "",
        "[fitted]",
        f"source = {json.dumps(source)}",
        f"date = {json.dumps(date)}",
    ]
    for (kind, family), one in sorted(ranges.items(), key=lambda item: (KINDS.index(item[0][0]), item[0][1])):
        lines += ["", f"[range.{json.dumps(kind)}.{family}]", f"low = {math.log(one.low):.3f}"]
        lines += [f"high = {math.log(one.high):.3f}", f"n = {one.n}"]
    return "\n".join(lines) + "\n"
