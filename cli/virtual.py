"""A card one need not have: the same engine and allocators in the time that it would take, nothing of it measured."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvbench.cli.asking import GPU_LOADS
from kvbench.metrics.points import LoadPoint

if TYPE_CHECKING:
    pass

MODEL = "Llama-3.1-8B"


class Virtual:
    """A card of the catalogue, `tp` of them where the model is shared, and a model's shape. Members as `Owned` has
    them, so that a sweep need not know which of the two it runs on."""

    evidence = "simulated"
    kind = "sim"
    attention = None
    patience_s = math.inf  # how many repeats there are shall not depend on how fast they were computed
    load_s = None
    first_forward_s = 0.0
    special_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    loads: tuple[LoadPoint, ...] = GPU_LOADS
