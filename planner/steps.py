"""The step times of a card under this engine: the cost model with the shipped parameters, and how near these are to
what was measured.

This engine schedules as vLLM's V1 does, so that generation's parameters stand for it, at no version in particular.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvbench.engine.shapes import ModelShape
from kvbench.errors import KvbenchError
from kvbench.planner.catalog import Card
from kvbench.planner.cost import CostModel, cost_model
from kvbench.planner.effects import effect_names, values_of
from kvbench.planner.engines import EngineRules, find_engine
from kvbench.planner.forecast import Limits
from kvbench.planner.formats import Format, find_format
from kvbench.planner.intervals import NEW_CARD, NEW_MODEL, NEW_RATE
from kvbench.planner.predict import Situation, parameters_of
from kvbench.planner.published import Configuration
from kvbench.planner.reach import Reach
from kvbench.planner.shipped import Shipped, shipped

ENGINE = "vLLM"
FORMATS = {"bfloat16": "BF16", "float16": "FP16"}
SCHEMES = {"fp8": "FP8", "mxfp4": "MXFP4", "int4": "AWQ/INT4", "awq": "AWQ/INT4", "gptq": "AWQ/INT4", "nvfp4": "FP4"}


@dataclass(frozen=True, slots=True)
class Steps:
    """`cost` gives each step its seconds and is fitted up to `reach`; `source` says in words what its parameters were
    fitted to, `kind` how near that is (a class of planner/intervals.py), `facts` which they are."""

    cost: CostModel
    reach: Reach
    source: str
    kind: str
    facts: dict[str, Any]


def step_cost(card: Card, shape: ModelShape, dtype: str, tp: int, *, kv_itemsize: int = 2) -> Steps:
    """The cost of a shape's steps in a dtype, or in the format its weights are published in, on `tp` cards."""
    number, engine, fitted = _format(shape, dtype), find_engine(ENGINE), shipped()
    asked = Configuration(
        group="", engine=ENGINE, card=card.id, shape=shape.name, precision=number.name, tp=tp, cards=tp, load="closed",
        load_value=None, arrivals="", requests=None, input_tokens=None, output_tokens=None, lengths="",
    )  # fmt: skip
    situation = Situation(card, shape, number, engine, tp, Limits(), kv_itemsize)
    parameters, _ = parameters_of(values_of(fitted.effects, effect_names(asked, situation)))
    cost = cost_model(card, shape, number, tp, parameters, kv_bytes=kv_itemsize)
    kind, nearness = _nearness(fitted, engine, card, shape, number)
    source = f"as {ENGINE} ({engine.generation}), parameters fitted {fitted.date} to published runs, {nearness}"
    return Steps(
        cost,
        fitted.reach[engine.generation],
        source,
        kind,
        {"engine": engine.generation, "format": number.name, **asdict(parameters)},
    )


def _format(shape: ModelShape, dtype: str) -> Format:
    """Of the weights: their own where they are quantised."""
    if shape.quantisation is None:
        return find_format(FORMATS[dtype])
    if (scheme := shape.quantisation.name) not in SCHEMES:
        raise KvbenchError(
            f"{shape.name} has weights in {scheme}, whose step times are not known; known are {', '.join(SCHEMES)} and "
            "16 bits"
        )
    return find_format(SCHEMES[scheme])


def _nearness(fitted: Shipped, engine: EngineRules, card: Card, shape: ModelShape, number: Format) -> tuple[str, str]:
    """How far the parameters have to reach: the class and words. A family is generation, version, card, shape, format,
    cards. The engine's generation is always known, so a card is new at most."""
    mine = [family for family in fitted.families if family[0] == engine.generation]
    here = [family for family in mine if family[2] == card.id]
    if any(family[3:5] == (shape.name, number.name) for family in here):
        return NEW_RATE, "this model on this card among them"
    if here:
        return NEW_MODEL, "this card among them, with other models"
    if any(family[2] == card.id for family in fitted.families):
        return NEW_CARD, "this card among them only under other engines"
    return NEW_CARD, "this card not among them"
