"""Scores predictions of published measurements, by the rules of docs/accuracy.md, beside the datasheet's roofline.

Rows are looked up once: each is scored, refused (with the rule that says why) or excluded. With the shipped parameters
a row's class says how near it is to what they were fitted to; under cross-validation it is the fold that was left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvbench.planner.cost import StepParameters
from kvbench.planner.crossvalidate import corrected, cross_validate
from kvbench.planner.effects import effect_names, values_of
from kvbench.planner.fit import NOISE as SCORED
from kvbench.planner.fit import Case, fit
from kvbench.planner.intervals import Nested, Range, Residual, find_range, shipped_ranges
from kvbench.planner.predict import Refused, Situation, look_up, metrics_of, overloaded, parameters_of
from kvbench.planner.published import Configuration, Row, Settings
from kvbench.planner.residuals import FAMILIES
from kvbench.planner.shipped import Shipped

MEMORY_METRICS = {"weights_GiB_per_gpu", "activation_peak_GiB_per_gpu", "kv_pool_GiB_per_gpu", "kv_pool_tokens"}
SAME = {"output_tput_offline": "output_tput"}
"""Names under which a metric is predicted too."""

GROWS = ("ttft_", "e2e_")
"""Metrics that grow with the number of requests for as long as a queue does."""

CROSS_CLASSES = ("new rate", "new model", "new card", "new card and engine")
CLASSES = ("calibrated", *CROSS_CLASSES, "unknown")


@dataclass(slots=True)
class Outcome:
    """What became of one row under one class."""

    row: Row
    kind: str
    predicted: float | None = None
    baseline: float | None = None
    refused: str = ""
    excluded: str = ""
    reason: str = ""
    fold: str = ""
    range: Range | None = None

    @property
    def low(self) -> float | None:
        return None if self.range is None or self.predicted is None else self.range.around(self.predicted)[0]

    @property
    def high(self) -> float | None:
        return None if self.range is None or self.predicted is None else self.range.around(self.predicted)[1]

    @property
    def covered(self) -> bool | None:
        """Whether what was measured lies within the range; None where there is none."""
        low, high = self.low, self.high
        return None if low is None or high is None else low <= self.row.value <= high


@dataclass(slots=True)
class Looked:
    """All rows of a file, each with its situation or the reason why there is none."""

    cases: list[Case] = field(default_factory=list)
    case_of: dict[int, Case] = field(default_factory=dict)
    refused: dict[int, Refused] = field(default_factory=dict)
    excluded: dict[int, str] = field(default_factory=dict)


def look_at(rows: Sequence[Row]) -> Looked:
    """Apply the rules that need no prediction."""
    looked = Looked()
    situations: dict[tuple[Configuration, Settings], Situation | Refused] = {}
    cases: dict[tuple[Configuration, Settings], Case] = {}
    for i, row in enumerate(rows):
        if rule := _excluded(row):
            looked.excluded[i] = rule
            continue
        key = (row.configuration, row.settings)
        if key not in situations:
            try:
                situations[key] = look_up(*key)
            except Refused as refused:
                situations[key] = refused
        situation = situations[key]
        metric = SAME.get(row.metric, row.metric)
        if isinstance(situation, Refused):
            looked.refused[i] = situation
        elif metric not in SCORED:
            looked.refused[i] = Refused("metric", f"the score does not know the metric {row.metric!r}")
        else:
            if key not in cases:
                cases[key] = Case(*key, situation, effect_names(row.configuration, situation), [])
                looked.cases.append(cases[key])
            cases[key].measured.append((metric, row.value))
            looked.case_of[i] = cases[key]
    return looked


def _excluded(row: Row) -> str:
    if row.metric in MEMORY_METRICS:
        return "memory"
    configuration = row.configuration
    if configuration.group == "splitwise":
        doubted = row.metric == "prompt_step_ms" and configuration.tp == 2 and configuration.load_value == 64
        if doubted or "pcap" in row.note:
            return "known fault"
    if configuration.shape == "GPT-J-6B" and row.value == 54939:
        return "known fault"
    return ""


def uncounted_overload(case: Case, metric: str, values: dict[str, float]) -> bool:
    """Whether a row is of an overload that grows with a number of requests it does not state."""
    if not metric.startswith(GROWS) or case.configuration.requests is not None:
        return False
    return overloaded(case.configuration, case.situation, parameters_of(values)[0])


def usable(cases: Sequence[Case], effects: dict[tuple[str, str], float]) -> list[Case]:
    """The cases without the rows that are excluded under `effects`: what parameters may be fitted to."""
    kept = []
    for case in cases:
        values = values_of(effects, case.names)
        measured = [(metric, value) for metric, value in case.measured if not uncounted_overload(case, metric, values)]
        if measured:
            kept.append(replace(case, measured=measured, cache={}))
    return kept


class Baseline:
    """The datasheet's roofline, configuration by configuration."""

    def __init__(self) -> None:
        self.known: dict[tuple[Configuration, Settings], dict[str, float]] = {}

    def value(self, row: Row) -> float | None:
        configuration = row.configuration
        if configuration.tp is None:
            configuration = replace(configuration, tp=configuration.cards)
        key = (configuration, row.settings)
        if key not in self.known:
            try:
                self.known[key] = metrics_of(*key, look_up(*key), StepParameters(), 0.0)
            except Refused:
                self.known[key] = {}
        return self.known[key].get(SAME.get(row.metric, row.metric))


