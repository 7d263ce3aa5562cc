"""The step times of a card as `sweep` uses them: the cost model, what its parameters are, and where they come from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvbench.engine.shapes import ModelShape
from kvbench.errors import KvbenchError
from kvbench.planner.catalog import Card
from kvbench.planner.cost import CostModel, cost_model
from kvbench.planner.effects import PARAMETERS
from kvbench.planner.formats import find_format
from kvbench.planner.predict import parameters_of

FORMATS = {"bfloat16": "BF16", "float16": "FP16"}
SCHEMES = {"fp8": "FP8", "mxfp4": "MXFP4"}


@dataclass(frozen=True, slots=True)
class Steps:
    """`cost` gives each step its seconds; `source` says, in words, where its parameters come from, `facts` which they
    are."""

    cost: CostModel
    source: str
    facts: dict[str, Any]


def step_cost(card: Card, shape: ModelShape, dtype: str, tp: int, *, kv_itemsize: int = 2) -> Steps:
    """The cost of a shape's steps in a dtype, or in the format its weights are published in, on `tp` cards."""
    name = FORMATS[dtype] if shape.quantisation is None else SCHEMES.get(shape.quantisation.name)
    if name is None:
        assert shape.quantisation is not None
        raise KvbenchError(
            f"{shape.name} has weights in {shape.quantisation.name}, whose step times are not known; take a --model in "
            f"{', '.join([*FORMATS, *SCHEMES])}"
        )
    parameters, _ = parameters_of({one.name: one.median for one in PARAMETERS})
    cost = cost_model(card, shape, find_format(name), tp, parameters, kv_bytes=kv_itemsize)
    source = "datasheet rates at the efficiencies that engines usually reach, not fitted to this card"
    return Steps(cost, source, {"format": name, **asdict(parameters)})
