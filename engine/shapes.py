"""Shapes of well-known models, so that a model can be measured with random weights or planned for without a download.

Dimensions are those of the published `config.json` files. Standard library only.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from kvbench.errors import KvbenchError

TWO_MATRIX_MLP = ("opt", "gptj")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a decoder. `family` is transformers' model type; `latent` is the number of values an MLA layer
    keeps a token (its compressed keys and values plus the rotary part), 0 where keys and values are kept per head."""

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
    sliding_window: int | None = None
    latent: int = 0

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes one token takes in the cache: 2 x layers x kv_heads x head_dim x itemsize, or the latent once."""
        values = self.latent or 2 * self.kv_heads * self.head_dim
        return self.layers * values * itemsize

    @property
    def parameters(self) -> int:
        """Weights in matrices (norms and biases, under 0.1 %, left out)."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        matrices = 2 if self.family in TWO_MATRIX_MLP else 3
        if self.experts:
            mlp = self.experts * matrices * self.hidden * self.expert_intermediate + self.experts * self.hidden
        else:
            mlp = matrices * self.hidden * self.intermediate
        return self.layers * (attention + mlp) + self.vocab * self.hidden * (1 if self.tied else 2)

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
    """The built-in shape of that name in any case, or None."""
    return next((shape for shape in SHAPES if shape.name.lower() == name.lower()), None)


def unknown_model(name: str) -> KvbenchError:
    """The error for a name that is no built-in shape, no folder and no hub name."""
    names = {shape.name.lower(): shape.name for shape in SHAPES}
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.3)
    hint = f"; the nearest built-in shape is {names[near[0]]}" if near else ""
    return KvbenchError(f"unknown model {name!r}: no built-in shape, folder or hub name (org/name){hint}")