def score(rows: Sequence[Row], model: Shipped) -> list[Outcome]:
    """Each row under the shipped parameters."""
    looked, baseline = look_at(rows), Baseline()
    outcomes = []
    for i, row in enumerate(rows):
        metric, case = SAME.get(row.metric, row.metric), looked.case_of.get(i)
        if case is None:
            outcomes.append(_unscored(row, looked, i, baseline, "unknown"))
            continue
        kind = model.kind(case.configuration, case.situation.engine.generation)
        if uncounted_overload(case, metric, values_of(model.effects, case.names)):
            outcomes.append(Outcome(row, kind, excluded="overload without a request count"))
            continue
        predicted = corrected(case, model.effects, model.residuals).get(metric)
        found = Outcome(row, kind, predicted, baseline.value(row))
        found.range = find_range(shipped_ranges(), kind, metric)
        outcomes.append(found)
    return outcomes


def cross_score(rows: Sequence[Row], model: Shipped, say: Callable[[str], None]) -> list[Outcome]:
    """Each row under every hold-out that concerns it; the shipped parameters are only where the search begins."""
    looked, baseline = look_at(rows), Baseline()
    start = fit(usable(looked.cases, model.effects), model.effects, rounds=3)
    held = cross_validate(usable(looked.cases, start), start, say, everything=looked.cases)
    by_case: dict[tuple[Configuration, Settings], list[int]] = {}
    for i, case in looked.case_of.items():
        by_case.setdefault((case.configuration, case.settings), []).append(i)
    outcomes = []
    for out in held:
        values = values_of(out.effects, out.case.names)
        for i in by_case[out.case.configuration, out.case.settings]:
            row = rows[i]
            metric = SAME.get(row.metric, row.metric)
            if uncounted_overload(out.case, metric, values):
                outcomes.append(Outcome(row, out.kind, excluded="overload without a request count"))
            else:
                predicted = out.predicted.get(metric)
                outcomes.append(Outcome(row, out.kind, predicted, baseline.value(row), fold=out.fold))
    nested = Nested(residuals_of(outcomes))
    for one in outcomes:
        one.range = nested.find(one.kind, SAME.get(one.row.metric, one.row.metric), one.fold)
    for i in [*looked.refused, *looked.excluded]:
        outcomes += [_unscored(rows[i], looked, i, baseline, kind) for kind in CROSS_CLASSES[:3]]
    return outcomes


def residuals_of(outcomes: Iterable[Outcome]) -> list[Residual]:
    """What predictions of held-out rows left over."""
    return [
        Residual(one.kind, FAMILIES[SAME.get(one.row.metric, one.row.metric)], one.fold, math.log(one.row.value / off))
        for one in outcomes
        if (off := one.predicted)
    ]


def _unscored(row: Row, looked: Looked, i: int, baseline: Baseline, kind: str) -> Outcome:
    if i in looked.excluded:
        return Outcome(row, kind, excluded=looked.excluded[i])
    refused = looked.refused[i]
    return Outcome(row, kind, baseline=baseline.value(row), refused=refused.rule, reason=str(refused))
