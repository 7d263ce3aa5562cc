"""What fits into a card, as facts: the sum of its memory, and users at once for each way to hold their contexts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from kvbench.cli.stack import BACKENDS, Backend, CacheConfig
from kvbench.engine.parameters import sharing, split_heads
from kvbench.engine.quantisation import SCHEMES
from kvbench.engine.shapes import ModelShape
from kvbench.errors import KvbenchError
from kvbench.planner.catalog import Card
from kvbench.planner.memory import (
    KV_ITEMSIZE,
    Memory,
    Serving,
    default_limits,
    fewest_cards,
    plan_memory,
    windowed_at_once,
)
from kvbench.workloads.grid import parse_ints
from kvbench.workloads.options import LARGEST, choice

Lengths = tuple[int, int]
CONTEXTS: tuple[Lengths, ...] = tuple((750 * 2**power, 250 * 2**power) for power in range(8))
"""Prompt and answer where the user names none: 1,000 to 128,000 tokens, a quarter of them the answer."""

WINDOWED = "paged windowed"
_KV_ALIASES = {"fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The flags; None: not told."""

    dtype: str | None
    kv_dtype: str | None
    tp: int
    gpu_memory_utilization: float
    max_model_len: int | None
    max_batched_tokens: int | None
    max_sequences: int | None
    block_size: int
    graph_bytes: int
    contexts: tuple[Lengths, ...] | None

    def serving(self, card: Card) -> Serving:
        """What is left open is as vLLM has it on that card."""
        half = "bfloat16" if "bfloat16" in card.flops_per_s or not card.flops_per_s else "float16"
        batched, sequences = default_limits(card)
        dtype = self.dtype or half
        return Serving(
            dtype=dtype,
            kv_dtype=self.kv_dtype or dtype,
            tp=self.tp,
            gpu_memory_utilization=self.gpu_memory_utilization,
            max_batched_tokens=batched if self.max_batched_tokens is None else self.max_batched_tokens,
            max_sequences=sequences if self.max_sequences is None else self.max_sequences,
            block_size=self.block_size,
            graph_bytes=self.graph_bytes,
        )


@dataclass(frozen=True, slots=True)
class Way:
    """A backend under one reservation policy."""

    name: str
    backend: Backend
    reserve: str | None

    def most_at_once(self, memory: CacheConfig, lengths: Lengths) -> int:
        return self.backend.most_at_once(replace(memory, reserve=self.reserve), *lengths)

    def longest(self, memory: CacheConfig, positions: int) -> int:
        """The longest sequence, answer included, that fits while alone, where the engine allows it that length."""
        low, high = 0, positions
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.most_at_once(replace(memory, max_model_len=middle), (middle - 1, 1)) if middle > 1 else 1
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


def ways() -> list[Way]:
    """Every backend under each of its policies; the first is called by the backend alone."""
    found = []
    for backend in BACKENDS.values():
        for place, reserve in enumerate(backend.policies.get("reserve", (None,))):
            found.append(Way(f"{backend.name} {reserve}" if place else backend.name, backend, reserve))
    return found


def facts(shape: ModelShape, card: Card, asked: Asked) -> dict[str, Any]:
    """Everything about the model on the card, strict JSON values in base units; bytes are of one card."""
    serving = asked.serving(card)
    memory = plan_memory(shape, card, serving)
    cache = CacheConfig(memory.pool_tokens, serving.block_size, asked.max_model_len or 1)
    longest = {way.name: way.longest(cache, shape.max_positions) for way in ways()} if memory.pool_tokens else {}
    contexts = _contexts(shape, asked, max(longest.values(), default=0))
    slot = asked.max_model_len or max(map(sum, contexts))
    return {
        "model": shape.name,
        "gpu": card.id,
        "gpu_name": card.name,
        "tp": serving.tp,
        "dtype": serving.dtype,
        "kv_dtype": serving.kv_dtype,
        "kv_bytes_per_token": memory.kv_bytes_per_token,
        "weights_bytes": memory.term("weights").bytes,
        "parameters": shape.parameters,
        "active_parameters": shape.active_parameters,
        "pool_bytes": memory.pool_bytes,
        "pool_tokens": memory.pool_tokens,
        "missing_bytes": max(0, -memory.left_bytes),
        "enough": None if memory.pool_tokens else _enough(shape, card, serving),
        "max_concurrency": _at_once(memory, replace(cache, max_model_len=slot), contexts),
        "longest_context_tokens": longest,
        "contexts": [
            {"context": _label(one, contexts), "input_tokens": one[0], "output_tokens": one[1]} for one in contexts
        ],
        "gpu_memory_utilization": serving.gpu_memory_utilization,
        "max_model_len": slot,
        "max_num_batched_tokens": serving.max_batched_tokens,
        "max_num_seqs": serving.max_sequences,
        "block_size": serving.block_size,
        "terms": [asdict(term) for term in memory.terms],
        "shape": _shape_facts(shape, memory),
        "card": _card_facts(card),
        "usd_per_hour_low": None if card.usd_per_hour is None else card.usd_per_hour[0] * serving.tp,
        "usd_per_hour_high": None if card.usd_per_hour is None else card.usd_per_hour[1] * serving.tp,
    }


