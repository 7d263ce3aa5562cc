"""The forward pass of decoders of Llama's kind, over the weights of a transformers model and with fewer, larger steps.

The layers that read the same input are one matrix product (q, k and v; gate and up), a residual is added by the product
that ends its branch, and nothing is done for the sake of options that serving does not use. The model's own code is the
reference: who is fused is tested at load to give the same logits, and anything else runs as its authors wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from kvbench.engine.linear import Linear

if TYPE_CHECKING:
    from kvbench.engine.interfaces import Cache

KIND = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""transformers' classes that are: RMSNorm, rotary q and k (in Qwen3 normalised first), SiLU-gated feed-forward."""


def is_of_the_kind(module: nn.Module) -> bool:
    """Whether the model is one that `Decoder` computes."""
    config: Any = module.config
    return type(module).__name__ in KIND and getattr(config, "hidden_act", None) == "silu"


class _Layer:
    """One layer's weights. Before `fuse` its products are the model's own layers, one by one."""

    def __init__(self, layer: Any, how: Mapping[str, Any]) -> None:
        attention, feed = layer.self_attn, layer.mlp
        self.index: int = attention.layer_idx
        self.how = how
        self.before = layer.input_layernorm
        self.after = layer.post_attention_layernorm
        self.q_norm = getattr(attention, "q_norm", None)
        self.k_norm = getattr(attention, "k_norm", None)
        self.qkv: Any = _Beside([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out: Any = attention.o_proj
        self.gate_up: Any = _Beside([feed.gate_proj, feed.up_proj])
        self.down: Any = feed.down_proj

    def fuse(self) -> None:
        """One product where there were several; the model's own layers lose their weights."""
        self.qkv, self.gate_up = Linear(self.qkv.parts), Linear(self.gate_up.parts)
        self.out, self.down = Linear([self.out]), Linear([self.down])


class _Beside:
    """Linear layers that read the same input, not fused yet."""

    def __init__(self, parts: list[nn.Linear]) -> None:
        self.parts = parts

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


class Decoder:
    """`module` is a transformers model of the KIND, `kv_heads` and `head_dim` those of its cache; `asked` is how each
    of its layers asks for attention, in the words of `Cache.attend`."""

    def __init__(self, module: Any, kv_heads: int, head_dim: int, asked: Sequence[Mapping[str, Any]]) -> None:
        self._embed: nn.Embedding = module.model.embed_tokens
        self._rotary = module.model.rotary_emb
        self._layers = [_Layer(layer, how) for layer, how in zip(module.model.layers, asked, strict=True)]
        self._norm = module.model.norm
        self._head: Any = module.lm_head
        self._kv_heads, self._head_dim = kv_heads, head_dim

    def fuse(self) -> int:
        """Fuse and pack the weights; returns the bytes that this adds (the copy of a head tied to the embedding)."""
        for layer in self._layers:
            layer.fuse()
        self._head = Linear([self._head], shared=self._head.weight is self._embed.weight)
        return int(self._head.copied_bytes)

    def forward(self, ids: Tensor, positions: Tensor, keep: Tensor, cache: Cache) -> Tensor:
        """Logits [len(keep), vocabulary] of the tokens at flat indices `keep`; `ids` and `positions` are [T]."""
        x = self._embed(ids)
        cos, sin = self._rotary(x.unsqueeze(0), position_ids=positions.unsqueeze(0))
        turn = (cos[0].unsqueeze(1), sin[0].unsqueeze(1))  # [T, 1, D]
        for layer in self._layers:
            x = self._attended(layer, x, turn, cache)
            gate, up = layer.gate_up(_normed(x, layer.after)).chunk(2, dim=-1)
            x = _added(layer.down, silu(gate).mul_(up), x)
        logits: Tensor = self._head(_normed(x[keep], self._norm))
        return logits

    def _attended(self, layer: _Layer, x: Tensor, turn: tuple[Tensor, Tensor], cache: Cache) -> Tensor:
        qkv = layer.qkv(_normed(x, layer.before)).unflatten(-1, (-1, self._head_dim))  # [T, Hq + 2 Hkv, D]
        heads = qkv.shape[1] - 2 * self._kv_heads
        qk, v = qkv[:, : heads + self._kv_heads], qkv[:, heads + self._kv_heads :]
        if layer.q_norm is not None:
            qk = torch.cat([_normed(qk[:, :heads], layer.q_norm), _normed(qk[:, heads:], layer.k_norm)], dim=1)
        qk = _turned(qk, *turn)
        found = cache.attend(layer.index, qk[:, :heads], qk[:, heads:], v, **layer.how)
        return _added(layer.out, found.flatten(1), x)


def _normed(x: Tensor, norm: Any) -> Tensor:
    return rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [T, H, D]: its halves are the two coordinates of each pair."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1).mul_(sin).add_(x * cos)


def _added(product: Any, x: Tensor, to: Tensor) -> Tensor:
    return product.added(x, to) if isinstance(product, Linear) else to + product(x)
