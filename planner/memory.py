"""What fits into a card: weights, activations and the KV cache to the byte, and every term of the sum by name.

Each term says where its figure comes from: `exact` (counted from the model's shape), `catalogue` (a card's datasheet or
log) or `estimated` (a model of what an engine allocates, checked against logs of vLLM on an H100: docs/capacity.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvbench.engine.parameters import EXPERTS, sharing, split_heads
from kvbench.engine.shapes import ModelShape
from kvbench.errors import KvbenchError
from kvbench.planner.catalog import Card

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_ITEMSIZE = ITEMSIZE | {"fp8": 1}
LAYOUTS = ("uniform", "windowed")
LARGEST = 10**9

EXACT, CATALOGUE, ESTIMATED = "exact", "catalogue", "estimated"

SORTED_BYTES = 36
"""Bytes that top-p takes for each logit beside the logit itself: a copy in fp32 (4), its sorted values (4) and indices
(8), the indices that are sorted with them (8) and as much room for sorting (12)."""

WORKSPACE_BYTES = int(0.05 * 2**30)
"""What the peak has beyond that on an H100, the same for four models: a matrix library's workspace, small buffers."""

OUTSIDE_TORCH_BYTES = int(0.13 * 2**30)
"""Held by the driver and libraries outside torch's allocator, measured on an H100; links between cards take more."""

KERNEL_MULTIPLE = {"mxfp4": 256}
"""Kernels of some schemes want the hidden size as a multiple of this, and pad the matrices up to it."""

LARGE_CARD_BYTES = 70 * 2**30


@dataclass(frozen=True, slots=True)
class Serving:
    """How an engine is told to serve, as far as memory depends on it."""

    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    tp: int = 1
    gpu_memory_utilization: float = 0.9
    max_batched_tokens: int = 2048
    max_sequences: int = 256
    block_size: int = 16
    graph_bytes: int = 0

    def __post_init__(self) -> None:
        assert self.dtype in ITEMSIZE and self.kv_dtype in KV_ITEMSIZE, (self.dtype, self.kv_dtype)
        share = self.gpu_memory_utilization
        if not (math.isfinite(share) and 0 < share <= 1):
            raise KvbenchError(f"--gpu-memory-utilization must be above 0 and at most 1, not {share}")
        for flag, count in (
            ("--tp", self.tp),
            ("--max-num-batched-tokens", self.max_batched_tokens),
            ("--max-num-seqs", self.max_sequences),
            ("--block-size", self.block_size),
        ):
            if not 1 <= count <= LARGEST:
                raise KvbenchError(f"{flag} must be at least 1 and at most {LARGEST:,}, not {count}")

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def kv_itemsize(self) -> int:
        return KV_ITEMSIZE[self.kv_dtype]


def default_limits(card: Card) -> tuple[int, int]:
    """`max_num_batched_tokens` and `max_num_seqs` as vLLM's server has them on the card: more on large ones, but for
    the A100."""
    large = card.memory_bytes >= LARGE_CARD_BYTES and "a100" not in card.name.lower()
    return (8192, 1024) if large else (2048, 256)


@dataclass(frozen=True, slots=True)
class Term:
    """One line of the sum, in bytes of one card. `note`: what its figure hangs on, where that differs by case."""

    key: str
    bytes: int
    evidence: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one of `serving.tp` cards that serve a model together."""

    shape: ModelShape
    card: Card
    serving: Serving
    terms: tuple[Term, ...]

    @property
    def left_bytes(self) -> int:
        """What the terms leave of the budget; below 0 where the model does not fit."""
        budget, *taken = self.terms
        return budget.bytes - sum(term.bytes for term in taken)

    @property
    def pool_bytes(self) -> int:
        """The KV cache of whole blocks on one card, 0 where not even the weights fit."""
        return self.pool_tokens * self.kv_bytes_per_token

    @property
    def pool_tokens(self) -> int:
        """Tokens of the whole blocks that fit; all cards keep the same ones."""
        block = self.serving.block_size
        return max(0, self.left_bytes) // self.kv_bytes_per_token // block * block

    @property
    def kv_bytes_per_token(self) -> int:
        """On one card."""
        return self.shape.kv_bytes_per_token(self.serving.kv_itemsize, self.serving.tp)

    def term(self, key: str) -> Term:
        return next(term for term in self.terms if term.key == key)

    def kv_bytes(self, tokens: int, layout: str = "uniform") -> int:
        """What one sequence's `tokens` take on one card, rounding to blocks left out."""
        return kv_bytes(self.shape, tokens, self.serving.kv_itemsize, self.serving.tp, layout)


