"""Fits effects to published measurements: regularised least squares of logarithms, by Gauss and Newton.

Every metric of every configuration is predicted by running its load on the cost model; its derivative by each
parameter is a second run with that parameter 5 % higher, and effects follow by the chain rule, since a parameter's
logarithm is a sum of them. Priors are rows of the same least squares. Residuals are taken to follow Student's t, so a
row that nothing explains counts little.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvbench.planner.effects import PARAMETERS, Effects, effect_names, values_of, width_of
from kvbench.planner.predict import Situation, metrics_of, parameters_of
from kvbench.planner.published import Configuration, Row, Settings

if TYPE_CHECKING:
    import numpy as np

STEP = 0.05
FREEDOM = 4.0
NOISE = {
    "decode_step_ms": 0.06,
    "prompt_step_ms": 0.1,
    "output_tput": 0.06,
    "total_tput": 0.06,
    "completed_req_rate": 0.06,
    "tpot_mean_ms": 0.07,
    "tpot_p50_ms": 0.07,
    "tpot_p99_ms": 0.2,
    "ttft_mean_ms": 0.2,
    "ttft_p50_ms": 0.2,
    "ttft_p99_ms": 0.5,
    "e2e_mean_ms": 0.06,
    "e2e_p99_ms": 0.15,
}
"""Standard deviations of the logarithm that each metric is taken to have by itself."""


@dataclass(slots=True)
class Case:
    """One configuration under one setting, with all that was measured there."""

    configuration: Configuration
    settings: Settings
    situation: Situation
    names: dict[str, list[str]]
    measured: list[tuple[str, float]]
    cache: dict[tuple[float, ...], dict[str, float]] = field(default_factory=dict)

    def predict(self, effects: Effects, moved: str = "") -> dict[str, float]:
        """All metrics under `effects`, the parameter `moved` raised by a step."""
        values = values_of(effects, self.names)
        if moved:
            values[moved] *= math.exp(STEP)
        key = tuple(values.values())
        if key not in self.cache:
            parameters, request_s = parameters_of(values)
            self.cache = {key: metrics_of(self.configuration, self.settings, self.situation, parameters, request_s)} | (
                {} if len(self.cache) > 40 else self.cache
            )
        return self.cache[key]


@dataclass(slots=True)
class Linear:
    """The residuals of cases and their derivatives by parameter, at one set of effects."""

    residual: list[np.ndarray]
    slope: list[np.ndarray]  # [measured, parameters]


def linearise(cases: Sequence[Case], effects: Effects) -> Linear:
    import numpy as np

    residuals, slopes = [], []
    for case in cases:
        base = case.predict(effects)
        shifted = [case.predict(effects, parameter.name) for parameter in PARAMETERS]
        residuals.append(np.array([_log_ratio(value, base.get(metric)) for metric, value in case.measured]))
        slopes.append(
            np.array([[_log_ratio(run.get(m), base.get(m)) / STEP for run in shifted] for m, _ in case.measured])
        )
    return Linear(residuals, slopes)


def _log_ratio(value: float | None, base: float | None) -> float:
    return math.log(value / base) if value and base and value > 0 and base > 0 else 0.0


def residuals(cases: Sequence[Case], effects: Effects) -> list[np.ndarray]:
    import numpy as np

    return [
        np.array([_log_ratio(value, run.get(metric)) for metric, value in case.measured])
        for case in cases
        for run in (case.predict(effects),)
    ]


def solve(
    cases: Sequence[Case], effects: Effects, residual: Sequence[np.ndarray], slope: Sequence[np.ndarray]
) -> dict[tuple[str, str], float]:
    """The effects that minimise the penalised squares of the linearised residuals: one step of Gauss and Newton."""
    import numpy as np

    index: dict[tuple[str, str], int] = {}
    for case in cases:
        for name, parts in case.names.items():
            for part in parts:
                index.setdefault((name, part), len(index))
    widths = {parameter.name: parameter for parameter in PARAMETERS}
    normal = np.diag([1.0 / width_of(widths[name], part) ** 2 for name, part in index])
    right = np.zeros(len(index))
    now = np.array([effects.get(key, 0.0) for key in index])
    for case, off, by in zip(cases, residual, slope, strict=True):
        noise = np.array([NOISE[metric] for metric, _ in case.measured])
        size = np.abs(off) / noise
        weight = (FREEDOM + 1) / (FREEDOM + size**2) / noise**2
        columns, rows = [], []
        for j, parameter in enumerate(PARAMETERS):
            for part in case.names[parameter.name]:
                columns.append(index[parameter.name, part])
                rows.append(by[:, j])
        design = np.array(rows).T
        target = off + design @ now[columns]
        normal[np.ix_(columns, columns)] += design.T @ (weight[:, None] * design)
        right[columns] += design.T @ (weight * target)
    found = np.linalg.solve(normal, right)
    return {key: float(found[i]) for key, i in index.items()}


def objective(cases: Sequence[Case], effects: Effects, residual: Sequence[np.ndarray]) -> float:
    """Penalised loss, which every accepted step lowers."""
    loss = 0.0
    for case, off in zip(cases, residual, strict=True):
        for (metric, _), value in zip(case.measured, off, strict=True):
            loss += (FREEDOM + 1) / 2 * math.log1p((float(value) / NOISE[metric]) ** 2 / FREEDOM)
    widths = {parameter.name: parameter for parameter in PARAMETERS}
    return loss + sum((value / width_of(widths[name], part)) ** 2 / 2 for (name, part), value in effects.items())


def fit(cases: Sequence[Case], start: Effects | None = None, rounds: int = 8) -> dict[tuple[str, str], float]:
    """Effects at the minimum, from `start` (none: the priors), halving steps that do not lower the loss."""
    effects: dict[tuple[str, str], float] = dict(start or {})
    best = objective(cases, effects, residuals(cases, effects))
    for _ in range(rounds):
        linear = linearise(cases, effects)
        goal = solve(cases, effects, linear.residual, linear.slope)
        share = 1.0
        while share > 0.05:
            keys = goal.keys() | effects.keys()
            trial = {k: effects.get(k, 0.0) + share * (goal.get(k, 0.0) - effects.get(k, 0.0)) for k in keys}
            loss = objective(cases, trial, residuals(cases, trial))
            if loss < best:
                break
            share /= 2
        else:
            break
        gained, effects, best = best - loss, trial, loss
        if gained < 1e-3 * best:
            break
    return effects


def cases_of(rows: Iterable[tuple[Row, Situation]]) -> list[Case]:
    """Rows of one configuration and setting as one case."""
    cases: dict[tuple[Configuration, Settings], Case] = {}
    for row, situation in rows:
        key = (row.configuration, row.settings)
        if key not in cases:
            cases[key] = Case(*key, situation, effect_names(row.configuration, situation), [])
        cases[key].measured.append((row.metric, row.value))
    return list(cases.values())
