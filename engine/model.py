"""A Hugging Face model, its own modelling code, with attention that goes through a Cache of ours.

transformers looks attention up by name when a model is built; ours is registered under `kvbench`. The model gets one
flat batch [1, T] of many sequences with their positions, and the hook hands each layer's q, k, v to the active Cache.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from hashlib import sha256
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvbench.engine.arena import KVShape
from kvbench.engine.decoder import Decoder, is_of_the_kind
from kvbench.engine.interfaces import Cache
from kvbench.engine.linear import pack
from kvbench.errors import KvbenchError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ATTENTION = "kvbench"

PROBED, CLOSE = 24, 64
"""A fused model is compared with its own code on so many tokens, and may differ by so many roundings of its largest
logit: sums in another order, layer after layer."""

FAMILIES = frozenset(
    "llama qwen2 qwen3 qwen3_moe mistral mixtral phi3 gemma gemma2 gemma3_text gpt_oss gpt2 opt gpt_neox olmo2 granite "
    "cohere stablelm starcoder2 glm4 smollm3".split()
)
"""Model types whose tokens have been compared with transformers' own `generate` (tests/test_parity.py)."""

MLA = "MLA keeps one latent a token instead of keys and values per head; it can be planned for, not measured"

REFUSED = {
    "falcon": "its modelling code keeps a cache of its own",
    "bloom": "its attention adds ALiBi biases outside the attention function",
    "mpt": "its attention adds ALiBi biases outside the attention function",
    "gpt_neo": "its modelling code does not take an attention function",
    "deepseek_v2": MLA,
    "deepseek_v3": MLA,
    "gemma3n_text": "its layers share keys and values",
    "gemma4_text": "its layers share keys and values",
    "qwen3_next": "its linear-attention layers keep a state, not a KV cache",
    "jamba": "its Mamba layers keep a state, not a KV cache",
    "mamba": "it keeps a state, not a KV cache",
}


def check_family(config: PretrainedConfig, max_model_len: int | None = None) -> None:
    """Raise KvbenchError, by name, for a model that would not be measured rightly."""
    family = config.model_type
    if family in REFUSED:
        raise KvbenchError(f"model type {family!r} cannot be measured: {REFUSED[family]}")
    if family not in FAMILIES:
        raise KvbenchError(
            f"model type {family!r} cannot be measured: its tokens have not been compared with transformers' own; "
            f"known are {', '.join(sorted(FAMILIES))}"
        )
    rope_parameters = getattr(config, "rope_parameters", None) or {}
    per_layer_type = [value for value in rope_parameters.values() if isinstance(value, dict)]
    for rope in per_layer_type or [rope_parameters]:
        limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if rope.get("rope_type") in ("dynamic", "longrope") and max_model_len is not None and max_model_len > limit:
            raise KvbenchError(
                f"rope type {rope['rope_type']!r} depends on the longest sequence of a batch beyond {limit} tokens; "
                f"set --max-model-len to at most {limit}"
            )


def kv_shape(config: PretrainedConfig) -> KVShape:
    """What one token keeps in each layer, from a transformers configuration. KvbenchError where it makes no sense."""
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"):
        value = getattr(config, name, None)
        if not isinstance(value, int) or not 1 <= value <= 2**31:
            raise KvbenchError(f"the model's config.json has {name} {value!r}; it must be a whole number of at least 1")
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KVShape(config.num_hidden_layers, kv_heads, head_dim)


_active: ContextVar[Cache] = ContextVar("active_cache")


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, H, T, D] in, [1, T, H, D] out."""
    assert attention_mask is None, "a mask reached attention that makes its own"
    out = _active.get().attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out.unsqueeze(0), None


def register() -> None:
    """Make our attention known to transformers; before a model is built."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)


