"""How long a step takes on a card one may not have: a roofline of two kernels, a link, and a host that may be slower.

    matrices  = max(weights streamed / (eta_b BW), 2 x active weights x tokens / (eta_c F))
    attention = max(KV read / (eta_k eta_b BW), 4 x heads x head_dim x pairs / (eta_c F))
    T_gpu     = matrices + attention + c0 x layers + all-reduces + copies
    step      = max(T_gpu, h x layers) + c_B x sequences

all per card: weights, KV and FLOP divided by the tensor parallelism. The host floor is a maximum, not a sum: it runs
ahead of the card or holds it up. Matrices and attention are kernels of their own, one after the other, so a step can be
bound by FLOP in the one and by bandwidth in the other. Of a mixture of experts the expected number of distinct experts
is streamed, E (1 - (1 - k/E)^tokens). Embedding rows are not streamed, the head is, once.

Plain floats here; only `decode_seconds` needs numpy, and gives bit for bit what `seconds` gives step by step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kvbench.engine.parameters import ATTENTION, DENSE, EXPERTS, NORMS, ROUTER, SHARED, split_heads
from kvbench.errors import KvbenchError
from kvbench.planner.formats import find_format, flops_per_s
from kvbench.planner.work import StepWork

if TYPE_CHECKING:
    import numpy as np

    from kvbench.engine.shapes import ModelShape
    from kvbench.planner.catalog import Card
    from kvbench.planner.formats import Format


@dataclass(frozen=True, slots=True)
class StepParameters:
    """What no datasheet says. Efficiencies are shares of the datasheet's rate, times are seconds.

    `kv_efficiency` is on top of `bandwidth_efficiency`; `layer_s` passes on the card for each layer whatever it does,
    `host_layer_s` on the host, `sequence_s` for each decoding sequence of a step; each all-reduce takes `link_s` and
    then runs at `link_efficiency`.
    """

    bandwidth_efficiency: float = 1.0
    compute_efficiency: float = 1.0
    kv_efficiency: float = 1.0
    link_efficiency: float = 1.0
    layer_s: float = 0.0
    host_layer_s: float = 0.0
    sequence_s: float = 0.0
    link_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            at_least_0 = field.name.endswith("_s")
            if not math.isfinite(value) or value < 0 or (value == 0 and not at_least_0):
                raise KvbenchError(f"step parameter {field.name} is {value}; give a finite number above 0")


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step for one card, shape, number format and tensor parallelism: see `cost_model`.

    The first nine fields are time per unit of work, already divided by rates and efficiencies; the last say how much of
    the context and of the experts a step touches."""

    dense_s: float
    expert_s: float
    token_s: float
    sampled_s: float
    context_s: float
    pair_s: float
    moved_token_s: float
    swapped_token_s: float
    reduced_token_s: float
    fixed_s: float
    host_s: float
    sequence_s: float
    experts: int
    expert_miss: float
    window: int
    sliding_share: float

    def seconds(self, work: StepWork) -> float:
        """Seconds of one step; an empty one takes none."""
        tokens = work.decodes + work.prefill_tokens
        if not tokens:
            return self._moves(work)
        flat = self._flat(tokens, work.sampled_tokens)
        sequences = max(work.decodes, work.sampled_tokens, 1)
        context = self.context_s * self._within(float(work.context_tokens), sequences)
        pairs = self.pair_s * self._within(float(work.attended_pairs), tokens)
        card = flat + max(context, pairs) + self._moves(work)
        return max(card, self.host_s) + self.sequence_s * work.decodes

    def decode_seconds(self, sequences: int, context_tokens: int, steps: int) -> np.ndarray:
        """Seconds of each of the next `steps` steps in which `sequences` sequences decode one token each, having
        `context_tokens` computed tokens together before the first: `float64 [steps]`."""
        import numpy as np

        if not sequences:
            return np.zeros(steps)
        contexts = context_tokens + sequences * np.arange(1.0, steps + 1.0)
        seen = contexts
        if self.sliding_share:
            within = np.minimum(contexts, float(self.window * sequences))
            seen = (1.0 - self.sliding_share) * contexts + self.sliding_share * within
        card = self._flat(sequences, sequences) + np.maximum(self.context_s * seen, self.pair_s * seen)
        return np.asarray(np.maximum(card, self.host_s) + self.sequence_s * sequences)

    def seconds_of(self, works: np.ndarray) -> np.ndarray:
        """Seconds of many steps that move nothing: `float64 [5, steps]`, in the order of StepWork's first five fields,
        to `float64 [steps]`; step by step what `seconds` gives."""
        import numpy as np

        decodes, prefill, pairs, context, sampled = works
        tokens = decodes + prefill
        streamed = np.full_like(tokens, self.dense_s)
        if self.experts:
            streamed += self.expert_s * self.experts * (1.0 - self.expert_miss**tokens)
        flat = np.maximum(streamed, self.token_s * tokens + self.sampled_s * sampled)
        flat += self.fixed_s + self.reduced_token_s * tokens
        if self.sliding_share:
            whole, within = 1.0 - self.sliding_share, np.maximum(np.maximum(decodes, sampled), 1.0)
            context = whole * context + self.sliding_share * np.minimum(context, self.window * within)
            pairs = whole * pairs + self.sliding_share * np.minimum(pairs, self.window * tokens)
        card = flat + np.maximum(self.context_s * context, self.pair_s * pairs)
        return np.asarray(np.maximum(card, self.host_s) + self.sequence_s * decodes)

    def _flat(self, tokens: int, sampled: int) -> float:
        """All on the card that does not depend on the context."""
        streamed = self.dense_s
        if self.experts:
            streamed += self.expert_s * self.experts * (1.0 - self.expert_miss**tokens)
        computed = self.token_s * tokens + self.sampled_s * sampled
        return max(streamed, computed) + self.fixed_s + self.reduced_token_s * tokens

    def _within(self, context: float, queries: int) -> float:
        """What `queries` rows see of a context, in layers that slide at most a window each."""
        if not self.sliding_share:
            return context
        within = min(context, float(self.window * queries))
        return (1.0 - self.sliding_share) * context + self.sliding_share * within

    def _moves(self, work: StepWork) -> float:
        return self.moved_token_s * work.copied_tokens + self.swapped_token_s * work.swapped_tokens


