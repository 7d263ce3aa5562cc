"""Where a decoder's parameters are: the split that memory and step time are both reckoned from.

A family's `Traits` say what its layers have beside the large matrices; `count_parts` counts them, whole or as the share
of one of several cards. The counts equal those of transformers' own modules (tests/test_parameters.py). Standard
library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvbench.errors import KvbenchError

if TYPE_CHECKING:
    from kvbench.engine.shapes import ModelShape

EMBEDDING = "embedding"
HEAD = "head"
ATTENTION = "attention"
DENSE = "dense"
SHARED = "shared"
EXPERTS = "experts"
ROUTER = "router"
NORMS = "norms"
PARTS = (EMBEDDING, HEAD, ATTENTION, DENSE, SHARED, EXPERTS, ROUTER, NORMS)
"""Embedding rows (with learned positions); the head; attention; MLPs of dense layers; shared, routed experts and their
router; norms."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What the layers of a family have. A configuration may turn biases and head norms on or off.

    `head_norms`: norms over queries and keys, one head wide (`head`) or over all heads (`all`). `positions`: rows of
    learned positions beyond the longest sequence, None for rotary ones. `slide_every`: where a configuration does not
    list its layers, all layers slide but each `slide_every`-th (1: all slide, 0: none)."""

    tied: bool = False
    mlp_matrices: int = 3
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    norms: int = 2
    norm_bias: bool = False
    head_norms: str = ""
    positions: int | None = None
    router_bias: bool = False
    expert_bias: bool = False
    shared_gate: bool = False
    sinks: bool = False
    slide_every: int = 0


LLAMA = Traits()
_LAYER_NORM = Traits(norm_bias=True)
_ALL_BIASES = replace(_LAYER_NORM, mlp_matrices=2, qkv_bias=True, out_bias=True, mlp_bias=True)

FAMILIES: dict[str, Traits] = {
    "arcee": Traits(mlp_matrices=2),
    "cohere": Traits(tied=True, norms=1),
    "cohere2": Traits(tied=True, norms=1, slide_every=4),
    "deepseek_v2": LLAMA,
    "deepseek_v3": Traits(router_bias=True),
    "dots1": Traits(head_norms="head", router_bias=True, slide_every=1),
    "ernie4_5": Traits(tied=True),
    "exaone": LLAMA,
    "exaone4": Traits(head_norms="head", slide_every=4),
    "gemma": Traits(tied=True),
    "gemma2": Traits(tied=True, norms=4, slide_every=2),
    "gemma3_text": Traits(tied=True, norms=4, head_norms="head", slide_every=6),
    "glm": Traits(qkv_bias=True),
    "glm4": Traits(norms=4, qkv_bias=True),
    "glm4_moe": Traits(router_bias=True),
    "gpt2": replace(_ALL_BIASES, tied=True, positions=0),
    "gpt_neox": _ALL_BIASES,
    "gpt_oss": Traits(qkv_bias=True, out_bias=True, router_bias=True, expert_bias=True, sinks=True, slide_every=2),
    "gptj": Traits(mlp_matrices=2, mlp_bias=True, head_bias=True, norms=1, norm_bias=True),
    "granite": LLAMA,
    "granitemoe": LLAMA,
    "helium": LLAMA,
    "hunyuan_v1_dense": Traits(head_norms="head"),
    "internlm3": LLAMA,
    "llama": LLAMA,
    "llama4_text": Traits(slide_every=4),
    "minimax_m2": Traits(head_norms="all", router_bias=True),
    "ministral": Traits(slide_every=1),
    "ministral3": Traits(slide_every=1),
    "mistral": Traits(slide_every=1),
    "mixtral": Traits(slide_every=1),
    "nemotron": Traits(mlp_matrices=2, norm_bias=True),
    "olmo2": Traits(head_norms="all"),
    "olmo3": Traits(head_norms="all", slide_every=4),
    "olmoe": Traits(head_norms="all"),
    "opt": replace(_ALL_BIASES, tied=True, positions=2),
    "phi": replace(_ALL_BIASES, norms=1, head_bias=True),
    "phi3": Traits(slide_every=1),
    "phimoe": Traits(norm_bias=True, slide_every=1),
    "qwen2": Traits(qkv_bias=True, slide_every=1),
    "qwen2_moe": Traits(qkv_bias=True, shared_gate=True, slide_every=1),
    "qwen3": Traits(head_norms="head", slide_every=1),
    "qwen3_moe": Traits(head_norms="head", slide_every=1),
    "seed_oss": Traits(qkv_bias=True),
    "smollm3": Traits(tied=True, slide_every=1),
    "stablelm": _LAYER_NORM,
    "starcoder2": replace(_ALL_BIASES, tied=True, slide_every=1),
}
"""Model types that can be planned for."""


@dataclass(frozen=True, slots=True)
class Part:
    """Parameters in matrices, which may be quantised, and in vectors (biases, norms, tables), which never are."""

    matrices: int = 0
    vectors: int = 0

    @property
    def parameters(self) -> int:
        return self.matrices + self.vectors


def count_parts(shape: ModelShape, tp: int = 1) -> dict[str, Part]:
    """Parameters by part that one of `tp` cards keeps.

    Heads, MLP columns, experts' columns and vocabulary are split; keys and values of fewer heads than cards, what comes
    before an MLA layer's heads, routers, norms and biases of summed outputs are on every card. A tied head is counted
    once, as embedding."""
    traits, hidden = shape.traits, shape.hidden
    heads, kv_heads = split_heads(shape, tp)
    vocabulary = -(-shape.vocab // tp)
    head = Part(0 if shape.tied else vocabulary * hidden, vocabulary if traits.head_bias else 0)
    learned = 0 if traits.positions is None else (shape.max_positions + traits.positions) * hidden
    norm = hidden * (2 if traits.norm_bias else 1)
    dense = _mlp(shape, -(-shape.intermediate // tp), bias=traits.mlp_bias)
    expert = _mlp(shape, -(-shape.expert_intermediate // tp), bias=traits.expert_bias)
    shared = _mlp(shape, -(-shape.shared_intermediate // tp), bias=False) if shape.shared_intermediate else Part()
    attention = _latent_attention(shape, heads) if shape.kv_rank else _attention(shape, heads, kv_heads)
    router = Part(
        shape.experts * hidden,
        shape.experts * traits.router_bias + hidden * (traits.shared_gate and shape.shared_intermediate > 0),
    )
    return {
        EMBEDDING: Part(vocabulary * hidden, learned),
        HEAD: head,
        ATTENTION: _times(shape.layers, attention),
        DENSE: _times(shape.layers - shape.moe_layers, dense),
        SHARED: _times(shape.moe_layers, shared),
        EXPERTS: _times(shape.moe_layers * shape.experts, expert),
        ROUTER: _times(shape.moe_layers, router),
        NORMS: Part(0, (shape.layers * traits.norms + 1) * norm),
    }


def sharing(shape: ModelShape) -> list[int]:
    """Numbers of cards that share the heads evenly: queries, and keys and values or these a whole number of times. An
    engine may refuse all others."""
    low = [cards for cards in range(1, math.isqrt(shape.heads) + 1) if not shape.heads % cards]
    fitting = sorted({*low, *(shape.heads // cards for cards in low)})
    return [cards for cards in fitting if not (shape.kv_heads % cards and cards % shape.kv_heads)]


def split_heads(shape: ModelShape, tp: int) -> tuple[int, int]:
    """Query heads and kv heads of one of `tp` cards, of the fullest where they go unevenly. KvbenchError for more cards
    than heads."""
    if not 1 <= tp <= shape.heads:
        raise KvbenchError(
            f"--tp {tp} does not share the {shape.heads} heads of {shape.name}; choose among "
            f"{', '.join(map(str, sharing(shape)))}"
        )
    return -(-shape.heads // tp), -(-shape.kv_heads // tp)


def _attention(shape: ModelShape, heads: int, kv_heads: int) -> Part:
    traits, hidden = shape.traits, shape.hidden
    width = (heads + 2 * kv_heads) * shape.head_dim
    norms = {"": 0, "head": 2 * shape.head_dim, "all": (heads + kv_heads) * shape.head_dim}[traits.head_norms]
    vectors = width * traits.qkv_bias + hidden * traits.out_bias + norms + heads * traits.sinks
    return Part(hidden * width + heads * shape.head_dim * hidden, vectors)


def _latent_attention(shape: ModelShape, heads: int) -> Part:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): low-rank ways down, which every card has, a norm,
    and ways up to each head."""
    hidden, query_width = shape.hidden, heads * (shape.nope_dim + shape.rope_dim)
    query = shape.q_rank * (hidden + query_width) if shape.q_rank else hidden * query_width
    down = hidden * (shape.kv_rank + shape.rope_dim)
    up = shape.kv_rank * heads * (shape.nope_dim + shape.value_dim)
    out = heads * shape.value_dim * hidden
    return Part(query + down + up + out, shape.q_rank + shape.kv_rank)


def _mlp(shape: ModelShape, width: int, *, bias: bool) -> Part:
    matrices = shape.traits.mlp_matrices
    return Part(matrices * shape.hidden * width, ((matrices - 1) * width + shape.hidden) * bias)


def _times(count: int, part: Part) -> Part:
    return Part(count * part.matrices, count * part.vectors)
