"""Predictions of what was left out: the fit again without each fold, and the fold predicted by it.

Every fold starts from the fit of all rows, for speed only: the optimum of the rest does not depend on where the search
begins, but for rows that contradict each other. Two steps of Gauss and Newton use that fit's derivatives and the rest's
own residuals (docs/accuracy.md says how near a fit from the priors comes).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.planner.effects import PARAMETERS, Effects, values_of
from kvbench.planner.fit import Case, Linear, linearise, residuals, solve
from kvbench.planner.published import Configuration
from kvbench.planner.residuals import correction, fit_residuals

if TYPE_CHECKING:
    import numpy as np

FOLDS = 5


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A case predicted without its `fold`: metrics, the class it belongs to, and the step parameters' effects."""

    case: Case
    kind: str
    predicted: dict[str, float]
    effects: Effects
    fold: str = ""


def rate_fold(configuration: Configuration) -> str:
    """One of five, by the configuration alone."""
    digest = hashlib.sha256(configuration.key.encode()).digest()
    return str(digest[0] % FOLDS)


def shape_fold(configuration: Configuration) -> str:
    return configuration.shape


def card_fold(configuration: Configuration) -> str:
    return configuration.card


def lonely_cards(cases: Sequence[Case]) -> set[str]:
    """Cards none of whose engine versions ran on another card."""
    on: dict[str, set[str]] = {}
    for case in cases:
        on.setdefault(case.configuration.engine, set()).add(case.configuration.card)
    shared = {card for cards in on.values() if len(cards) > 1 for card in cards}
    return {case.configuration.card for case in cases} - shared


def cross_validate(
    cases: Sequence[Case], effects: Effects, say: Callable[[str], None], everything: Sequence[Case]
) -> list[HeldOut]:
    """Every case of `everything` under each kind of hold-out that concerns it, fitted to the rest of `cases`: the rows
    that may be fitted to."""
    linear = linearise(cases, effects)
    lonely = lonely_cards(cases)
    found: list[HeldOut] = []
    for kind, fold_of in (("new rate", rate_fold), ("new model", shape_fold), ("new card", card_fold)):
        folds = sorted({fold_of(case.configuration) for case in everything})
        say(f"{kind}: {len(folds)} folds")
        for fold in folds:
            rest = [i for i, case in enumerate(cases) if fold_of(case.configuration) != fold]
            inside = [case for case in everything if fold_of(case.configuration) == fold]
            known = {case.configuration.family for case in cases if fold_of(case.configuration) != fold}
            for out in _without(cases, rest, inside, effects, linear):
                name = kind
                if kind == "new rate" and out.case.configuration.family not in known:
                    continue
                if kind == "new card" and fold in lonely:
                    name = "new card and engine"
                found.append(HeldOut(out.case, name, out.predicted, out.effects, fold))
    return found


def _without(
    cases: Sequence[Case], rest: Sequence[int], inside: Sequence[Case], start: Effects, linear: Linear
) -> list[HeldOut]:
    """The cases `inside` predicted by a fit of the `rest`."""
    others = [cases[i] for i in rest]
    slope = [linear.slope[i] for i in rest]
    left = [linear.residual[i] for i in rest]
    near = solve(others, start, left, slope)
    left = residuals(others, near)
    effects = solve(others, near, left, slope)
    moved = [value - by @ _shift(case, near, effects) for case, value, by in zip(others, left, slope, strict=True)]
    extra = fit_residuals(others, moved)
    return [HeldOut(case, "", corrected(case, effects, extra), effects) for case in inside]


def _shift(case: Case, before: Effects, after: Effects) -> np.ndarray:
    """By how much each parameter's logarithm moved for a case."""
    import numpy as np

    was, now = values_of(before, case.names), values_of(after, case.names)
    return np.array([math.log(now[parameter.name] / was[parameter.name]) for parameter in PARAMETERS])


def corrected(case: Case, effects: Effects, extra: dict[tuple[str, str], float]) -> dict[str, float]:
    """Predictions of a case for the metrics that were measured there."""
    run = case.predict(effects)
    return {
        metric: run[metric] * math.exp(correction(extra, case, metric)) for metric, _ in case.measured if metric in run
    }
