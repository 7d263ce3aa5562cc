"""What each point of the grid asks: its data set, how many requests, and when. No torch and no model's weights."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

from kvbench.cli.load_config import LoadConfig, parse_groups
from kvbench.errors import KvbenchError
from kvbench.metrics.points import Context, LoadPoint
from kvbench.workloads.arrivals import TRACE
from kvbench.workloads.datasets import Dataset, Outline, RandomTokens
from kvbench.workloads.jsonl import Jsonl
from kvbench.workloads.lengths import Lengths, distribution
from kvbench.workloads.load import check_clients
from kvbench.workloads.sharegpt import ShareGpt
from kvbench.workloads.support import Support
from kvbench.workloads.text import Tokenizer
from kvbench.workloads.traces import TRACES, Trace, read_trace

CPU_LOADS = (LoadPoint(concurrency=4), LoadPoint(concurrency=16))
CPU_CONTEXT = Context(64, 40)
GPU_LOADS = tuple(LoadPoint(concurrency=users) for users in (1, 8, 64, 256))
GPU_CONTEXT = Context(1024, 256)
SIM_LOADS = tuple(LoadPoint(concurrency=users) for users in (16, 64, 256))
SIM_CONTEXT = Context(1024, 1024)

OPEN_CONTEXTS = {"cpu": CPU_CONTEXT, "cuda": GPU_CONTEXT, "sim": SIM_CONTEXT}
"""Without a word from the user, by kind of device."""

ROUNDS = {"cpu": 3, "cuda": 8, "sim": 4}
"""Without a word from the user every client of a closed loop asks so often."""

RANGE_RATIO = 0.8
"""Without a word from the user, prompts and answers spread as widely as real ones do: 20 % to 180 % of their mean."""

NEEDS_TEXT = ("support", "jsonl", "sharegpt")
"""Data sets that a tokenizer reads."""


@dataclass(frozen=True, slots=True)
class Asking:
    """The data sets of the contexts, whatever their samples, and how they are asked on a `device` of this kind. A
    trace that is replayed came at `recorded_rate_per_s` (None: all at once)."""

    config: LoadConfig
    datasets: dict[Context, Dataset]
    device: str = "cpu"
    recorded_rate_per_s: float | None = None

    def arrivals(self, load: LoadPoint, context: Context, seed: int) -> list[float] | None:
        """When the conversations of an open loop open; None for a closed loop."""
        config, data = self.config, self.datasets[context.single]
        if load.concurrency is not None:
            return None
        if config.process.kind == TRACE:
            assert isinstance(data, Trace)
            return data.played(self._speed(load), config.duration_s)
        assert load.request_rate is not None, "only a trace has times without a rate"
        count = None if config.duration_s and not config.prompts else self._most(load, data)
        if count is not None:
            count = _conversations(data, count, seed)
        times = config.process.schedule(load.request_rate, seed, count=count, duration_s=config.duration_s)
        if isinstance(data, Trace) and len(times) > len(data.rows):
            raise KvbenchError(
                f"--dataset {data.name} has {len(data.rows)} requests, and {len(times)} arrive; lower --duration"
            )
        return times

    def _speed(self, load: LoadPoint) -> float:
        """How fast the load plays the trace: `--trace-scale`, or what gives it the rate asked."""
        if load.request_rate is None:
            return self.config.trace_scale or 1.0
        if self.recorded_rate_per_s is None:
            raise KvbenchError("--request-rate cannot stretch a trace whose requests all come at once; drop it")
        return load.request_rate / self.recorded_rate_per_s

    def prompts(self, load: LoadPoint, context: Context, seed: int) -> int:
        """How many requests are asked, each turn one; at most so many where conversations differ in their turns."""
        if load.concurrency is None and (self.config.duration_s or self.config.process.kind == TRACE):
            times = self.arrivals(load, context, seed)
            assert times is not None
            return min(len(times) * self.config.turns, self.config.prompts or len(times) * self.config.turns)
        return self._most(load, self.datasets[context.single])

    def _most(self, load: LoadPoint, data: Dataset) -> int:
        """What `--num-prompts` says, or by itself: some rounds of every client; half a minute of an open loop."""
        if self.config.prompts:
            return self.config.prompts
        if load.concurrency is not None:
            count = load.concurrency * ROUNDS[self.device] * self.config.turns
        else:
            assert load.request_rate is not None
            count = max(16, round(load.request_rate * 30)) * self.config.turns
        return min(count, len(data.rows)) if isinstance(data, Trace) else count

    def most_clients(self, context: Context) -> int | None:
        """How many clients any seed keeps busy; None where their requests grow in number with them."""
        data = self.datasets[context.single]
        if self.config.prompts:
            return -(-self.config.prompts // self.config.turns)
        return len(data.rows) if isinstance(data, Trace) else None

    def outline(self, load: LoadPoint, context: Context, seed: int) -> tuple[list[Outline], list[float] | None]:
        """What is asked, without its ids, and when the conversations open (None for a closed loop)."""
        outlines = self.datasets[context.single].outline(self.prompts(load, context, seed), seed)
        times = self.arrivals(load, context, seed)
        if times is None:
            return outlines, None
        opened = list(itertools.accumulate(one.turn == 0 for one in outlines))
        kept = [one for one, number in zip(outlines, opened, strict=True) if number <= len(times)]
        return kept, times[: opened[len(kept) - 1]]

    def check(self, load: LoadPoint, context: Context, seed: int) -> None:
        """KvbenchError where the load could not mean anything."""
        data = self.datasets[context.single]
        if load.concurrency is not None:
            clients = _conversations(data, self.prompts(load, context, seed), seed)
            check_clients(clients, load.concurrency, self.config.turns)
        self.arrivals(load, context, seed)


def _conversations(data: Dataset, requests: int, seed: int) -> int:
    """How many conversations have so many requests in all."""
    if isinstance(data, RandomTokens):
        return -(-requests // data.turns)
    if isinstance(data, ShareGpt) and data.turns > 1:
        return len(data.draw(requests, seed))
    return requests


def fill_contexts(config: LoadConfig, device: str) -> list[Context]:
    """Every context of the grid, with the lengths that were left open filled in for a `device` of this kind."""
    told = config.contexts or (Context(),)
    if config.dataset not in ("random", "jsonl"):
        return list(told)
    fallback = OPEN_CONTEXTS[device]
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


def make_asking(
    config: LoadConfig,
    device: str,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    special: frozenset[int],
    choices: dict[str, str],
) -> Asking:
    """The data set of every context of the grid, read and checked; samples are answers to the same prompts."""
    path = config.dataset_path
    if config.dataset in TRACES:
        assert isinstance(path, Path)
        return _replaying(config, device, read_trace(config.dataset, path, vocab_size, special))
    singles = dict.fromkeys(context.single for context in fill_contexts(config, device))
    datasets: dict[Context, Dataset]
    if config.dataset == "support":
        datasets = {Context(): Support(tokenizer, vocab_size)}
    elif config.dataset == "random":
        datasets = {context: _random(config, context, vocab_size, special, choices) for context in singles}
    else:
        assert isinstance(path, Path)
        if config.dataset == "sharegpt":
            datasets = {Context(): ShareGpt(path, tokenizer, vocab_size, config.turns)}
        else:
            datasets = {one: Jsonl(path, tokenizer, vocab_size, one.output_tokens or 1) for one in singles}
    return Asking(config, datasets, device)


def _replaying(config: LoadConfig, device: str, trace: Trace) -> Asking:
    """A trace up to `--num-prompts` and, where it is replayed as recorded, to `--duration`: what comes later is never
    asked, and none of it is the longest request."""
    if config.prompts:
        trace = trace.first(config.prompts)
    rate_per_s = trace.rate_per_s
    if config.duration_s and config.loads == (LoadPoint(),):
        trace = trace.first(len(trace.played(config.trace_scale or 1.0, config.duration_s)))
    return Asking(config, {Context(): trace}, device, rate_per_s)


def _random(
    config: LoadConfig, context: Context, vocab_size: int, special: frozenset[int], choices: dict[str, str]
) -> RandomTokens:
    assert context.input_tokens is not None and context.output_tokens is not None
    if config.input_dist or config.output_dist:
        inputs = distribution(config.input_dist, context.input_tokens, "--input-dist")
        outputs = distribution(config.output_dist, context.output_tokens, "--output-dist")
    else:
        ratio = config.range_ratio
        if ratio is None:
            told = any(one.input_tokens or one.output_tokens for one in config.contexts or ())
            ratio = 0.0 if told else RANGE_RATIO
            if ratio:
                choices["lengths"] = f"spread {1 - ratio:.0%} to {1 + ratio:.0%} of their mean, as real traffic is"
        inputs, outputs = Lengths(context.input_tokens, ratio), Lengths(context.output_tokens, ratio)
    return RandomTokens(
        inputs, outputs, vocab_size, special, context.prefix_tokens, parse_groups(config.prefix_groups), config.turns
    )
