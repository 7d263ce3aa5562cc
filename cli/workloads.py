"""`kvbench workloads show`: what a load would ask, before any of it is asked. Needs neither a GPU nor torch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli import load_flags as load

if TYPE_CHECKING:
    from kvbench.cli.load_config import LoadConfig

VOCABULARY = 2**20
"""Ids are never looked at, so that any will do."""


def workloads(
    action: Annotated[str, typer.Argument(help="show", metavar="show")],
    concurrency: load.Concurrency = None,
    request_rate: load.RequestRate = None,
    arrivals: load.ArrivalProcess = None,
    burstiness: load.Burstiness = None,
    max_concurrency: load.MaxConcurrency = None,
    duration: load.Duration = None,
    dataset: load.Dataset = "random",
    dataset_path: load.DatasetPath = None,
    trace_scale: load.TraceScale = None,
    input_len: load.InputLen = None,
    output_len: load.OutputLen = None,
    range_ratio: load.RangeRatio = None,
    input_dist: load.InputDist = None,
    output_dist: load.OutputDist = None,
    prefix_len: load.PrefixLen = None,
    prefix_groups: load.PrefixGroups = None,
    turns: load.Turns = 1,
    think_time: load.ThinkTime = None,
    num_prompts: load.NumPrompts = None,
    seed: load.Seed = 0,
    model: Annotated[str | None, typer.Option(help="Whose tokenizer counts the tokens of texts.")] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens a block, for the cache hits.")] = 16,
    output_format: Annotated[str, typer.Option("--format", help="table | markdown | csv | json")] = "table",
) -> None:
    """Show what a load is in numbers, with the flags of `kvbench sweep`: lengths, rate, bursts, cache hits.

    The numbers are those of the requests that a sweep with these flags and this seed asks.
    """
    told = load.load_fields(locals())
    from kvbench.cli.config import FORMATS
    from kvbench.cli.load_config import LoadConfig
    from kvbench.reports.workload import render
    from kvbench.workloads.options import choice

    choice(action, ("show",), "kvbench workloads:")
    output_format = choice(output_format, FORMATS, "--format")
    rows, notes = shown(LoadConfig(**told), model, block_size)
    sys.stdout.write(render(rows, output_format))
    sys.stdout.flush()
    for note in notes:
        sys.stderr.write(f"kvbench: {note}\n")


def shown(config: LoadConfig, model: str | None, block_size: int) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for each point of the grid, and what a reader should know of them."""
    from kvbench.cli.asking import CPU_LOADS, fill_contexts, make_asking
    from kvbench.workloads.datasets import RandomTokens
    from kvbench.workloads.facts import facts

    choices: dict[str, str] = {}
    tokenizer, vocabulary = _tokenizer(config.dataset, model)
    asking = make_asking(config, "cpu", tokenizer, vocabulary, frozenset(), choices)
    rows, notes = [], [f"lengths {line}" for line in choices.values()]
    if config.loads is None or choices:
        notes.append("what is left open is as a sweep on a CPU has it")
    for load_point in config.loads or CPU_LOADS:
        for context in dict.fromkeys(one.single for one in fill_contexts(config, "cpu")):
            asking.check(load_point, context, config.seed)
            data, (outlines, times) = asking.datasets[context], asking.outline(load_point, context, config.seed)
            row: dict[str, Any] = {
                "dataset": data.name,
                "concurrency": load_point.concurrency,
                "request_rate": load_point.request_rate,
                "arrivals": None if times is None else config.process.kind,
                "input_tokens": context.input_tokens,
                "output_tokens": context.output_tokens,
                "prefix_tokens": context.prefix_tokens,
                "seed": config.seed,
                "block_size": block_size,
            }
            for way in ("input", "output"):
                drawn = getattr(data, way) if isinstance(data, RandomTokens) else None
                row[f"{way}_dist_mean_tokens"] = None if drawn is None else drawn.average
                row[f"{way}_dist_longest_tokens"] = None if drawn is None else drawn.longest
            rows.append(row | facts(outlines, times, block_size))
    notes += [note for data in asking.datasets.values() if (note := getattr(data, "note", ""))]
    return rows, notes


def _tokenizer(dataset: str, model: str | None) -> tuple[Any, int]:
    """The model's, where it is named; without one only lengths and ids count."""
    if model is None or dataset not in ("support", "jsonl", "sharegpt"):
        return None, VOCABULARY
    from kvbench.engine.weights import find_source, load_config, load_tokenizer

    source = find_source(model.strip())
    return load_tokenizer(source), int(load_config(source).vocab_size)
