"""Runs a sweep from its configuration to its report: prepare, say what will happen, warm up, measure, conclude."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench import __version__
from kvbench.cli.config import SweepConfig
from kvbench.errors import KvbenchError

if TYPE_CHECKING:
    from rich.console import Console

    from kvbench.cli.job import Job
    from kvbench.metrics.store import RunFolder

INTERRUPTED = 130


def conduct(config: SweepConfig, output: Path | None, output_format: str, dry_run: bool) -> int:
    """Run the sweep; returns the exit code: 1 where no cell is ok, 130 after Ctrl-C, which keeps what was measured."""
    from kvbench.cli.show import show

    _check_output(output)
    folder = _measured(config, output, dry_run)
    if folder is None:
        return 0
    show(folder, output_format)
    if folder.manifest["interrupted"]:
        return INTERRUPTED
    return 0 if any(row["status"] == "ok" for row in folder.rows()) else 1


def _measured(config: SweepConfig, output: Path | None, dry_run: bool) -> RunFolder | None:
    """All up to the last cell, in a frame of its own: the model's memory is free again before the report is drawn."""
    from rich.console import Console

    say = Console(stderr=True, highlight=False)
    job = _prepared(config, say)
    from kvbench.cli.measure import warm_up

    _announce(job, say)
    with say.status("warming up"):
        cold_s, guesses_s = warm_up(job)
    job = job.within_patience(guesses_s)
    _announce_time(job, guesses_s, say)
    if dry_run:
        return None
    folder = _create(job, output, cold_s)
    _run_cells(job, folder, cold_s, guesses_s, say)
    return folder


def _check_output(output: Path | None) -> None:
    """Refuse a folder that cannot be written before the first second is spent."""
    where = output or Path("runs")
    if output is not None and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise KvbenchError(f"--output {output} exists and is not an empty folder; choose another")
    near = next(parent for parent in (where.absolute(), *where.absolute().parents) if parent.exists())
    if not near.is_dir() or not os.access(near, os.W_OK | os.X_OK):
        raise KvbenchError(f"cannot write {where}: {near} is no writable folder; choose another --output")


def _prepared(config: SweepConfig, say: Console) -> Job:
    with say.status("loading torch and the model"):
        from kvbench.cli.job import prepare
        from kvbench.engine.environment import unusable_gpu

        lost = unusable_gpu() if config.device is None else None
        if lost:
            say.print(f"kvbench: {lost}; measuring the CPU", style="bold red", markup=False)
        return prepare(config)


def _announce(job: Job, say: Console) -> None:
    """What will run, and why what was left open was chosen so."""
    model, cache = job.stack.model, job.stack.cache
    per_token = model.kv.bytes_per_token(model.dtype.itemsize)
    pool = cache.pool_tokens * per_token / 2**20
    real = "random weights" if _random_weights(job) else "real weights"
    dtype = str(model.dtype).removeprefix("torch.")
    lines = {
        "device": f"{job.device.name}, {job.device.cores} {'cores' if job.device.kind == 'cpu' else 'SMs'}",
        "model": f"{job.source.name}, {real}, loaded in {job.model_load_s:.1f} s",
        "dtype": f"{dtype}, {per_token:,} bytes of KV a token",
        "kv_memory": f"{pool:,.0f} MiB = {cache.pool_tokens:,} tokens, the same for each backend"
        + (", paged with a prefix cache" if cache.prefix_caching else ""),
        "max_model_len": f"{cache.max_model_len} tokens",
        "concurrency": _loads(job),
        "lengths": _lengths(job),
    }
    for name, line in lines.items():
        reason = f"  ({job.choices[name]})" if name in job.choices else ""
        say.print(f"{name.replace('_', ' '):>14}  {line}{reason}", markup=False, soft_wrap=True)


def _random_weights(job: Job) -> bool:
    return job.config.weights == "random" or job.source.folder is None


def _loads(job: Job) -> str:
    users = dict.fromkeys(cell.concurrency for cell in job.cells if cell.concurrency is not None)
    rates = dict.fromkeys(cell.request_rate for cell in job.cells if cell.request_rate is not None)
    if rates:
        return f"{', '.join(f'{rate:g}' for rate in rates)} requests/s, {job.config.arrivals}"
    return f"{', '.join(map(str, users))} users at once"