class BoundModel:
    """A causal language model bound to our attention. Raises KvbenchError for one that does not use it once a layer,
    which takes its very first forward pass of one token, `first_forward_s` long."""

    def __init__(self, module: torch.nn.Module, config: PretrainedConfig) -> None:
        self.module = module.eval()
        self.config = config
        self.kv = kv_shape(config)
        weights = [*module.parameters()]
        self.device = weights[0].device
        self.dtype = weights[0].dtype
        self.parameters = sum(weight.numel() for weight in weights)
        self.nbytes = sum(weight.nbytes for weight in weights)
        self.fingerprint = _fingerprint(module)
        self._decoder: Decoder | None = None
        self._asked = self._probe()

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @torch.inference_mode()
    def tune(self) -> None:
        """Make the forward pass fast for good: fused where the model is of a kind whose fused logits are those of its
        own code, weights packed for the matrix library either way. Its module loses the weights that are packed."""
        if is_of_the_kind(self.module):
            decoder = Decoder(self.module, self.kv.kv_heads, self.kv.head_dim, self._asked)
            if self._agrees(decoder):
                self.nbytes += decoder.fuse()
                self._decoder = decoder
                return
        embedding: Any = cast("Any", self.module).get_input_embeddings()
        self.nbytes += pack(self.module, embedding.weight if self.tied else None)

    @property
    def tied(self) -> bool:
        """Whether the head multiplies with the embedding's own weights."""
        head: Any = getattr(self.module, "lm_head", None)
        return head is not None and head.weight is cast("Any", self.module).get_input_embeddings().weight

    @property
    def fused(self) -> bool:
        """Whether `tune` found a faster way than the model's own code."""
        return self._decoder is not None

    @torch.inference_mode()
    def forward(self, ids: Tensor, positions: Tensor, keep: Tensor, cache: Cache) -> Tensor:
        """Logits [len(keep), vocabulary] of the tokens at flat indices `keep`; `ids` and `positions` are [T]."""
        if self._decoder is not None:
            return self._decoder.forward(ids, positions, keep, cache)
        token = _active.set(cache)
        try:
            output = self.module(
                input_ids=ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, logits_to_keep=keep
            )
        finally:
            _active.reset(token)
        logits: Tensor = output.logits[0]
        return logits

    def _agrees(self, decoder: Decoder) -> bool:
        """Whether a decoder gives the logits of the model's own code, as well as its number format can tell."""
        ids = torch.arange(1, min(PROBED, self.vocab_size), device=self.device)
        positions = torch.arange(len(ids), device=self.device)
        own = self.forward(ids, positions, positions, Dense()).float()
        found = decoder.forward(ids, positions, positions, Dense()).float()
        return bool((found - own).abs().max() <= torch.finfo(self.dtype).eps * CLOSE * own.abs().max())

    def _probe(self) -> list[dict[str, Any]]:
        """One token through the model: every layer must ask for attention once, in order, in the shape expected.
        Returns how each asks, in the words of `Cache.attend`."""
        probe = _Probe()
        started_s = time.perf_counter()
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.forward(zero, zero, zero, probe).tolist()
        self.first_forward_s = time.perf_counter() - started_s
        expected = [(layer, self.kv.kv_heads, self.kv.head_dim) for layer in range(self.kv.layers)]
        if probe.seen != expected:
            raise KvbenchError(
                f"model type {self.config.model_type!r} cannot be measured: its layers do not each pass one set of "
                f"keys and values of {self.kv.kv_heads} heads x {self.kv.head_dim} through the attention function"
            )
        return probe.asked


def _fingerprint(module: torch.nn.Module) -> str:
    """Changes with the weights: a digest of each one's name, shape and first 64 values."""
    found = sha256()
    for name, weight in module.named_parameters():
        first = weight.detach().flatten()[:64].contiguous().cpu()
        found.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        found.update(first.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


class Dense:
    """A Cache of one prompt that keeps nothing: causal attention over the tokens of the batch themselves."""

    def begin(self, batch: object) -> None:
        raise AssertionError("it serves no batch")

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None, **_: Any
    ) -> Tensor:
        """Of q [T, Hq, D] over k and v [T, Hkv, D], without caps and sinks."""
        place = torch.arange(len(q), device=q.device)
        seen = place <= place.unsqueeze(1)
        if window is not None:
            seen &= place > place.unsqueeze(1) - window
        out = scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=seen, scale=scale, enable_gqa=True
        )
        return out.transpose(0, 1)


class _Probe:
    """A Cache that only notes who asks."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []
        self.asked: list[dict[str, Any]] = []

    def begin(self, batch: object) -> None:
        raise AssertionError("a probe serves no batch")

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        self.seen.append((layer, k.shape[1], k.shape[2]))
        self.asked.append(how)
        return q
