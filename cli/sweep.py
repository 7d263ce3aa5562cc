"""`kvbench sweep`: the main job. Backends x load x context length, repeated and interleaved, into a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli import config as flags
from kvbench.cli import load_flags as load
from kvbench.cli import parse
from kvbench.cli.load_config import parse_seconds
from kvbench.engine.attention.paths import AUTO, PATHS
from kvbench.workloads.options import choice


def sweep(
    backend: Annotated[str, typer.Option(help="Backends to compare.")] = "contiguous,paged",
    model: Annotated[
        str | None,
        typer.Option(help="Built-in shape, folder, config.json, .gguf or hub name."),
    ] = None,
    weights: Annotated[str, typer.Option(help="auto | random")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="auto | float32 | bfloat16 | float16")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu | cuda | cuda:N | sim:CARD, a card one need not have.")
    ] = None,
    tp: Annotated[
        int, typer.Option("--tp", "--tensor-parallel-size", help="Cards that share the model; simulated ones only.")
    ] = 1,
    gpu_file: Annotated[
        Path | None,
        typer.Option(help="Your own cards for sim:CARD: TOML or CSV, with the fields of planner/gpus.toml."),
    ] = None,
    kv_memory: Annotated[str | None, typer.Option(help="KV budget, the same for each backend, as 4GiB.")] = None,
    kv_dtype: Annotated[
        str, typer.Option(help="Of the KV cache: auto (as --dtype) | fp8, of simulated cards.")
    ] = "auto",
    attention: Annotated[
        str,
        typer.Option(help="How: auto (the fastest) | torch | cpp (CPUs) | triton (GPUs) | varlen (GPUs, contiguous)."),
    ] = "auto",
    gpu_memory_utilization: Annotated[
        float,
        typer.Option(
            help="Share of a GPU's free memory for the KV cache; of a simulated card's for all that it holds."
        ),
    ] = 0.9,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Longest prompt + answer; default: the grid's longest."),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens a block (paged).")] = 16,
    prefix_caching: Annotated[
        str | None,
        typer.Option(help="Paged: off (default) | on, a list too: store equal beginnings once, in full blocks."),
    ] = None,
    enable_prefix_caching: Annotated[
        bool | None,
        typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="The same as --prefix-caching on."),
    ] = None,
    cache_salt: Annotated[
        str | None, typer.Option(help="Share only within a salt; requests take a list's in turns.")
    ] = None,
    reserve: Annotated[
        str | None, typer.Option(help="Contiguous: max (default) | declared | pow2 | oracle, a list too.")
    ] = None,
    preemption: Annotated[
        str | None,
        typer.Option(help="Paged, out of memory: recompute (default) | swap to host memory, a list too."),
    ] = None,
    swap_space: Annotated[
        str | None, typer.Option(help="Host memory for --preemption swap; default 4GiB, or less on a small machine.")
    ] = None,
    overflow: Annotated[str, typer.Option(help="reject | truncate what exceeds --max-model-len.")] = "reject",
    batching: Annotated[str | None, typer.Option(help="Contiguous: continuous (default) | static, a list too.")] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Token budget of a step.")] = 2048,
    max_num_seqs: Annotated[int, typer.Option(help="Most sequences running at once.")] = 256,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Declared to the engine; default: the longest answer drawn."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that reach this together.")] = 1.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: less of what prompt and answer have.")] = 1.0,
    ignore_eos: Annotated[
        bool | None,
        typer.Option(help="Answers have their drawn length (default but for jsonl)."),
    ] = None,
    request_timeout: Annotated[
        str | None, typer.Option(help="Abort a request this long after it was scheduled, as 30s.")
    ] = None,
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
    n: load.Samples = None,
    num_prompts: load.NumPrompts = None,
    cell_timeout: Annotated[
        str | None, typer.Option(help="End a cell after this long, as 10m; its row says so.")
    ] = None,
    num_warmups: Annotated[int, typer.Option(help="Requests before the first cell.")] = 4,
    repeats: Annotated[
        int | None, typer.Option(help="Independent repeats of every point; default: 2 to 6, as time allows.")
    ] = None,
    until_ci: Annotated[
        str | None,
        typer.Option(help="Repeat until every interval of out tok/s is within ± this, as 5%; --repeats is the most."),
    ] = None,
    find_max_rate: Annotated[
        bool, typer.Option("--find-max-rate", help="Search for the largest rate that meets the SLOs.")
    ] = False,
    find_max_concurrency: Annotated[
        bool, typer.Option("--find-max-concurrency", help="The same for the number of users.")
    ] = False,
    seed: load.Seed = 0,
    slo: Annotated[list[str] | None, typer.Option(help="METRIC[:PERCENTILE]:VALUE, repeatable.")] = None,
    goodput: Annotated[str | None, typer.Option(help="Alias: ttft:1500,tpot:50 (each request).")] = None,
    target: Annotated[
        str | None,
        typer.Option(help="http://host:port of an OpenAI-compatible server to measure too; alone: --backend server."),
    ] = None,
    endpoint_type: Annotated[str, typer.Option(help="Of --target: completions | chat.")] = "completions",
    served_model_name: Annotated[
        str | None, typer.Option(help="The name --target serves --model under; default: the only one it lists.")
    ] = None,
    price: Annotated[float | None, typer.Option(help="US dollars per device-hour.")] = None,
    metadata: Annotated[list[str] | None, typer.Option(help="key=value, kept.")] = None,
    save_tokens: Annotated[bool, typer.Option("--save-tokens", help="Keep every token id.")] = False,
    output: Annotated[Path | None, typer.Option(help="Run folder; default runs/<time>-<model>.")] = None,
    output_format: Annotated[str, typer.Option("--format", help="table | markdown | csv | json")] = "table",
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Measure only what the run of --output (default: the latest unfinished) lacks."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Resume although flags, device or version changed; marked.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run and how long, then stop.")] = False,
) -> None:
    """Measure both KV-cache layouts over a grid of load and context length.

    Without flags it picks a model, a grid and a budget for this machine, and says why.
    """
    asked = load.load_fields(locals())
    from kvbench.cli.conduct import conduct
    from kvbench.cli.stack import BACKENDS, SERVER

    told = {
        "reserve": reserve,
        "batching": batching,
        "prefix_caching": parse.parse_caching(prefix_caching, enable_prefix_caching),
        "preemption": preemption,
    }
    policies = {name: known.policies for name, known in BACKENDS.items()}
    policies |= {} if target is None else {SERVER: {}}
    begin = None if arrivals is None and not (concurrency or request_rate) else asked["loads"]
    find, loads = parse.parse_search(begin, rate=find_max_rate, concurrency=find_max_concurrency)
    config = flags.SweepConfig(
        variants=parse.parse_variants(parse.with_server(backend, target, SERVER), told, policies),
        **asked | ({} if find is None else {"loads": loads}),
        find=find,
        model=model,
        weights=choice(weights, ("auto", "random"), "--weights"),
        dtype=parse.parse_dtype(dtype),
        device=parse.parse_device(device),
        tp=tp,
        gpu_file=gpu_file,
        kv_dtype=choice(kv_dtype, flags.KV_DTYPES, "--kv-dtype"),
        attention=choice(attention, (AUTO, *PATHS), "--attention"),
        kv_bytes=None if kv_memory is None else parse.parse_bytes(kv_memory, "--kv-memory"),
        gpu_memory_utilization=gpu_memory_utilization,
        max_model_len=max_model_len,
        block_size=block_size,
        swap_bytes=None if swap_space is None else parse.parse_bytes(swap_space, "--swap-space"),
        cache_salts=parse.parse_salts(cache_salt),
        max_batched_tokens=max_num_batched_tokens,
        max_sequences=max_num_seqs,
        max_tokens=max_tokens,
        overflow=choice(overflow, ("reject", "truncate"), "--overflow"),
        warmups=num_warmups,
        repeats=repeats,
        until_ci=parse.parse_share(until_ci, "--until-ci"),
        slos=parse.parse_objectives(slo or [], goodput),
        temperature=temperature,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        ignore_eos=ignore_eos,
        request_timeout_s=parse_seconds(request_timeout, "--request-timeout"),
        cell_timeout_s=parse_seconds(cell_timeout, "--cell-timeout"),
        price_usd_per_hour=price,
        save_tokens=save_tokens,
        metadata=parse.parse_metadata(metadata or []),
        target=target,
        endpoint_type=endpoint_type.strip().lower(),
        served_model=served_model_name,
    )
    output_format = choice(output_format, flags.FORMATS, "--format")
    raise typer.Exit(conduct(config, output, output_format, dry_run=dry_run, resume=resume, force=force))
