"""How serving engines schedule: what their defaults let into a step, by engine and version.

Facts of the engines' own documentation and source, not fitted. A generation groups versions whose host code is alike
and shares fitted parameters (`parameters.toml`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from kvbench.errors import KvbenchError

if TYPE_CHECKING:
    from kvbench.planner.catalog import Card

LARGE_CARD_BYTES = 70 * 2**30


@dataclass(frozen=True, slots=True)
class EngineRules:
    """`mixed`, `reserve` as in `forecast.Limits`. `sequences` and `batched_tokens` are defaults, the `large_` ones on
    cards of 70 GiB and more that are no A100. `memory_share` of the card's memory is the engine's, or with
    `of_the_rest` of what the weights leave. `kv_bits` of keys and values where weights have 8 or 4 native bits.
    `whole_prompts`: a step takes the longest prompt whole. For `sampled_at_once` sequences logits are kept at once,
    which memory is put aside for. `in_process`: sequences and batched tokens where no server is started."""

    generation: str
    mixed: bool
    reserve: bool
    sequences: int
    large_sequences: int
    batched_tokens: int
    large_batched_tokens: int
    memory_share: float
    of_the_rest: bool
    kv_bits: int
    whole_prompts: bool = False
    sampled_at_once: int = 256
    in_process: tuple[int, int] | None = None

    def sequence_limit(self, card: Card) -> int:
        return self.large_sequences if _large(card) else self.sequences

    def token_limit(self, card: Card) -> int:
        return self.large_batched_tokens if _large(card) else self.batched_tokens


def _large(card: Card) -> bool:
    return card.memory_bytes >= LARGE_CARD_BYTES and "a100" not in card.id and "a800" not in card.id


@cache
def _table() -> list[tuple[re.Pattern[str], EngineRules]]:
    import tomllib

    text = files("kvbench.planner").joinpath("engines.toml").read_text(encoding="utf-8")
    return [(re.compile(entry.pop("name")), EngineRules(**entry)) for entry in tomllib.loads(text)["engine"]]


def find_engine(name: str) -> EngineRules:
    """The rules of an engine as the collection names it, "vLLM-0.8.5". KvbenchError where none is alike."""
    for pattern, rules in _table():
        if pattern.match(name):
            return rules
    known = ", ".join(sorted({rules.generation for _, rules in _table()}))
    raise KvbenchError(f"unknown engine {name!r}; generations known are {known}")
