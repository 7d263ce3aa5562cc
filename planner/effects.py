"""Fitted parameters as sums of effects, so that what was never measured falls back to what is like it.

The logarithm of a parameter is its prior mean plus one effect for each level a situation has: all cards, this card,
this engine generation, this card under this engine … An effect that nothing was measured for is 0, and each is drawn to
0 by its prior's width: partial pooling. A new card keeps the effects of its engine, a new engine those of its card.
The widths were chosen by the cross-validation itself, which lowered its error by a thirtieth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvbench.planner.predict import Situation
from kvbench.planner.published import Configuration


@dataclass(frozen=True, slots=True)
class Parameter:
    """Prior median, its width (one standard deviation of the logarithm), and that of each level's effects."""

    name: str
    median: float
    width: float
    levels: tuple[tuple[str, float], ...]
    least: float = 0.0
    most: float = math.inf


PARAMETERS = (
    Parameter(
        "bandwidth_efficiency",
        0.80,
        0.03,
        (("card", 0.08), ("kind", 0.5), ("kind generation", 0.35), ("moe generation", 0.3)),
        0.3,
        0.97,
    ),
    Parameter(
        "compute_efficiency",
        0.55,
        0.5,
        (("card", 0.45), ("kind", 0.25), ("kind generation", 0.13), ("moe generation", 0.25)),
        0.1,
        0.95,
    ),
    Parameter("kv_efficiency", 0.7, 0.12, (("generation", 0.16), ("generation card", 0.2)), 0.05, 1.3),
    Parameter("link_efficiency", 0.4, 0.2, (("link", 0.25), ("card", 0.5), ("generation card", 0.4)), 0.01, 1.0),
    Parameter("layer_s", 4e-6, 0.5, (("generation", 0.2),)),
    Parameter("host_layer_s", 60e-6, 0.2, (("generation", 0.15), ("generation card", 0.4))),
    Parameter(
        "sequence_s",
        15e-6,
        1.7,
        (("generation load", 2.0), ("engine card", 0.5), ("engine card load", 0.5), ("generation shape load", 0.3)),
    ),
    Parameter("link_s", 8e-6, 1.2, (("link", 0.5), ("generation card", 0.4))),
    Parameter("request_s", 5e-3, 2.0, (("group", 2.0), ("engine card", 1.2), ("engine card parallel", 0.5))),
)


def level_of(level: str, configuration: Configuration, situation: Situation) -> str:
    """The name of the effect that a situation has at a level; blank where the level does not concern it."""
    moe = "moe" if situation.shape.experts else "dense"
    values = {
        "card": situation.card.id,
        "link": situation.card.link,
        "kind": situation.number.kind,
        "generation": situation.engine.generation,
        "engine": configuration.engine,
        "group": configuration.group,
        "load": "offline" if configuration.load == "offline" else "served",
        "moe": moe,
        "shape": situation.shape.name,
        "parallel": "one" if situation.tp == 1 else "several",
    }
    if level.startswith("moe") and moe == "dense":
        return ""
    return f"{level}: " + " | ".join(values[part] for part in level.split())


def effect_names(configuration: Configuration, situation: Situation) -> dict[str, list[str]]:
    """For each parameter the effects that add up in it, the one common to all first."""
    names = {}
    for parameter in PARAMETERS:
        levels = [level_of(level, configuration, situation) for level, _ in parameter.levels]
        names[parameter.name] = ["all", *(name for name in levels if name)]
    return names


def width_of(parameter: Parameter, effect: str) -> float:
    """The prior's width of an effect."""
    if effect == "all":
        return parameter.width
    return dict(parameter.levels)[effect.split(":")[0]]


Effects = Mapping[tuple[str, str], float]
"""By parameter and effect; what is not in it is 0."""


def values_of(effects: Effects, names: Mapping[str, list[str]]) -> dict[str, float]:
    """Parameters from the effects that add up in them, within their bounds."""
    values = {}
    for parameter in PARAMETERS:
        total = sum(effects.get((parameter.name, name), 0.0) for name in names[parameter.name])
        values[parameter.name] = min(max(parameter.median * math.exp(total), parameter.least), parameter.most)
    return values