def kv_bytes(shape: ModelShape, tokens: int, itemsize: int, tp: int = 1, layout: str = "uniform") -> int:
    """Bytes of one sequence's keys and values on one of `tp` cards. `uniform`: every layer keeps every token, as our
    engine does. `windowed`: a sliding layer keeps its window at most."""
    assert layout in LAYOUTS and tokens >= 0, (layout, tokens)
    rows = shape.layers * tokens
    if layout == "windowed" and shape.sliding_window is not None:
        rows -= shape.sliding_layers * max(0, tokens - shape.sliding_window)
    return rows * shape.kv_values_per_layer(tp) * itemsize


def windowed_at_once(memory: Memory, tokens: int) -> int:
    """How many sequences of `tokens` rows the pool holds at once where sliding layers keep their window at most."""
    block = memory.serving.block_size
    return memory.pool_bytes // memory.kv_bytes(-(-tokens // block) * block, "windowed")


def fewest_cards(shape: ModelShape, card: Card, serving: Serving) -> Memory | None:
    """On the smallest number of cards, of those that can share the model, which have room for a block of keys and
    values; None where none has."""
    planned = (plan_memory(shape, card, replace(serving, tp=tp)) for tp in sharing(shape))
    return next((memory for memory in planned if memory.pool_tokens), None)


def plan_memory(shape: ModelShape, card: Card, serving: Serving) -> Memory:
    """Where a card's memory goes: utilisation x device bytes - weights - buffers - activation peak - the rest."""
    split_heads(shape, serving.tp)
    budget = int(card.memory_bytes * serving.gpu_memory_utilization)
    weights = shape.part_bytes(serving.itemsize, serving.tp)
    padding = _padding_bytes(shape, weights[EXPERTS])
    peak, widest = activation_peak(shape, serving)
    known = CATALOGUE if card.memory_noted else ESTIMATED
    terms = [
        Term("budget", budget, known, card.memory_source),
        Term("weights", sum(weights.values()), EXACT),
        Term("rotary", _rotary_bytes(shape, serving), ESTIMATED),
        Term("padding", padding, ESTIMATED),
        Term("activation", peak, ESTIMATED, widest),
        Term("outside", OUTSIDE_TORCH_BYTES, ESTIMATED),
        Term("graphs", serving.graph_bytes, ESTIMATED),
    ]
    kept = [term for term in terms if term.bytes or term.key not in ("rotary", "padding")]
    return Memory(shape, card, serving, tuple(kept))


def activation_peak(shape: ModelShape, serving: Serving) -> tuple[int, str]:
    """The most that one step holds beside weights and cache, and what it is: a `layer` of a full batch, or the `logits`
    of as many sequences as may run, while their tokens are chosen."""
    item, batch, tp = serving.itemsize, serving.max_batched_tokens, serving.tp
    sampled = min(serving.max_sequences, batch)
    hidden = batch * shape.hidden * item
    choosing = sampled * shape.vocab * (item + SORTED_BYTES) + hidden
    layer = 2 * hidden + batch * _layer_width(shape, tp) * item
    return max(choosing, layer) + WORKSPACE_BYTES, "logits" if choosing >= layer else "layer"


def _layer_width(shape: ModelShape, tp: int) -> int:
    """Values a token has at the widest place of a layer, beside its hidden state and the residual."""
    heads, kv_heads = split_heads(shape, tp)
    attention = (2 * heads + 2 * kv_heads) * shape.head_dim
    gates = shape.traits.mlp_matrices  # gate and up, and their product; or one matrix and what becomes of it
    dense = gates * -(-shape.intermediate // tp) if shape.moe_layers < shape.layers else 0
    own = -(-shape.expert_intermediate // tp)
    experts = shape.experts_per_token * (max(2 * own, shape.hidden) + own) + gates * -(-shape.shared_intermediate // tp)
    return max(attention, dense, experts if shape.moe_layers else 0)


def _rotary_bytes(shape: ModelShape, serving: Serving) -> int:
    if shape.traits.positions is not None:
        return 0
    return shape.max_positions * (shape.rope_dim or shape.head_dim) * serving.itemsize


def _padding_bytes(shape: ModelShape, expert_bytes: int) -> int:
    own = shape.quantisation
    multiple = KERNEL_MULTIPLE.get(own.name) if own is not None else None
    if multiple is None:
        return 0
    return expert_bytes * (-shape.hidden % multiple) // shape.hidden
