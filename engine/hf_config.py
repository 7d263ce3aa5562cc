"""A `ModelShape` from any Hugging Face `config.json`, as transformers' own classes would read it, without transformers.

What a configuration leaves out has the default of its family's class only where published ones do leave it out; else it
is an error that names the field and the nearest there is. Standard library only.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbench.engine.hf_fields import (
    HEAD_DIM,
    INTERMEDIATE,
    KEYS,
    LATENT,
    MIXTURES,
    NESTED,
    NESTED_DEFAULTS,
    ODD,
    OTHER_PARTS,
    QWEN_MIXTURES,
    SAME_AS,
    SHARING,
    SWITCHED,
    SWITCHES,
    UNGROUPED,
    UNPLANNED,
)
from kvbench.engine.parameters import FAMILIES, Traits
from kvbench.engine.quantisation import read_quantisation
from kvbench.engine.shapes import SHAPES, ModelShape, find_shape, unknown_model
from kvbench.errors import KvbenchError


def load_shape(name: str) -> ModelShape:
    """The shape of a built-in name, also after a hub's `org/`, of a folder or of a `config.json`."""
    if (file := _file(name)) is not None:
        own = (file.parent if file.name == "config.json" else file).resolve()
        shape = read_config(_json(file), str(file))
        return replace(shape, name=own.name, source=shape.source.replace("config.json", str(file), 1))
    own_name = name.strip()
    for shape in SHAPES:
        if own_name.lower() == shape.source.lower():
            return shape
    if found := find_shape(own_name.rpartition("/")[2] if own_name.count("/") == 1 else own_name):
        return found
    if own_name.count("/") == 1 and not own_name.startswith((".", "~")):
        raise KvbenchError(
            f"{own_name} is not built in, and nothing is downloaded here; give the path of its config.json"
        )
    raise unknown_model(name)


def _file(name: str) -> Path | None:
    """The `config.json` that a path names, whether it is there or not; None for what is no path."""
    try:
        path = Path(name).expanduser()
        if name.strip() and path.is_dir():
            return path / "config.json"
    except (OSError, RuntimeError):  # a name too long for a file, a home that nobody has
        return None
    return path if path.suffix == ".json" else None


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise KvbenchError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise KvbenchError(f"{file} is not JSON: {error}") from error


def read_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape of the language model that `config` describes; `name` is what errors call it."""
    if not isinstance(config, Mapping):
        raise KvbenchError(f"{name} must hold an object of fields, not {type(config).__name__}")
    nested = next((key for key in NESTED if isinstance(config.get(key), Mapping)), None)
    told = dict(config)
    if nested is not None and _first(config, KEYS["layers"]) is None:
        told = {key: config[key] for key in ("quantization_config",) if key in config} | dict(config[nested])
    family = _family(told, name)
    if nested is not None:
        told = NESTED_DEFAULTS.get(family, {}) | told
    alone = any(key.endswith("_config") and key[:-7] in OTHER_PARTS for key in map(str, config))
    try:
        shape = _shape(_Fields(told, name), family)
        return replace(shape, source="config.json, its language model alone" if alone else "config.json")
    except KvbenchError as error:
        message = str(error)
        raise KvbenchError(message if message.startswith(name) else f"{name}: {message}") from None


def _family(config: Mapping[str, Any], name: str) -> str:
    model_type = config.get("model_type")
    if model_type is not None and not isinstance(model_type, str):
        raise KvbenchError(f"{name} has model_type {model_type!r}; it must be a text such as llama")
    if not model_type:
        near = difflib.get_close_matches("model_type", [str(key) for key in config], n=1)
        raise KvbenchError(f"{name} lacks model_type{f'; the nearest it has is {near[0]}' if near else ''}")
    family = SAME_AS.get(model_type, model_type)
    if family in UNPLANNED:
        raise KvbenchError(f"{name}: model type {model_type!r} cannot be planned for: {UNPLANNED[family]}")
    if family not in FAMILIES:
        known = [*FAMILIES, *SAME_AS]
        near = difflib.get_close_matches(family, known, n=1, cutoff=0)
        raise KvbenchError(f"{name}: model type {model_type!r} is not known; the nearest known one is {near[0]}")
    return family


class _Fields:
    """The fields of a configuration, each checked as it is read."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config, self.name = config, name

    def get(self, key: str) -> Any:
        return self.config.get(key)

    def whole(self, keys: Sequence[str], default: int | None = None, least: int = 1) -> int:
        """The first of `keys` that is there and not null, a whole number from `least` to 2³¹."""
        found = _first(self.config, keys)
        if found is None:
            if default is not None:
                return default
            others = [str(key) for key in self.config if key not in keys]  # those of them that are there are null
            near = [hit for key in keys for hit in difflib.get_close_matches(key, others, n=1)]
            hint = f"; the nearest it has is {near[0]}" if near else ""
            raise KvbenchError(f"{self.name} lacks {' or '.join(keys)}{hint}")
        key, value = found
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 2**31:
            raise KvbenchError(f"{self.name} has {key} {value!r}; it must be a whole number of at least {least}")
        return value

    def switch(self, key: str, default: bool) -> bool:
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise KvbenchError(f"{self.name} has {key} {value!r}; it must be true or false")
        return value