def _lengths(job: Job) -> str:
    parts = []
    for context, data in job.datasets.items():
        asked = f" {context.input_tokens} in / {context.output_tokens} out" if context.input_tokens else ""
        prefix = f" after {job.config.prefix_tokens} that all share" if job.config.prefix_tokens else ""
        parts.append(f"{data.name}{asked}{prefix}, up to {data.longest_input} + {data.longest_output} tokens")
    return "; ".join(parts)


def _announce_time(job: Job, guesses_s: dict[str, float], say: Console) -> None:
    from kvbench.cli.progress import clock

    variants = len(dict.fromkeys((cell.backend, cell.reserve) for cell in job.cells))
    points = len(job.cells) // variants // job.repeats
    reason = f"  ({job.choices['repeats']})" if "repeats" in job.choices else ""
    say.print(
        f"{'plan':>14}  {len(job.cells)} cells = {variants} backend{'s' * (variants > 1)} x {points} "
        f"point{'s' * (points > 1)} x {job.repeats} repeat{'s' * (job.repeats > 1)}, "
        f"about {clock(sum(guesses_s[cell.id] for cell in job.cells))}{reason}",
        markup=False,
        soft_wrap=True,
    )


def _create(job: Job, output: Path | None, cold_s: float | None) -> RunFolder:
    from kvbench.metrics.store import RunFolder

    if output is None:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        output = Path("runs", f"{stamp}-{job.source.name}")
    return RunFolder.create(output, _manifest(job, cold_s))


def _manifest(job: Job, cold_s: float | None) -> dict[str, Any]:
    from kvbench.engine.environment import versions

    model, cache, config = job.stack.model, job.stack.cache, job.config
    per_token = model.kv.bytes_per_token(model.dtype.itemsize)
    return {
        "kvbench_version": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["kvbench", *sys.argv[1:]],
        "model": {
            "name": job.source.name,
            "family": model.config.model_type,
            "parameters": sum(weight.numel() for weight in model.module.parameters()),
            "weights": "random" if _random_weights(job) else "real",
            "weights_bytes": model.nbytes,
            "dtype": str(model.dtype).removeprefix("torch."),
            "kv_bytes_per_token": per_token,
        },
        "device": job.device.facts(),
        "environment": versions(),
        "config": config.facts(),
        "choices": job.choices,
        "kv": {
            "pool_tokens": cache.pool_tokens,
            "pool_bytes": cache.pool_tokens * per_token,
            "block_size": cache.block_size,
            "max_model_len": cache.max_model_len,
            "why": job.choices.get("kv_memory", "asked for"),
        },
        "dataset": {"name": config.dataset, "lengths": _lengths(job)},
        "price": {
            "usd_per_hour": config.price_usd_per_hour,
            "source": "--price" if config.price_usd_per_hour else None,
        },
        "slos": [str(slo) for slo in config.slos],
        "timings": {"model_load_s": job.model_load_s, "cold_first_token_s": cold_s},
        "cells": [asdict(cell) for cell in job.cells],
    }


def _run_cells(job: Job, folder: RunFolder, cold_s: float | None, guesses_s: dict[str, float], say: Console) -> None:
    """Measure every cell into the folder, until Ctrl-C at most."""
    from kvbench.cli.measure import measure
    from kvbench.cli.progress import Progress
    from kvbench.engine.environment import peak_memory_bytes

    progress = Progress(say, job.cells, guesses_s)
    once = {"model_load_s": job.model_load_s, "cold_first_token_s": cold_s}
    interrupted = False
    try:
        for cell in job.cells:
            progress.start(cell)
            row, run = measure(job, cell, progress.watch)
            folder.write_cell(cell.id, row | once, run)
            progress.finish(cell, _said(row))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        progress.stop()
    folder.update_manifest(
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        interrupted=interrupted,
        peak_memory_bytes=peak_memory_bytes(),
    )


def _said(row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return f"{row['status']}: {row['reason']}"
    return f"{row['output_tokens_per_s']:.0f} out tok/s, {row['peak_running']} at once"
