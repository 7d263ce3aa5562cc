"""The flags that say what is asked, and when: written once, for every command that has them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvbench.cli.load_config import DATASETS, parse_contexts, parse_groups, parse_loads, parse_seconds
from kvbench.workloads.arrivals import TRACE, Arrivals
from kvbench.workloads.options import choice, seconds
from kvbench.workloads.traces import TRACES

Concurrency = Annotated[str | None, typer.Option(help="Closed loop: users, as 1,8,64 or 1-64*2.")]
RequestRate = Annotated[str | None, typer.Option(help="Open loop: requests per second, a list too.")]
ArrivalProcess = Annotated[
    str | None,
    typer.Option(
        "--arrivals",
        help="poisson (default) | gamma | constant | ramp:from=0.2:to=1.8 | step:at=0.5:to=2 | onoff:on=5s:off=5s | "
        "trace, of an open loop.",
    ),
]
Burstiness = Annotated[float | None, typer.Option(help="Shape of gamma arrivals: below 1 is bursty.")]
MaxConcurrency = Annotated[
    int | None, typer.Option(help="Open loop: hold requests back beyond so many in flight; TTFT counts the wait.")
]
Duration = Annotated[str | None, typer.Option(help="Open loop: ask what arrives within this time, as 60s.")]
Dataset = Annotated[
    str,
    typer.Option("--dataset", "--dataset-name", help=" | ".join(DATASETS)),
]
DatasetPath = Annotated[Path | None, typer.Option(help="File of a --dataset that is read.")]
TraceScale = Annotated[float | None, typer.Option(help="Play a trace's times so many times as fast.")]
InputLen = Annotated[
    str | None, typer.Option("--input-len", "--random-input-len", help="Prompt tokens (their mean), a list too.")
]
OutputLen = Annotated[
    str | None, typer.Option("--output-len", "--random-output-len", help="Answer tokens (their mean), a list too.")
]
RangeRatio = Annotated[
    float | None,
    typer.Option("--range-ratio", "--random-range-ratio", help="Lengths vary by ± this share."),
]
InputDist = Annotated[
    str | None,
    typer.Option(
        help="Around --input-len: fixed | uniform:ratio=0.5 | normal:cv=0.3 | lognormal:cv=1 (or :p99=900) | "
        "zipf:alpha=1.2; normal and lognormal take :max= (default: their 99.9th percentile) and :min=."
    ),
]
OutputDist = Annotated[str | None, typer.Option(help="Around --output-len, as --input-dist.")]
PrefixLen = Annotated[
    str | None,
    typer.Option(
        "--prefix-len",
        "--random-prefix-len",
        help="Tokens with which all prompts begin, before --input-len; a list too.",
    ),
]
PrefixGroups = Annotated[
    str | None, typer.Option(help="So many different prefixes, as 8, or 8:alpha=1.2 where some are more popular.")
]
Turns = Annotated[int, typer.Option(help="Turns of a conversation, each a request after the answer really given.")]
ThinkTime = Annotated[str | None, typer.Option(help="From an answer's end to the next turn, as 2s; default none.")]
Samples = Annotated[
    str | None, typer.Option("--n", help="Answers drawn for each prompt, a list too; needs --temperature.")
]
NumPrompts = Annotated[int | None, typer.Option(help="Requests a cell, each turn one.")]
Seed = Annotated[int, typer.Option(help="Seed of the first repeat.")]


def load_fields(told: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `LoadConfig` that the flags of these names say, `told` by name; others in it are left alone."""
    dataset = choice(told["dataset"], DATASETS, "--dataset")
    arrivals = told["arrivals"]
    process = Arrivals.of(arrivals)
    recorded = process.kind == TRACE or (dataset in TRACES and arrivals is None)
    if told["prefix_groups"] is not None:
        parse_groups(told["prefix_groups"])
    think = told["think_time"]
    same = ("burstiness", "max_concurrency", "range_ratio", "input_dist", "output_dist", "prefix_groups", "turns")
    return {
        "loads": parse_loads(told["concurrency"], told["request_rate"], recorded=recorded),
        "contexts": parse_contexts(told["input_len"], told["output_len"], told["prefix_len"], told.get("n")),
        "arrivals": arrivals,
        "duration_s": parse_seconds(told["duration"], "--duration"),
        "think_s": 0.0 if think is None else seconds(think, "--think-time", zero=True),
        "dataset": dataset,
        "dataset_path": told["dataset_path"],
        "trace_scale": told["trace_scale"],
        "prompts": told["num_prompts"],
        "seed": told["seed"],
        **{name: told[name] for name in same},
    }
