"""What is asked of a backend, as it was told: loads, contexts, data set. Shared by `sweep` and `workloads show`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.errors import KvbenchError
from kvbench.metrics.points import Context, LoadPoint
from kvbench.workloads.arrivals import TRACE, Arrivals
from kvbench.workloads.datasets import Groups
from kvbench.workloads.grid import parse_floats, parse_ints
from kvbench.workloads.lengths import distribution
from kvbench.workloads.options import LARGEST, positive, seconds, shaped
from kvbench.workloads.traces import TRACES

LIKELY = 64
"""A length to try a distribution on where the lengths are left to the sweep."""

DATASETS = ("random", "support", "jsonl", "sharegpt", *TRACES)
OWN_LENGTHS = ("support", "sharegpt", *TRACES)
"""Data sets whose lengths are their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """The flags that say what is asked, and when. None: not told; the command chooses and says why."""

    loads: tuple[LoadPoint, ...] | None
    contexts: tuple[Context, ...] | None
    arrivals: str | None = None
    burstiness: float | None = None
    max_concurrency: int | None = None
    duration_s: float | None = None
    range_ratio: float | None = None
    input_dist: str | None = None
    output_dist: str | None = None
    prefix_groups: str | None = None
    turns: int = 1
    think_s: float = 0.0
    trace_scale: float | None = None
    dataset: str = "random"
    dataset_path: Path | None = None
    prompts: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        counts: tuple[tuple[str, int, int | None], ...] = (
            ("--num-prompts", 1, self.prompts),
            ("--max-concurrency", 1, self.max_concurrency),
            ("--turns", 1, self.turns),
            ("--seed", 0, self.seed),
        )
        for flag, least, count in counts:
            if count is not None and not least <= count <= LARGEST:
                raise KvbenchError(f"{flag} must be at least {least} and at most {LARGEST:,}, not {count}")
        if self.range_ratio is not None and not 0 <= self.range_ratio < 1:
            raise KvbenchError(f"--range-ratio must be at least 0 and below 1, not {self.range_ratio}")
        self._check_dataset()
        self._check_lengths()
        self._check_turns()
        self._check_arrivals()

    def _check_dataset(self) -> None:
        file = self.dataset not in ("random", "support")
        if file != (self.dataset_path is not None):
            names = ", ".join(name for name in DATASETS if name not in ("random", "support"))
            raise KvbenchError(
                f"--dataset {self.dataset} reads a file; add --dataset-path FILE"
                if file
                else f"--dataset-path is for --dataset {names}, not {self.dataset}; give both or neither"
            )
        prefixes = any(context.prefix_tokens for context in self.contexts or ())
        if self.dataset != "random" and (prefixes or self.prefix_groups):
            raise KvbenchError(
                f"--dataset {self.dataset} has prompts of its own; --prefix-len and --prefix-groups are for --dataset "
                "random"
            )
        if self.prefix_groups is not None:
            parse_groups(self.prefix_groups)
            if not prefixes:
                raise KvbenchError("--prefix-groups says who shares which prefix; add --prefix-len")

    def _check_lengths(self) -> None:
        contexts = self.contexts or ()
        dists = self.input_dist or self.output_dist
        lengths = any(context.input_tokens or context.output_tokens for context in contexts)
        if self.dataset in OWN_LENGTHS and (lengths or dists or self.range_ratio is not None):
            raise KvbenchError(
                f"--dataset {self.dataset} has lengths of its own; drop --input-len, --output-len, --range-ratio, "
                "--input-dist, --output-dist"
            )
        if self.dataset == "jsonl" and (self.range_ratio or dists or any(context.input_tokens for context in contexts)):
            raise KvbenchError(
                "--dataset jsonl has prompts of its own; drop --input-len, --range-ratio, --input-dist, --output-dist"
            )
        if dists and self.range_ratio is not None:
            raise KvbenchError(
                "--range-ratio and --input-dist or --output-dist both say how lengths vary; give one "
                "(--range-ratio 0.5 is uniform:ratio=0.5)"
            )
        for context in contexts or (Context(),):
            distribution(self.input_dist, context.input_tokens or LIKELY, "--input-dist")
            distribution(self.output_dist, context.output_tokens or LIKELY, "--output-dist")

    def _check_turns(self) -> None:
        if self.turns == 1:
            if self.think_s:
                raise KvbenchError("--think-time is the time between the turns of a conversation; add --turns")
            return
        if self.dataset not in ("random", "sharegpt"):
            raise KvbenchError(
                f"--turns {self.turns} makes conversations of --dataset random or sharegpt, not {self.dataset}"
            )
        if any(context.samples > 1 for context in self.contexts or ()):
            raise KvbenchError(
                f"--turns {self.turns} goes on from one answer, --n asks for several; drop one of the two"
            )

    @property
    def process(self) -> Arrivals:
        """How the requests of an open loop arrive."""
        replay = self.arrivals is None and any(not load.size for load in self.loads or ())
        return Arrivals.of(TRACE if replay else self.arrivals, self.burstiness)

    def _check_arrivals(self) -> None:
        for flag, number in (("--burstiness", self.burstiness), ("--trace-scale", self.trace_scale)):
            if number is not None:
                positive(number, flag)
        if not any(load.concurrency is None for load in self.loads or ()):
            self._check_closed()
            return
        if self.burstiness is not None and not (self.arrivals or "").startswith("gamma"):
            raise KvbenchError("--burstiness shapes gamma arrivals; add --arrivals gamma")
        if self.process.kind != TRACE:
            if self.trace_scale is not None:
                raise KvbenchError("--trace-scale plays a recorded trace faster; it needs --arrivals trace")
            return
        if self.dataset not in TRACES:
            raise KvbenchError(f"--arrivals trace needs a data set that has times: {', '.join(TRACES)}")
        if self.trace_scale is not None and any(load.request_rate for load in self.loads or ()):
            raise KvbenchError("--trace-scale and --request-rate both say how fast the trace is played; give one")

    def _check_closed(self) -> None:
        """A closed loop has no schedule to shape."""
        told = {
            "--arrivals": self.arrivals,
            "--burstiness": self.burstiness,
            "--max-concurrency": self.max_concurrency,
            "--duration": self.duration_s,
            "--trace-scale": self.trace_scale,
        }
        if given := [name for name, value in told.items() if value is not None]:
            raise KvbenchError(f"{given[0]} belongs to an open loop; add --request-rate, or replay a trace")


