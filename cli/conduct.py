"""Runs a sweep from its configuration to its report: prepare, say what will happen, warm up, measure, conclude."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator
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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` and `docker stop` end like Ctrl-C
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
    _announce_time(job, guesses_s, say)
    if dry_run:
        return None
    folder = _create(job, output, cold_s)
    _run_cells(job, folder, cold_s, guesses_s, say)
    return folder


def _check_output(output: Path | None) -> None:
    """Refuse a folder that cannot be written before the first second is spent."""
    where = output or Path("runs")
    try:
        near = next(parent for parent in (where.absolute(), *where.absolute().parents) if parent.exists())
    except OSError as error:
        raise KvbenchError(f"cannot write --output {str(where)[:80]}: {error.strerror}; choose another") from error
    if output is not None and near == output.absolute() and (not output.is_dir() or any(output.iterdir())):
        raise KvbenchError(f"--output {output} exists and is not an empty folder; choose another")
    if not near.is_dir() or not os.access(near, os.W_OK | os.X_OK):
        raise KvbenchError(f"cannot write {where}: {near} is no writable folder; choose another --output")


def _prepared(config: SweepConfig, say: Console) -> Job:
    # Threads that spin at every barrier slow a machine with anything else to do tenfold; torch reads this when loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
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
        "device": f"{job.device.name}, {_cores(job)}",
        "model": f"{job.source.name}, {real}, loaded in {job.model_load_s:.1f} s",
        "dtype": f"{dtype}, {per_token:,} bytes of KV a token",
        "kv_memory": f"{pool:,.0f} MiB = {cache.pool_tokens:,} tokens, the same for each backend",
        "max_model_len": f"{cache.max_model_len} tokens",
        "concurrency": _loads(job),
        "lengths": _lengths(job),
    }
    for name, line in lines.items():
        reason = f"  ({job.choices[name]})" if name in job.choices else ""
        say.print(f"{name.replace('_', ' '):>14}  {line}{reason}", markup=False, soft_wrap=True)


def _cores(job: Job) -> str:
    if job.device.kind != "cpu":
        return f"{job.device.cores} SMs"
    threads = f", {job.device.threads} threads" if job.device.threads != job.device.cores else ""
    return f"{job.device.cores} core{'s' * (job.device.cores > 1)}{threads}"


def _random_weights(job: Job) -> bool:
    return job.config.weights == "random" or job.source.folder is None


def _loads(job: Job) -> str:
    users = dict.fromkeys(cell.concurrency for cell in job.cells if cell.concurrency is not None)
    rates = dict.fromkeys(cell.request_rate for cell in job.cells if cell.request_rate is not None)
    if rates:
        return f"{', '.join(f'{rate:g}' for rate in rates)} requests/s, {job.config.arrivals or 'poisson'}"
    return f"{', '.join(map(str, users))} user{'s' * (list(users) != [1])} at once"


def _lengths(job: Job) -> str:
    parts = []
    for context, data in job.datasets.items():
        asked = f" {context.input_tokens} in / {context.output_tokens} out" if context.input_tokens else ""
        parts.append(f"{data.name}{asked}, up to {data.longest_input} + {data.longest_output} tokens")
    return "; ".join(parts)


def _announce_time(job: Job, guesses_s: dict[str, float], say: Console) -> None:
    from kvbench.cli.progress import clock

    variants = len(dict.fromkeys(cell.variant for cell in job.cells))
    points = len(job.cells) // variants // job.repeats
    counts = {"backend": variants, "point": points, "repeat": job.repeats}
    grid = " x ".join(f"{count} {noun}{'s' * (count > 1)}" for noun, count in counts.items())
    fewer = "" if job.config.repeats else "  (fewer repeats, but two, where time runs short; --repeats sets your own)"
    took = clock(sum(guesses_s[cell.id] for cell in job.cells))
    line = f"{'plan':>14}  {len(job.cells)} cell{'s' * (len(job.cells) > 1)} = {grid}, about {took}{fewer}"
    say.print(line, markup=False, soft_wrap=True)


def _create(job: Job, output: Path | None, cold_s: float | None) -> RunFolder:
    from kvbench.metrics.store import RunFolder

    if output is None:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        name = Path("runs", f"{stamp}-{job.source.name.replace('/', '--')}")
        output = next(path for path in map(Path, _spellings(str(name))) if not path.exists())
    return RunFolder.create(output, _manifest(job, cold_s))


def _spellings(name: str) -> Iterator[str]:
    """`name`, then `name-2`, `name-3` …: two sweeps may start in the same second."""
    yield name
    yield from (f"{name}-{number}" for number in itertools.count(2))


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
    began_s, done = time.monotonic(), job.cells
    try:
        for place, cell in enumerate(job.cells):
            first = place == 0 or job.cells[place - 1].repeat < cell.repeat
            if first and job.enough(cell, time.monotonic() - began_s):
                done = job.cells[:place]
                say.print(f"no time for more than {cell.repeat} repeats; --repeats sets your own")
                break
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
            cells=[asdict(cell) for cell in done],
            peak_memory_bytes=peak_memory_bytes(),
        )


def _said(row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return f"{row['status']}: {row['reason']}"
    if (speed := row["output_tokens_per_s"]) is None:
        return "ok"
    return f"{speed:.0f} out tok/s, {row['peak_running']} at once"