def _at_once(memory: Memory, cache: CacheConfig, contexts: tuple[Lengths, ...]) -> dict[str, dict[str, int]]:
    """Users at once by way and context; 0 where a context is longer than the engine allows."""
    users: dict[str, dict[str, int]] = {}
    for way in ways():
        users[way.name] = {_label(one, contexts): way.most_at_once(cache, one) for one in contexts}
    if memory.shape.sliding_layers:
        users[WINDOWED] = {_label(one, contexts): windowed_at_once(memory, sum(one) - 1) for one in contexts}
    return users


def _enough(shape: ModelShape, card: Card, serving: Serving) -> dict[str, int] | None:
    """The fewest cards of the kind that hold the model, and their pool."""
    found = fewest_cards(shape, card, serving)
    return None if found is None else {"tp": found.serving.tp, "pool_tokens": found.pool_tokens}


def _shape_facts(shape: ModelShape, memory: Memory) -> dict[str, Any]:
    """What the KV bytes of a token are made of."""
    return {
        "source": shape.source,
        "vocab": shape.vocab,
        "quantisation": None if shape.quantisation is None else shape.quantisation.name,
        "quantised_bits": None if shape.quantisation is None else shape.quantisation.bits,
        "quantised_parts": _quantised_parts(shape),
        "layers": shape.layers,
        "heads": shape.heads,
        "even_tp": sharing(shape),
        "kv_heads": split_heads(shape, memory.serving.tp)[1],
        "head_dim": shape.head_dim,
        "latent": shape.latent or None,
        "kv_itemsize": memory.serving.kv_itemsize,
        "max_positions": shape.max_positions,
        "sliding_window": shape.sliding_window if shape.sliding_layers else None,
        "sliding_layers": shape.sliding_layers,
        "parts": {name: part.parameters for name, part in shape.parts().items() if part.parameters},
    }


def _quantised_parts(shape: ModelShape) -> list[str]:
    own = shape.quantisation
    return [] if own is None else [name for name, part in shape.parts().items() if part.matrices and name in own.parts]


def _card_facts(card: Card) -> dict[str, Any]:
    return {
        "memory_bytes": card.memory_bytes,
        "memory_source": card.memory_source,
        "price_source": card.price_source or None,
        "price_as_of": card.price_as_of or None,
        "note": card.note or None,
    }


def parse_contexts(input_len: str | None, output_len: str | None) -> tuple[Lengths, ...] | None:
    """Every prompt length with every answer length, answers a third of the prompt where none are named."""
    if input_len is None and output_len is None:
        return None
    if input_len is None:
        raise KvbenchError("--output-len needs --input-len, the prompts before those answers")
    prompts = parse_ints(input_len, "--input-len")
    answers = None if output_len is None else parse_ints(output_len, "--output-len")
    found = [(prompt, answer) for prompt in prompts for answer in answers or [max(1, prompt // 3)]]
    return tuple(dict.fromkeys(found))


def parse_kv_dtype(text: str) -> str | None:
    """None for `auto`."""
    word = text.strip().lower()
    word = choice(_KV_ALIASES.get(word, word), ("auto", *KV_ITEMSIZE), "--kv-dtype")
    return None if word == "auto" else word


def quantised(shape: ModelShape, name: str | None) -> ModelShape:
    """The model with its weights in another scheme; None leaves them as they are."""
    if name is None:
        return shape
    word = choice(name, ("none", *SCHEMES), "--quantization")
    return replace(shape, quantisation=SCHEMES.get(word))


def _contexts(shape: ModelShape, asked: Asked, longest: int) -> tuple[Lengths, ...]:
    """The contexts to show: those asked for, or all that fit while alone."""
    limit = shape.max_positions
    if asked.max_model_len is not None:
        if not 2 <= asked.max_model_len <= LARGEST:
            raise KvbenchError(f"--max-model-len must be at least 2 and at most {LARGEST:,}, not {asked.max_model_len}")
        if asked.max_model_len > limit:
            raise KvbenchError(
                f"--max-model-len {asked.max_model_len:,} is beyond the {limit:,} positions of {shape.name}"
            )
        limit = asked.max_model_len
    if asked.contexts is None:
        fitting = [lengths for lengths in CONTEXTS if sum(lengths) <= min(limit, longest or limit)]
        return tuple(fitting) or ((max(1, limit - 1), 1),)
    if (most := max(map(sum, asked.contexts))) > limit:
        of_what = "--max-model-len" if asked.max_model_len is not None else f"positions of {shape.name}"
        raise KvbenchError(f"a context of {most:,} tokens is beyond the {limit:,} {of_what}; lower --input-len")
    return asked.contexts


def _label(lengths: Lengths, contexts: tuple[Lengths, ...]) -> str:
    """The context's length, or both its parts where another context is as long."""
    alike = sum(sum(other) == sum(lengths) for other in contexts) > 1
    return f"{lengths[0]}+{lengths[1]}" if alike else str(sum(lengths))