def parse_loads(
    concurrency: str | None, request_rate: str | None, *, recorded: bool = False
) -> tuple[LoadPoint, ...] | None:
    """`--concurrency` or `--request-rate` as points of the grid; where neither is given one that leaves it to what was
    `recorded`, and else None."""
    if concurrency is not None and request_rate is not None:
        raise KvbenchError("--concurrency and --request-rate are two different loads; give one of them")
    if request_rate is not None:
        return tuple(LoadPoint(request_rate=rate) for rate in parse_floats(request_rate, "--request-rate"))
    if concurrency is not None:
        return tuple(LoadPoint(concurrency=users) for users in parse_ints(concurrency, "--concurrency"))
    return (LoadPoint(),) if recorded else None


def parse_contexts(
    inputs: str | None, outputs: str | None, prefixes: str | None = None, samples: str | None = None
) -> tuple[Context, ...] | None:
    """Every input length with every output length, prefix and number of samples; None where nothing is given."""
    if (inputs, outputs, prefixes, samples) == (None,) * 4:
        return None
    axes: tuple[list[Any], ...] = (
        [None] if inputs is None else parse_ints(inputs, "--input-len"),
        [None] if outputs is None else parse_ints(outputs, "--output-len"),
        [0] if prefixes is None else parse_ints(prefixes, "--prefix-len", least=0),
        [1] if samples is None else parse_ints(samples, "--n"),
    )
    return tuple(Context(*point) for point in itertools.product(*map(dict.fromkeys, axes)))


def parse_groups(text: str | None) -> Groups:
    """`8`, or `8:alpha=1.2` where the first prefix is the most popular."""
    number, _, more = (text or "1").partition(":")
    (count,) = parse_ints(number, "--prefix-groups") if "," not in number and "-" not in number else [0]
    if not count:
        raise KvbenchError(f"--prefix-groups takes one number, as 8 or 8:alpha=1.2, not {text!r}")
    if not more:
        return Groups(count)
    _, told = shaped(f"zipf:{more}", {"zipf": {"alpha": "number"}}, "--prefix-groups")
    return Groups(count, told["alpha"])


def parse_seconds(text: str | None, flag: str) -> float | None:
    """A time with its unit in seconds; None where nothing was told."""
    return None if text is None else seconds(text, flag)
