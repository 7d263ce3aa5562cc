"""Tiny random models of every family that can be measured, small enough to decode hundreds of tokens in a second.

Weights are drawn wide, so greedy answers wander instead of repeating one token, and whatever a family may do to
attention is switched on: windows of 7 tokens, soft caps and sinks that matter, multipliers other than 1. Below them,
what transformers' own `generate` answers and how a run departs from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from kvbench.engine.model import ATTENTION, BoundModel, register
from kvbench.engine.weights import quiet
from kvbench.metrics.records import Run

VOCAB = 199
POSITIONS = 256
WINDOW = 7
NEAR_TIE = 1e-4
MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]

COMMON: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
PLAIN_HEADS: dict[str, Any] = {"hidden_size": 96, "num_key_value_heads": 6}  # hidden = heads x head_dim, no groups
SOME_WINDOWS: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "max_window_layers": 1,
    "layer_types": MIXED_LAYERS,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"hidden_size": 96, **SOME_WINDOWS},
    "qwen3": SOME_WINDOWS,
    "qwen3_moe": {**EXPERTS, "use_sliding_window": True, "sliding_window": WINDOW},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {**EXPERTS, "sliding_window": WINDOW},
    "phi3": {"hidden_size": 96, "sliding_window": WINDOW},
    "gemma": {},
    "gemma2": {
        "sliding_window": WINDOW,
        "layer_types": MIXED_LAYERS,
        "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 16,
    },
    "gemma3_text": {"sliding_window": WINDOW, "layer_types": MIXED_LAYERS, "query_pre_attn_scalar": 16},
    "gpt_oss": {**EXPERTS, "sliding_window": WINDOW, "layer_types": MIXED_LAYERS},
    "gpt2": PLAIN_HEADS,
    "opt": {**PLAIN_HEADS, "ffn_dim": 64, "word_embed_proj_dim": 96, "init_std": 0.3},
    "gpt_neox": PLAIN_HEADS,
    "olmo2": {"hidden_size": 96, "initializer_range": 2.0},
    "granite": {
        "hidden_size": 96,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
    },
    "cohere": {"hidden_size": 96, "use_qk_norm": True, "logit_scale": 0.5},
    "stablelm": {"hidden_size": 96, "use_qkv_bias": True},
    "starcoder2": {"hidden_size": 96, "sliding_window": WINDOW},
    "glm4": {},
    "smollm3": {"hidden_size": 96, "no_rope_layer_interval": 2, **SOME_WINDOWS},
}

SEEDS = {"opt": 3}  # the weights of seed 1 soon repeat themselves


@dataclass(frozen=True, slots=True)
class Pair:
    """One set of weights twice: `model` under our attention, `reference` with transformers' own eager attention."""

    model: BoundModel
    reference: Any


def tiny_config(family: str, **fields: Any) -> PretrainedConfig:
    """The tiny configuration of a family, `fields` replacing some of it."""
    return AutoConfig.for_model(family, **(COMMON | FAMILY_FIELDS.get(family, {}) | fields))


def tiny_pair(family: str, dtype: torch.dtype = torch.float32, **fields: Any) -> Pair:
    """Two separately built models of a family with equal weights; `fields` as in `tiny_config`."""
    quiet()
    register()
    torch.manual_seed(SEEDS.get(family, 1))
    ours, reference = (
        AutoModelForCausalLM.from_config(tiny_config(family, **fields), dtype=dtype, attn_implementation=attention)
        for attention in (ATTENTION, "eager")
    )
    reference.load_state_dict(ours.state_dict())
    return Pair(BoundModel(ours, ours.config), reference.eval())


@dataclass(frozen=True, slots=True)
class Expected:
    """What `generate` answers: tokens [prompts, n] and, for each, how far its logit lies above the second best."""

    tokens: list[list[int]]
    margins: list[list[float]]

    @property
    def near_ties(self) -> int:
        return sum(margin < NEAR_TIE for margins in self.margins for margin in margins)


def generate(reference: Any, prompts: list[list[int]], new_tokens: int, **how: Any) -> Expected:
    """Greedy answers of a model of transformers, the prompts padded on the left into one batch; `how` joins its
    GenerationConfig, and margins are those after what it asks for."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=new_tokens,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **how,
    )
    reference.generation_config.eos_token_id = None
    with torch.inference_mode():
        made = reference.generate(ids, attention_mask=mask, generation_config=config)
    best = torch.stack(made.scores, dim=1).topk(2).values
    return Expected(made.sequences[:, longest:].tolist(), (best[..., 0] - best[..., 1]).tolist())


def departures(run: Run, expected: Expected) -> list[str]:
    """Where an answer leaves the expected one at a token that was no near-tie. A near-tie may turn either way, and what
    follows it is another text."""
    found = []
    for record, tokens, margins in zip(run.requests, expected.tokens, expected.margins, strict=True):
        assert record.output_token_ids is not None and len(record.output_token_ids) == len(tokens)
        for at, (ours, theirs, margin) in enumerate(zip(record.output_token_ids, tokens, margins, strict=True)):
            if ours != theirs:
                if margin >= NEAR_TIE:
                    found.append(f"request {record.request}, token {at}: {ours} for {theirs}, margin {margin:.2e}")
                break
    return found
