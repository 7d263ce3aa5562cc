"""How quantised weights are stored: bits a value, scales and zero points included, and which parts have them.

Standard library only.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.engine.parameters import ATTENTION, DENSE, EXPERTS, HEAD, PARTS, SHARED
from kvbench.errors import KvbenchError

LINEAR = frozenset({ATTENTION, DENSE, SHARED, EXPERTS})
"""What a scheme quantises where nothing else is said: embedding, head, router and norms stay as they are."""

MODULES = {
    ATTENTION: ("attn", "attention"),
    DENSE: (".mlp", "gate_proj", "up_proj", "down_proj", "feed_forward", ".fc"),
    SHARED: ("shared_expert",),
    EXPERTS: (".experts", "block_sparse_moe"),
    HEAD: ("lm_head", "output_layer", "embed_out"),
}
"""What the modules of a part are called."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How the matrices of some parts are stored: `bits` a value, its share of scales and zero points included."""

    name: str
    bits: float
    parts: frozenset[str]

    def __post_init__(self) -> None:
        assert 0 < self.bits <= 32 and self.parts <= set(PARTS), self


SCHEMES = {
    "fp8": Quantisation("fp8", 8 + 32 / 128**2, LINEAR),
    "int4": Quantisation("int4", 4 + (16 + 4) / 128, LINEAR),
    "nvfp4": Quantisation("nvfp4", 4 + 8 / 16, LINEAR),
    "mxfp4": Quantisation("mxfp4", 4 + 8 / 32, frozenset({EXPERTS})),
}
"""Schemes by name: `fp8` has a scale of 32 bits for a block of 128 x 128; `int4` (AWQ, GPTQ) one of 16 and a zero point
of 4 for 128 values; `nvfp4` and `mxfp4` one of 8 for 16 and for 32."""


def read_quantisation(config: Any, layers: int) -> Quantisation:
    """The `quantization_config` of a `config.json`. KvbenchError for a method that is not known."""
    if not isinstance(config, Mapping):
        raise KvbenchError(f"quantization_config must be an object, not {config!r}")
    method = config.get("quant_method")
    if method is None and ("load_in_4bit" in config or "load_in_8bit" in config):
        method = "bitsandbytes"
    if not isinstance(method, str) or method not in _METHODS:
        near = difflib.get_close_matches(str(method), _METHODS, n=1, cutoff=0)
        raise KvbenchError(
            f"quantization_config has quant_method {method!r}, which is not known; the nearest is {near[0]} "
            f"(known: {', '.join(_METHODS)})"
        )
    bits = _METHODS[method](config)
    if not 1 <= bits <= 32:
        raise KvbenchError(f"quantization_config stores {bits:g} bits a value; it must be 1 to 32")
    whole = method in ("compressed-tensors", "modelopt")
    parts = {EXPERTS} if method == "mxfp4" else {*LINEAR, *([HEAD] if whole or config.get("lm_head") is True else [])}
    return Quantisation(method, bits, frozenset(parts - _spared(config, layers)))


def _spared(config: Mapping[str, Any], layers: int) -> set[str]:
    """Parts whose modules a configuration keeps as they are: named for all layers at once, or for half of them."""
    names: list[Any] = []
    for key in ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "llm_int8_skip_modules"):
        listed = config.get(key) or []
        if not isinstance(listed, list):
            raise KvbenchError(f"quantization_config has {key} {listed!r}; it must be a list of modules")
        names += listed
    found = set()
    for part, words in MODULES.items():
        mine = [str(name) for name in names if any(word in f".{name}" for word in words)]
        if part in (DENSE, EXPERTS):  # `.mlp.gate` is a router
            mine = [name for name in mine if not re.search(r"gate(?!_|\w)|router", name)]
        if part == DENSE:
            mine = [name for name in mine if "expert" not in name]
        numbered = {hit[1] for name in mine if (hit := re.search(r"layers\.(\d+)\.", name))}
        if len(numbered) * 2 >= layers or any(not re.search(r"layers\.\d+\.", name) for name in mine):
            found.add(part)
    return found


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1 <= value <= 2**20:
        raise KvbenchError(f"quantization_config has {key} {value!r}; it must be a number")
    return float(value)


def _grouped(bits: float, group: float, scale_bits: float, zero_bits: float) -> float:
    """A group of -1 or 0 values is a whole column, whose scale does not count."""
    return bits + (scale_bits + zero_bits) / group if group > 0 else bits


def _integers(config: Mapping[str, Any]) -> float:
    """GPTQ and AWQ: groups with a scale of 16 bits and a packed zero point."""
    bits = _number(config, "bits" if "bits" in config else "w_bit", 4)
    return _grouped(bits, _number(config, "group_size" if "group_size" in config else "q_group_size", 128), 16, bits)


def _fp8(config: Mapping[str, Any]) -> float:
    block = config.get("weight_block_size")
    if block is None:
        return 8.0
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and 0 < n <= 2**20 for n in block):
        raise KvbenchError(f"quantization_config has weight_block_size {block!r}; it must be two whole numbers")
    return 8 + 32 / float(block[0] * block[1])


def _bitsandbytes(config: Mapping[str, Any]) -> float:
    """Blocks of 64 with a scale of 32 bits, which double quantisation makes 8 with one of 32 for 256 of them."""
    if not config.get("load_in_4bit"):
        return 8.0
    return 4 + (8 / 64 + 32 / (64 * 256) if config.get("bnb_4bit_use_double_quant") else 32 / 64)


def _compressed(config: Mapping[str, Any]) -> float:
    groups = config.get("config_groups")
    known = [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
    found = [group.get("weights") for group in known]
    weights = next((one for one in found if isinstance(one, Mapping)), None)
    if weights is None:
        raise KvbenchError("quantization_config of compressed-tensors lacks config_groups with weights")
    bits, group = _number(weights, "num_bits"), weights.get("group_size")
    if group is None:
        return bits
    scale = 8 if weights.get("type") == "float" and bits == 4 else 16
    return _grouped(bits, _number(weights, "group_size"), scale, 0 if weights.get("symmetric", True) else bits)


def _modelopt(config: Mapping[str, Any]) -> float:
    inner = config.get("quantization") if isinstance(config.get("quantization"), Mapping) else config
    algorithm = str((inner or {}).get("quant_algo", "")).upper()
    if algorithm not in ("NVFP4", "FP8"):
        raise KvbenchError(f"quantization_config of modelopt has quant_algo {algorithm!r}; known are NVFP4 and FP8")
    return 4 + 8 / 16 if algorithm == "NVFP4" else 8.0


_METHODS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "awq": _integers,
    "gptq": _integers,
    "fp8": _fp8,
    "fbgemm_fp8": lambda config: 8.0,
    "mxfp4": lambda config: 4 + 8 / 32,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
}