# name, family, layers, hidden, intermediate, heads, kv heads, head dim, vocabulary, positions
SHAPES = (
    ModelShape("tiny", "llama", 4, 256, 688, 8, 4, 32, 4096, 32768, tied=True),
    ModelShape("bench-40m", "qwen2", 8, 512, 1536, 8, 2, 64, 32000, 4096, tied=True),
    ModelShape("SmolLM2-135M", "llama", 30, 576, 1536, 9, 3, 64, 49152, 8192, tied=True),
    ModelShape("Llama-2-7B", "llama", 32, 4096, 11008, 32, 32, 128, 32000, 4096),
    ModelShape("Llama-2-13B", "llama", 40, 5120, 13824, 40, 40, 128, 32000, 4096),
    ModelShape("Llama-2-70B", "llama", 80, 8192, 28672, 64, 8, 128, 32000, 4096),
    ModelShape("CodeLlama-34B", "llama", 48, 8192, 22016, 64, 8, 128, 32000, 16384),
    ModelShape("Llama-3-8B", "llama", 32, 4096, 14336, 32, 8, 128, 128256, 8192),
    ModelShape("Llama-3.1-8B", "llama", 32, 4096, 14336, 32, 8, 128, 128256, 131072),
    ModelShape("Llama-3-70B", "llama", 80, 8192, 28672, 64, 8, 128, 128256, 8192),
    ModelShape("Llama-3.1-70B", "llama", 80, 8192, 28672, 64, 8, 128, 128256, 131072),
    ModelShape("Llama-3.2-1B", "llama", 16, 2048, 8192, 32, 8, 64, 128256, 131072, tied=True),
    ModelShape("Llama-3.2-3B", "llama", 28, 3072, 8192, 24, 8, 128, 128256, 131072, tied=True),
    ModelShape("Mistral-7B-v0.1", "mistral", 32, 4096, 14336, 32, 8, 128, 32000, 32768, sliding_window=4096),
    ModelShape("Mistral-7B-v0.3", "mistral", 32, 4096, 14336, 32, 8, 128, 32768, 32768),
    ModelShape("Mistral-Small-3.2-24B", "mistral", 40, 5120, 32768, 32, 8, 128, 131072, 131072),
    ModelShape(
        "Mixtral-8x7B",
        "mixtral",
        32,
        4096,
        14336,
        32,
        8,
        128,
        32000,
        32768,
        experts=8,
        experts_per_token=2,
        expert_intermediate=14336,
    ),
    ModelShape(
        "Mixtral-8x22B",
        "mixtral",
        56,
        6144,
        16384,
        48,
        8,
        128,
        32768,
        65536,
        experts=8,
        experts_per_token=2,
        expert_intermediate=16384,
    ),
    ModelShape("Qwen2.5-0.5B", "qwen2", 24, 896, 4864, 14, 2, 64, 151936, 32768, tied=True),
    ModelShape("Qwen2.5-1.5B", "qwen2", 28, 1536, 8960, 12, 2, 128, 151936, 131072, tied=True),
    ModelShape("Qwen2.5-3B", "qwen2", 36, 2048, 11008, 16, 2, 128, 151936, 32768, tied=True),
    ModelShape("Qwen2.5-7B", "qwen2", 28, 3584, 18944, 28, 4, 128, 152064, 131072),
    ModelShape("Qwen2.5-14B", "qwen2", 48, 5120, 13824, 40, 8, 128, 152064, 131072),
    ModelShape("Qwen2.5-32B", "qwen2", 64, 5120, 27648, 40, 8, 128, 152064, 131072),
    ModelShape("Qwen2.5-72B", "qwen2", 80, 8192, 29568, 64, 8, 128, 152064, 131072),
    ModelShape("Qwen3-0.6B", "qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 40960, tied=True),
    ModelShape("Qwen3-1.7B", "qwen3", 28, 2048, 6144, 16, 8, 128, 151936, 40960, tied=True),
    ModelShape("Qwen3-4B", "qwen3", 36, 2560, 9728, 32, 8, 128, 151936, 40960, tied=True),
    ModelShape("Qwen3-8B", "qwen3", 36, 4096, 12288, 32, 8, 128, 151936, 40960),
    ModelShape("Qwen3-14B", "qwen3", 40, 5120, 17408, 40, 8, 128, 151936, 40960),
    ModelShape("Qwen3-32B", "qwen3", 64, 5120, 25600, 64, 8, 128, 151936, 40960),
    ModelShape(
        "Qwen3-30B-A3B",
        "qwen3_moe",
        48,
        2048,
        6144,
        32,
        4,
        128,
        151936,
        40960,
        experts=128,
        experts_per_token=8,
        expert_intermediate=768,
    ),
    ModelShape(
        "gpt-oss-20b",
        "gpt_oss",
        24,
        2880,
        2880,
        64,
        8,
        64,
        201088,
        131072,
        experts=32,
        experts_per_token=4,
        expert_intermediate=2880,
        sliding_window=128,
    ),
    ModelShape(
        "gpt-oss-120b",
        "gpt_oss",
        36,
        2880,
        2880,
        64,
        8,
        64,
        201088,
        131072,
        experts=128,
        experts_per_token=4,
        expert_intermediate=2880,
        sliding_window=128,
    ),
    ModelShape("Gemma-2-9B", "gemma2", 42, 3584, 14336, 16, 8, 256, 256000, 8192, tied=True, sliding_window=4096),
    ModelShape("Phi-3-mini", "phi3", 32, 3072, 8192, 32, 32, 96, 32064, 4096, sliding_window=2047),
    ModelShape("Phi-4", "phi3", 40, 5120, 17920, 40, 10, 128, 100352, 16384),
    ModelShape("OPT-13B", "opt", 40, 5120, 20480, 40, 40, 128, 50272, 2048, tied=True),
    ModelShape("OPT-66B", "opt", 64, 9216, 36864, 72, 72, 128, 50272, 2048, tied=True),
    ModelShape("OPT-175B", "opt", 96, 12288, 49152, 96, 96, 128, 50272, 2048, tied=True),
    ModelShape("GPT-J-6B", "gptj", 28, 4096, 16384, 16, 16, 256, 50400, 2048),
    ModelShape(
        "DeepSeek-V3",
        "deepseek_v3",
        61,
        7168,
        18432,
        128,
        128,
        128,
        129280,
        163840,
        experts=256,
        experts_per_token=8,
        expert_intermediate=2048,
        latent=576,
    ),
)
