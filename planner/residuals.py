"""What the step-time model leaves over, where like things leave over alike.

The logarithm of measured over predicted is taken as a sum of effects of nested groups (this engine on this card; this
model there; these lengths and cards, at any load), each drawn to 0 by its width: the best linear prediction of a mixed
model. It corrects what is near something measured and nothing else: a new card gets the correction of its engine at
most. Each family of metrics has effects of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from kvbench.planner.fit import Case

FAMILIES = {
    "output_tput": "throughput",
    "total_tput": "throughput",
    "completed_req_rate": "throughput",
    "tpot_mean_ms": "tpot",
    "tpot_p50_ms": "tpot",
    "tpot_p99_ms": "tpot_p99",
    "ttft_mean_ms": "ttft",
    "ttft_p50_ms": "ttft",
    "ttft_p99_ms": "ttft_p99",
    "e2e_mean_ms": "e2e",
    "e2e_p99_ms": "e2e_p99",
    "decode_step_ms": "decode_step",
    "prompt_step_ms": "prompt_step",
}
WIDTHS = {"ttft": 2.5, "ttft_p99": 4.0, "tpot_p99": 2.0, "prompt_step": 1.5}
"""How much wider than `LEVELS` a family's effects and noise are."""

LEVELS = (
    ("generation load", 0.02),
    ("engine card load", 0.03),
    ("engine card shape kind load", 0.04),
    ("engine card shape kind load tp lengths", 0.05),
)
NOISE = 0.06
FREEDOM = 4.0
ROUNDS = 4

Effects = dict[tuple[str, str], float]
"""By family and group."""


def groups_of(case: Case) -> list[str]:
    """The nested groups of a configuration, the widest first."""
    configuration, situation = case.configuration, case.situation
    values = {
        "generation": situation.engine.generation,
        "engine": configuration.engine,
        "card": situation.card.id,
        "shape": configuration.shape,
        "kind": situation.number.kind,
        "load": configuration.load,
        "tp": f"tp{situation.tp}",
        "lengths": configuration.lengths,
    }
    return [" | ".join(values[part] for part in level.split()) for level, _ in LEVELS]


def fit_residuals(cases: Sequence[Case], residual: Iterable[np.ndarray]) -> Effects:
    """Effects of all groups from the residuals of all rows, family by family; rows far off count little."""
    import numpy as np

    rows: dict[str, list[tuple[list[str], float]]] = {}
    for case, off in zip(cases, residual, strict=True):
        groups = groups_of(case)
        for (metric, _), value in zip(case.measured, off, strict=True):
            rows.setdefault(FAMILIES[metric], []).append((groups, float(value)))
    effects: Effects = {}
    for family, members in rows.items():
        scale = WIDTHS.get(family, 1.0)
        index: dict[str, int] = {}
        columns = np.array([[index.setdefault(group, len(index)) for group in groups] for groups, _ in members])
        widths = np.ones(len(index))
        for level, (_, width) in enumerate(LEVELS):
            widths[columns[:, level]] = width * scale
        target = np.array([value for _, value in members])
        found: np.ndarray = np.zeros(len(index))
        for _ in range(ROUNDS):
            size = (target - found[columns].sum(1)) / (NOISE * scale)
            weight = (FREEDOM + 1) / (FREEDOM + size**2) / (NOISE * scale) ** 2
            normal = np.diag(1.0 / widths**2)
            right = np.zeros(len(index))
            for a in range(len(LEVELS)):
                np.add.at(right, columns[:, a], weight * target)
                for b in range(len(LEVELS)):
                    np.add.at(normal, (columns[:, a], columns[:, b]), weight)
            found = np.asarray(np.linalg.solve(normal, right))
        effects |= {(family, group): float(found[i]) for group, i in index.items()}
    return effects


def correction(effects: Effects, case: Case, metric: str) -> float:
    """The sum of the effects that a metric of a configuration has: the logarithm of a factor."""
    family = FAMILIES[metric]
    return sum(effects.get((family, group), 0.0) for group in groups_of(case))
