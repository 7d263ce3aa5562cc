"""A sweep made ready: what the user left open is chosen here, each choice with its reason, and the model is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvbench.cli.asking import NEEDS_TEXT, Asking, fill_contexts, make_asking
from kvbench.cli.config import SweepConfig
from kvbench.cli.owned import Owned
from kvbench.cli.price import Price, price_of
from kvbench.cli.server import reach
from kvbench.cli.stack import SERVER, CacheConfig, Stack
from kvbench.cli.virtual import Virtual
from kvbench.engine.scheduler import Limits
from kvbench.engine.types import Request, Sampling
from kvbench.errors import KvbenchError
from kvbench.metrics.points import Context
from kvbench.metrics.precision import REPEATS_CAP
from kvbench.workloads.datasets import Dataset
from kvbench.workloads.grid import Cell, cells
from kvbench.workloads.load import ClosedLoop, OpenLoop, declared_tokens, draw_requests
from kvbench.workloads.traces import TRACES

FEWEST_REPEATS = 2
"""Without a word from the user: one repeat proves nothing."""


@dataclass(frozen=True, slots=True)
class Job:
    """A sweep that can start. `choices` says, a line each, what was chosen and why."""

    config: SweepConfig
    machine: Owned | Virtual
    stack: Stack
    asking: Asking
    cells: list[Cell]
    ignore_eos: bool
    price: Price | None
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
                stop_ids=self.machine.stop_ids,
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
        enough of them, and one more would try the machine's patience. Only time decides, never a result."""
        if self.config.repeats is not None or self.config.until_ci is not None or cell.repeat < FEWEST_REPEATS:
            return False
        return elapsed_s * (cell.repeat + 1) / cell.repeat > self.machine.patience_s

    def load(self, cell: Cell) -> ClosedLoop | OpenLoop:
        requests, users = self.requests(cell), cell.load.concurrency
        return OpenLoop(requests, self.config.max_concurrency) if users is None else ClosedLoop(requests, users)


def prepare(config: SweepConfig) -> Job:
    """Choose, check and load. Raises KvbenchError for all that the user can mend, before anything is written."""
    choices: dict[str, str] = {}
    machine = Owned(config, choices) if config.card is None else Virtual(config, config.card, choices)
    tokenizer = machine.tokenizer() if config.dataset in NEEDS_TEXT else None
    asking = make_asking(config, machine.kind, tokenizer, machine.vocabulary, machine.special_ids, choices)
    if config.loads is None:
        choices["concurrency"] = "a light load and one that fills the cache"
    limits = Limits(
        config.max_model_len or _longest(config, asking.datasets, machine, choices),
        config.max_batched_tokens,
        config.max_sequences,
        config.overflow == "truncate",
        config.request_timeout_s,
    )
    repeats = config.repeats or (1 if config.find else REPEATS_CAP if config.until_ci else machine.repeats)
    contexts = fill_contexts(config, machine.kind)
    plan = cells(config.variants, config.loads or machine.loads, contexts, repeats, config.seed)
    ignore_eos = config.dataset != "jsonl" if config.ignore_eos is None else config.ignore_eos
    endpoint = None
    if config.target is not None:
        assert isinstance(machine, Owned), "the command line refuses a server beside a card that is only computed"
        trial = _first(config, asking.datasets, plan, ignore_eos)
        endpoint = reach(config, config.target, machine.source, tokenizer, trial)
    local = any(variant.backend != SERVER for variant in config.variants)
    memory = CacheConfig(0, config.block_size, limits.max_model_len)
    if local:
        machine.load(limits.max_model_len)
        memory = _memory(config, machine, plan, limits, choices)
    job = Job(
        config=config,
        machine=machine,
        stack=Stack(machine if local else None, memory, limits, config.save_tokens, endpoint),
        asking=asking,
        cells=plan,
        ignore_eos=ignore_eos,
        price=price_of(config.price_usd_per_hour) or machine.price,
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
    config: SweepConfig, machine: Owned | Virtual, plan: list[Cell], limits: Limits, choices: dict[str, str]
) -> CacheConfig:
    """What each backend gets."""
    pool_bytes = config.kv_bytes or machine.pool_bytes(plan, limits.max_model_len)
    return CacheConfig(
        _whole_blocks("--kv-memory", pool_bytes, machine.kv_bytes_per_token, config.block_size),
        config.block_size,
        limits.max_model_len,
        swap_tokens=_swap_tokens(config, machine, limits, choices),
    )


def _whole_blocks(flag: str, size_bytes: int, per_token: int, block_size: int) -> int:
    """The tokens of the whole blocks that fit a size."""
    tokens = size_bytes // per_token // block_size * block_size
    if tokens < 1:
        raise KvbenchError(f"{flag} {size_bytes:,} holds no block of {block_size} tokens ({per_token:,} bytes each)")
    return tokens


def _swap_tokens(config: SweepConfig, machine: Owned | Virtual, limits: Limits, choices: dict[str, str]) -> int:
    """The rows of host memory that those get who swap, no more than all that can run at once could fill; 0 where nobody
    swaps."""
    if not any(variant.preemption == "swap" for variant in config.variants):
        return 0
    size_bytes = config.swap_bytes or machine.swap_bytes()
    tokens = _whole_blocks("--swap-space", size_bytes, machine.kv_bytes_per_token, config.block_size)
    most = limits.seats * -(-limits.max_model_len // config.block_size) * config.block_size
    if tokens > most:
        choices["swap_space"] = f"{limits.seats} sequences of full length: no more can ever have run"
    return min(tokens, most)


def _longest(
    config: SweepConfig, datasets: dict[Context, Dataset], machine: Owned | Virtual, choices: dict[str, str]
) -> int:
    longest = max(
        data.longest_input
        + (config.turns - 1) * max(0, (config.max_tokens or 0) - data.longest_output)  # answers before may be longer
        + (config.max_tokens or data.longest_output)
        for data in datasets.values()
    )
    if longest > (machine.positions or math.inf):
        raise KvbenchError(
            f"requests of up to {longest:,} tokens{_with(config)} are beyond the {machine.positions:,} positions of "
            f"{machine.model_name}; {_cure(config)}"
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
    if config.dataset != "random":
        return f"take them out of {config.dataset_path or config.dataset}, or say --max-model-len, which rejects them"
    prefixes = any(context.prefix_tokens for context in config.contexts or ())
    flags = [*(["--turns"] if config.turns > 1 else []), *(["--prefix-len"] if prefixes else []), "--input-len"]
    clip = ", or clip them: --input-dist …:max=…" if config.input_dist or config.output_dist else ""
    return f"lower {', '.join(flags)} or --output-len{clip}"