HOST_LINK_BYTES_PER_S = 25e9
"""What a swap gets of PCIe 4 x16 in one direction (32 GB/s by the standard)."""

MATRICES = (ATTENTION, DENSE, SHARED)


def cost_model(
    card: Card, shape: ModelShape, number: Format, tp: int, parameters: StepParameters, kv_bytes: int = 2
) -> CostModel:
    """The cost of a step of `shape`, its weights in `number`, on `tp` cards of one kind.

    `kv_bytes` of a value in the cache. KvbenchError where the shape's heads cannot be shared out over `tp` cards."""
    memory = card.bandwidth_bytes_per_s * parameters.bandwidth_efficiency
    flops = flops_per_s(card, number) * parameters.compute_efficiency
    plain = flops_per_s(card, find_format("BF16")) * parameters.compute_efficiency
    heads, _ = split_heads(shape, tp)
    row_bytes = shape.kv_bytes_per_token(kv_bytes, tp)
    dense_bytes, expert_bytes, dense_weights, active_weights = _weights(shape, number, tp)
    reduced = reduced_token_s = 0.0
    if tp > 1:
        if not card.link_bytes_per_s:
            raise KvbenchError(f"{card.name} has no link in the catalogue; give its rate in --gpu-file")
        reduced = 2 * shape.layers * parameters.link_s
        moved = 2 * shape.layers * 2 * (tp - 1) / tp * shape.hidden * 2
        reduced_token_s = moved / (card.link_bytes_per_s * parameters.link_efficiency)
    rate = plain if number.experts_only else flops
    return CostModel(
        dense_s=dense_bytes / memory,
        expert_s=expert_bytes / memory,
        token_s=2 * dense_weights / rate + 2 * active_weights / flops,
        sampled_s=2 * shape.hidden * shape.vocab / tp / plain,
        context_s=row_bytes / (memory * parameters.kv_efficiency),
        pair_s=shape.layers * 4 * heads * shape.head_dim / plain,
        moved_token_s=2 * row_bytes / memory,
        swapped_token_s=row_bytes / HOST_LINK_BYTES_PER_S,
        reduced_token_s=reduced_token_s,
        fixed_s=parameters.layer_s * shape.layers + reduced,
        host_s=parameters.host_layer_s * shape.layers,
        sequence_s=parameters.sequence_s,
        experts=shape.experts,
        expert_miss=1.0 - shape.experts_per_token / shape.experts if shape.experts else 0.0,
        window=shape.sliding_window or 0,
        sliding_share=shape.sliding_layers / shape.layers,
    )


def _weights(shape: ModelShape, number: Format, tp: int) -> tuple[float, float, float, float]:
    """Of one card: bytes streamed each step, bytes of one expert of every layer, weights that every token meets (the
    head apart) and weights of the experts that one token meets."""
    parts = shape.parts(tp)
    own = 16.0 if number.experts_only else number.bits
    dense = sum(parts[name].matrices for name in MATRICES)
    router, norms = parts[ROUTER].parameters, parts[NORMS].parameters
    head = shape.vocab * shape.hidden / tp
    expert = parts[EXPERTS].matrices / shape.experts if shape.experts else 0.0
    streamed = (dense * own + (router + head + norms) * 16.0) / 8
    return streamed, expert * number.bits / 8, float(dense + router), expert * shape.experts_per_token