def _first(config: Mapping[str, Any], keys: Sequence[str]) -> tuple[str, Any] | None:
    return next(((key, config[key]) for key in keys if config.get(key) is not None), None)


def _shape(told: _Fields, family: str) -> ModelShape:
    layers, hidden = told.whole(KEYS["layers"]), told.whole(KEYS["hidden"])
    heads = told.whole(KEYS["heads"])
    for key, needed in ODD.get(family, {}).items():
        if told.switch(key, needed) != needed:
            raise KvbenchError(f"{told.name} has {key} {str(not needed).lower()}, which is not counted")
    if family == "opt" and told.whole(["word_embed_proj_dim"], hidden) != hidden:
        raise KvbenchError(f"{told.name} has word_embed_proj_dim other than hidden_size, which is not counted")
    inner = 4 * hidden if INTERMEDIATE.get(family) == "n_inner" else None
    latent = _latent(told, family)
    kv_heads = heads if latent or family in UNGROUPED else told.whole(["num_key_value_heads"], heads)
    if kv_heads > heads or heads % kv_heads:
        raise KvbenchError(f"{told.name} has num_key_value_heads {kv_heads}, by which its {heads} heads do not divide")
    mixture = _experts(told, family, layers) if family in MIXTURES else {}
    window, sliding = _windows(told, family, layers)
    quantised = told.get("quantization_config")
    return ModelShape(
        told.name,
        family,
        layers,
        hidden,
        told.whole([INTERMEDIATE.get(family, "intermediate_size")], inner),
        heads,
        kv_heads,
        latent.get("value_dim") or _head_dim(told, family, hidden, heads),
        told.whole(KEYS["vocab"]),
        told.whole(KEYS["max_positions"]),
        tied=told.switch("tie_word_embeddings", FAMILIES[family].tied),
        sliding_window=window,
        sliding_layers=sliding,
        quantisation=None if quantised is None else read_quantisation(quantised, layers),
        traits=_traits(told, family),
        **latent,
        **mixture,
    )


def _head_dim(told: _Fields, family: str, hidden: int, heads: int) -> int:
    known = HEAD_DIM.get(family)
    if (family in UNGROUPED or (known is None and told.get("head_dim") is None)) and hidden % heads:
        raise KvbenchError(f"{told.name} lacks head_dim, and its hidden size {hidden} does not divide by {heads} heads")
    return hidden // heads if family in UNGROUPED else told.whole(["head_dim"], known or hidden // heads)


def _latent(told: _Fields, family: str) -> dict[str, Any]:
    if family not in LATENT:
        return {}
    return {
        "q_rank": told.whole(["q_lora_rank"], 0, least=0),
        "kv_rank": told.whole(["kv_lora_rank"]),
        "rope_dim": told.whole(["qk_rope_head_dim"]),
        "nope_dim": told.whole(["qk_nope_head_dim"]),
        "value_dim": told.whole(["v_head_dim"]),
    }


