"""What the fields of a `config.json` are called and mean, where families differ; tests hold it against transformers'
own classes. Standard library only.
"""

from __future__ import annotations

STATE = "its layers keep a state, not a KV cache"
SHARED_KV = "its layers share keys and values"
UNPLANNED = {
    **dict.fromkeys(
        "mamba mamba2 falcon_mamba jamba bamba zamba zamba2 nemotron_h falcon_h1 granitemoehybrid lfm2 rwkv "
        "recurrent_gemma minimax kimi_linear".split(),
        STATE,
    ),
    "qwen3_next": "its linear-attention layers keep a state, not a KV cache",
    "qwen3_5": "its linear-attention layers keep a state, not a KV cache",
    "qwen3_5_text": "its linear-attention layers keep a state, not a KV cache",
    "qwen3_5_moe": "its linear-attention layers keep a state, not a KV cache",
    "qwen3_5_moe_text": "its linear-attention layers keep a state, not a KV cache",
    "gemma3n_text": SHARED_KV,
    "gemma4_text": SHARED_KV,
    "mllama_text_model": "its cross-attention layers keep an image's keys and values",
    "deepseek_v32": "its indexer keeps a cache of its own",
}
"""Model types whose memory is no KV cache of every token, by name, so that none is planned wrongly."""

SAME_AS = {
    "internlm2": "llama",
    "kimi_k2": "deepseek_v3",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Model types whose language model is another family's."""

OTHER_PARTS = ("vision", "audio", "speech")
"""What a multimodal configuration has beside its language model, which is not counted."""

NESTED = ("text_config", "llm_config", "language_config")

_LLAMA = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
NESTED_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": _LLAMA | {"intermediate_size": 11008},
    "mistral": _LLAMA
    | {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "gemma3_text": {
        "hidden_size": 2304,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 9216,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
}
"""Language models inside multimodal configurations are published without what their class has by default."""

HEAD_DIM = {
    "ernie4_5": 128,
    "gemma": 256,
    "gemma2": 256,
    "gemma3_text": 256,
    "glm": 128,
    "glm4": 128,
    "gpt_oss": 64,
    "minimax_m2": 128,
    "qwen3": 128,
    "seed_oss": 128,
}
"""Where `head_dim` is not hidden size / heads by default."""

KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size",),
    "max_positions": ("max_position_embeddings", "n_positions"),
    "experts": ("n_routed_experts", "num_local_experts", "num_experts"),
    "experts_per_token": ("num_experts_per_tok",),
}
INTERMEDIATE = {"opt": "ffn_dim", "gpt2": "n_inner", "gptj": "n_inner", "llama4_text": "intermediate_size_mlp"}
"""Other names of `intermediate_size`; GPT-2's and GPT-J's is four times the hidden size by default."""

UNGROUPED = ("gpt2", "gptj", "gpt_neox", "opt")
"""Families that know neither grouped keys and values nor a head width of its own."""

LATENT = ("deepseek_v2", "deepseek_v3")
SHARING = (*LATENT, "glm4_moe", "dots1")
QWEN_MIXTURES = ("qwen2_moe", "qwen3_moe")
MIXTURES = (
    *("mixtral", "gpt_oss", "olmoe", "granitemoe", "phimoe", "minimax_m2", "llama4_text"),
    *QWEN_MIXTURES,
    *SHARING,
)
"""Families with experts; `SHARING` ones begin with dense layers and have shared experts."""

SWITCHED = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")
"""Families whose layers slide only where `use_sliding_window` says so."""

_BOTH = ("qkv_bias", "out_bias")
SWITCHES: dict[str, dict[str, tuple[str, ...]]] = {
    "attention_bias": {
        **dict.fromkeys(
            "llama granite granitemoe cohere cohere2 qwen3 qwen3_moe olmo2 olmo3 olmoe gpt_neox gpt_oss smollm3 "
            "llama4_text arcee dots1 hunyuan_v1_dense nemotron phimoe".split(),
            _BOTH,
        ),
        **dict.fromkeys(("glm", "glm4", "glm4_moe", "seed_oss"), ("qkv_bias",)),
    },
    "attention_out_bias": {"seed_oss": ("out_bias",)},
    "mlp_bias": dict.fromkeys("llama granite smollm3 seed_oss arcee nemotron".split(), ("mlp_bias",)),
    "lm_head_bias": {"phimoe": ("head_bias",)},
    "use_bias": dict.fromkeys(("starcoder2", "ernie4_5"), (*_BOTH, "mlp_bias")),
    "use_qkv_bias": {"stablelm": ("qkv_bias",)},
}
"""Fields that switch biases of a family on or off."""

ODD = {"opt": {"do_layer_norm_before": True, "enable_bias": True}, "deepseek_v2": {"attention_bias": False}}
"""Values that the counts rely on."""
