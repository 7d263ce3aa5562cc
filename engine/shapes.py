"""Shapes of models, so that one can be measured with random weights or planned for without a download.

Those built in stand in `shapes.csv`, with where their numbers come from; any other is read from its `config.json`
(`engine/hf_config.py`). Standard library only.
"""

from __future__ import annotations

import csv
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from typing import Any

from kvbench.engine.parameters import (
    ATTENTION,
    EMBEDDING,
    EXPERTS,
    FAMILIES,
    HEAD,
    LLAMA,
    Part,
    Traits,
    count_parts,
    split_heads,
)
from kvbench.engine.quantisation import SCHEMES, Quantisation
from kvbench.errors import KvbenchError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a decoder. `family` is transformers' model type, `traits` what its layers have beside these.

    Experts: `dense_layers` of the layers have an MLP of `intermediate`, the others `experts` of
    `expert_intermediate` and shared ones of `shared_intermediate` together. `sliding_layers` of the layers look back
    `sliding_window` tokens. `kv_rank` above 0: multi-head latent attention (MLA), whose layers keep `latent` values a
    token; `rope_dim`, `nope_dim` and `value_dim` are its heads' widths, `q_rank` the queries' rank (0: full)."""

    name: str
    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0
    sliding_window: int | None = None
    sliding_layers: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    nope_dim: int = 0
    value_dim: int = 0
    quantisation: Quantisation | None = None
    traits: Traits = LLAMA
    published_parameters: int | None = None
    source: str = ""
    also: tuple[str, ...] = ()

    @property
    def latent(self) -> int:
        """Values an MLA layer keeps a token: compressed keys and values plus the rotary part; 0 for other layers."""
        return self.kv_rank + self.rope_dim if self.kv_rank else 0

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    def kv_values_per_layer(self, tp: int = 1) -> int:
        """Values one token adds to each layer's cache on one of `tp` cards: keys and values of max(1, kv_heads / tp)
        heads, or the latent, which every card keeps."""
        return self.latent or 2 * split_heads(self, tp)[1] * self.head_dim

    def kv_bytes_per_token(self, itemsize: int, tp: int = 1) -> int:
        """Bytes one token takes in the caches of all layers, each of which keeps it."""
        return self.layers * self.kv_values_per_layer(tp) * itemsize

    def parts(self, tp: int = 1) -> dict[str, Part]:
        """Parameters by part (`engine/parameters.py`) on one of `tp` cards."""
        return count_parts(self, tp)

    def part_bytes(self, itemsize: int, tp: int = 1) -> dict[str, int]:
        """Bytes of each part: quantised matrices by their own bits, all else at `itemsize`."""
        return {name: self._bytes(name, part, itemsize) for name, part in self.parts(tp).items()}

    def _bytes(self, name: str, part: Part, itemsize: int) -> int:
        own = self.quantisation
        bits = own.bits if own is not None and name in own.parts else 8 * itemsize
        return round(part.matrices * bits / 8) + part.vectors * itemsize

    @property
    def parameters(self) -> int:
        """All that is stored: every expert, a tied head once."""
        return sum(part.parameters for part in self.parts().values())

    @property
    def active_parameters(self) -> int:
        """What one token passes through: as many experts as it is sent to, a tied head (and not the embedding) once."""
        parts = self.parts()
        stored = sum(part.parameters for name, part in parts.items() if name not in (EMBEDDING, HEAD, EXPERTS))
        return stored + self.head_parameters + self.active_expert_parameters

    @property
    def embedding_parameters(self) -> int:
        """Rows of token embeddings and learned positions; a tied head reads the same."""
        return self.parts()[EMBEDDING].parameters

    @property
    def head_parameters(self) -> int:
        """The matrix from hidden states to logits, stored of its own or tied."""
        return self.vocab * self.hidden + self.parts()[HEAD].vectors

    @property
    def attention_parameters(self) -> int:
        return self.parts()[ATTENTION].parameters

    @property
    def expert_parameters(self) -> int:
        """All routed experts of all layers."""
        return self.parts()[EXPERTS].parameters

    @property
    def active_expert_parameters(self) -> int:
        """The routed experts that one token is sent to."""
        return self.expert_parameters * self.experts_per_token // self.experts if self.experts else 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "config.json") -> ModelShape:
        """The shape that a Hugging Face `config.json` describes. KvbenchError, with the field and the nearest, where
        something is missing or unknown."""
        from kvbench.engine.hf_config import read_config

        return read_config(config, name)

    def config_fields(self) -> dict[str, object]:
        """Arguments of `AutoConfig.for_model(family, ...)` in transformers."""
        fields: dict[str, object] = {
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tied,
            "sliding_window": self.sliding_window,
        }
        if self.family == "opt":
            fields |= {"ffn_dim": self.intermediate, "word_embed_proj_dim": self.hidden}
        if self.experts:
            fields |= {
                "num_experts": self.experts,
                "num_local_experts": self.experts,
                "num_experts_per_tok": self.experts_per_token,
                "moe_intermediate_size": self.expert_intermediate,
            }
        return fields


def find_shape(name: str) -> ModelShape | None:
    """The built-in shape of that name, or that a model of that name has too, in any case; or None."""
    return next((shape for shape in SHAPES if name.lower() in map(str.lower, (shape.name, *shape.also))), None)


def unknown_model(name: str) -> KvbenchError:
    """The error for a name that is no built-in shape, no folder and no hub name."""
    names = {called.lower(): shape.name for shape in SHAPES for called in (shape.name, *shape.also)}
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.3)
    hint = f"; the nearest built-in shape is {names[near[0]]}" if near else ""
    return KvbenchError(f"unknown model {name!r}: no built-in shape, folder or hub name (org/name){hint}")


def _built_in() -> tuple[ModelShape, ...]:
    table = files("kvbench.engine").joinpath("shapes.csv").read_text(encoding="utf-8")
    return tuple(_shape(line) for line in csv.DictReader(table.splitlines()))


def _shape(line: Mapping[str, str]) -> ModelShape:
    """A line of the table: what is left empty has its default."""
    told: dict[str, Any] = {}
    for field in fields(ModelShape):
        text = line.get(field.name)
        if text and field.name == "quantisation":
            told[field.name] = SCHEMES[text]
        elif text and field.name == "also":
            told[field.name] = tuple(text.split(";"))
        elif text:
            told[field.name] = text if field.name in ("name", "family", "source") else int(text)
    told["tied"] = bool(line["tied"])
    return ModelShape(**told, traits=FAMILIES[line["family"]])


SHAPES = _built_in()