def _experts(told: _Fields, family: str, layers: int) -> dict[str, Any]:
    experts = told.whole(KEYS["experts"])
    chosen = told.whole(KEYS["experts_per_token"])
    if chosen > experts:
        raise KvbenchError(f"{told.name} sends a token to {chosen} experts of {experts}")
    own = family in (*QWEN_MIXTURES, *SHARING)
    width, shared, dense = told.whole(["moe_intermediate_size" if own else "intermediate_size"]), 0, 0
    if family in SHARING:
        shared = told.whole(["n_shared_experts"], 0, least=0) * width
        dense = told.whole(["first_k_dense_replace"], 0, least=0)
    elif family == "llama4_text":
        shared, step, listed = width, told.whole(["interleave_moe_layer_step"], 1), told.get("moe_layers")
        dense = layers - (len(listed) if isinstance(listed, list) else layers // step)
    elif family in QWEN_MIXTURES:
        shared = told.whole(["shared_expert_intermediate_size"]) if family == "qwen2_moe" else 0
        step, only = told.whole(["decoder_sparse_step"], 1), told.get("mlp_only_layers") or []
        if not isinstance(only, list) or not all(isinstance(layer, int) for layer in only):
            raise KvbenchError(f"{told.name} has mlp_only_layers {only!r}; it must be a list of whole numbers")
        dense = layers - layers // step + len({one for one in only if 0 <= one < layers and (one + 1) % step == 0})
    if dense > layers:
        raise KvbenchError(f"{told.name} has first_k_dense_replace {dense}, more than its {layers} layers")
    return {
        "experts": experts,
        "experts_per_token": chosen,
        "expert_intermediate": width,
        "shared_intermediate": shared,
        "dense_layers": dense,
    }


def _windows(told: _Fields, family: str, layers: int) -> tuple[int | None, int]:
    """The window and how many layers have it."""
    if family in SWITCHED and not told.switch("use_sliding_window", False):
        return None, 0
    chunked = family == "llama4_text"  # a chunk holds at most what a window of its length does
    types = told.get("layer_types")
    window = told.whole(["attention_chunk_size" if chunked else "sliding_window"], 0, least=0) or None
    if types is not None:
        if not isinstance(types, list) or len(types) < layers:
            raise KvbenchError(f"{told.name} has layer_types for other than its {layers} layers")
        slides = "chunked_attention" if chunked else "sliding_attention"
        if other := sorted({str(one) for one in types[:layers]} - {"full_attention", slides}):
            raise KvbenchError(f"{told.name} has layers of type {other[0]!r}, which keep no plain KV cache")
        sliding = types[:layers].count(slides)
    elif family in ("qwen2", "qwen2_moe", "qwen3", "smollm3", "dots1"):
        sliding = max(0, layers - told.whole(["max_window_layers"], 28, least=0))
    else:
        every = FAMILIES[family].slide_every
        every = told.whole(["sliding_window_pattern"], every, least=0) if every > 1 else every
        sliding = 0 if not every else layers if every == 1 else layers - layers // every
    if window is None and types is not None and sliding:
        raise KvbenchError(f"{told.name} has {sliding} sliding layers and lacks sliding_window")
    return (window, sliding) if window and sliding else (None, 0)


def _traits(told: _Fields, family: str) -> Traits:
    traits = FAMILIES[family]
    switched: dict[str, Any] = {}
    for key, families in SWITCHES.items():
        for field in families.get(family, ()):
            switched[field] = told.switch(key, getattr(traits, field))
    traits = replace(traits, **switched)
    if family in ("cohere", "glm4_moe") and told.switch("use_qk_norm", False):
        traits = replace(traits, head_norms="all" if family == "cohere" else "head")
    if family == "stablelm":
        traits = replace(traits, norms=1 if told.switch("use_parallel_residual", False) else 2)
        if told.switch("qk_layernorm", False):
            traits = replace(traits, head_norms="all")
    return traits
