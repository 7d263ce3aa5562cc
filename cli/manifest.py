"""What `run.json` says of a run: what was asked, what was found, on which machine, in which sessions it was made."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from hashlib import file_digest
from typing import TYPE_CHECKING, Any

from kvbench import __version__
from kvbench.cli.config import SweepConfig
from kvbench.cli.load_config import parse_groups
from kvbench.engine.environment import versions
from kvbench.engine.footprint import peak_memory_bytes
from kvbench.errors import KvbenchError
from kvbench.metrics.records import SIMULATED
from kvbench.metrics.store import RunFolder
from kvbench.workloads.datasets import Dataset, RandomTokens
from kvbench.workloads.lengths import Lengths
from kvbench.workloads.sharegpt import ShareGpt
from kvbench.workloads.traces import TRACES, Trace, trace_file

if TYPE_CHECKING:
    from kvbench.cli.job import Job


def manifest(job: Job, cold_s: float | None) -> dict[str, Any]:
    """A new run's, before its first cell."""
    config, environment = job.config, versions()
    session = _session(job, environment, cold_s, done=0)
    return {
        "kvbench_version": __version__,
        "created": session["created"],
        "finished": None,
        "interrupted": False,
        "command": session["command"],
        "model": job.machine.model_facts(),
        "device": job.machine.device_facts(),
        "environment": environment,
        "config": config.facts(),
        "effective": _effective(job),
        "choices": job.choices,
        "kv": kv_facts(job),
        "server": server_facts(job) or None,
        "dataset": {**dataset_facts(config), "lengths": lengths(job)},
        "price": job.price.facts() if job.price else {"usd_per_hour": None, "source": None},
        "slos": [str(slo) for slo in config.slos],
        "timings": {"model_load_s": job.machine.load_s, "cold_first_token_s": cold_s},
        "sessions": [session],
        "cells": [cell.facts() for cell in job.cells],
    }


def _effective(job: Job) -> dict[str, Any]:
    """What `config` left open, as it was measured: lengths by context, requests by cell of the first repeat."""
    return {
        "repeats": job.repeats,
        "ignore_eos": job.ignore_eos,
        "lengths": [
            {
                **asdict(context),
                "longest_input": data.longest_input,
                "longest_output": data.longest_output,
                "range_ratio": _range_ratio(data),
            }
            for context, data in job.datasets.items()
        ],
        "prompts": {cell.id: job.prompts(cell) for cell in job.cells if cell.repeat == 0},
    }


def _range_ratio(data: Dataset) -> float | None:
    """Of uniform lengths; others are told by their flags."""
    return data.input.range_ratio if isinstance(data, RandomTokens) and isinstance(data.input, Lengths) else None


def server_facts(job: Job) -> dict[str, Any]:
    """The server beside the backends; empty where there is none."""
    return job.stack.endpoint.facts() if job.stack.endpoint else {}


def kv_facts(job: Job) -> dict[str, Any]:
    """The memory that each backend gets, and the host memory of those that swap."""
    cache = job.stack.cache
    if job.stack.machine is None:
        return {"max_model_len": cache.max_model_len}
    per_token = job.machine.kv_bytes_per_token
    return {
        "pool_tokens": cache.pool_tokens,
        "pool_bytes": cache.pool_tokens * per_token,
        "swap_tokens": cache.swap_tokens,
        "swap_bytes": cache.swap_tokens * per_token,
        "block_size": cache.block_size,
        "max_model_len": cache.max_model_len,
        "why": job.choices.get("kv_memory", "asked for"),
    }


def dataset_facts(config: SweepConfig) -> dict[str, Any]:
    """The data set by name and, where it is a file, by content."""
    if config.dataset_path is None:
        return {"name": config.dataset}
    path = trace_file(config.dataset_path) if config.dataset in TRACES else config.dataset_path
    try:
        with path.open("rb") as file:
            return {"name": config.dataset, "sha256": file_digest(file, "sha256").hexdigest()}
    except OSError as error:
        raise KvbenchError(f"cannot read --dataset-path {path}: {error.strerror}") from error


def lengths(job: Job) -> str:
    """The data sets with the lengths that were asked for and that they can draw, in words."""
    parts = []
    for context, data in job.datasets.items():
        asked = f" {context.input_tokens} in / {context.output_tokens} out" if context.input_tokens else ""
        prefix = f" after {context.prefix_tokens} that {_sharers(job.config)} share" if context.prefix_tokens else ""
        parts.append(f"{data.name}{asked}{prefix}, up to {data.longest_input} + {data.longest_output} tokens")
        parts += [data.note] if isinstance(data, Trace | ShareGpt) and data.note else []
    for way, dist in (("in", job.config.input_dist), ("out", job.config.output_dist)):
        parts += [f"{way} {dist}"] if dist else []
    if job.config.turns > 1:
        thought = f", {job.config.think_s:g} s of thought between them" if job.config.think_s else ""
        parts.append(f"conversations of {job.config.turns} turns{thought}")
    counts = sorted({cell.context.samples for cell in job.cells})
    if counts != [1]:
        parts.append(f"{', '.join(map(str, counts))} answers to each prompt")
    return "; ".join(parts)


def _sharers(config: SweepConfig) -> str:
    """Who has the same prefix."""
    groups = parse_groups(config.prefix_groups)
    if groups.count == 1:
        return "all"
    return f"all of one of {groups.count} groups" + (f" (Zipf {groups.alpha:g})" if groups.alpha else "")


def _session(
    job: Job, environment: dict[str, str | None], cold_s: float | None, *, done: int, forced: Sequence[str] = ()
) -> dict[str, Any]:
    """One process's part of a run, from the end of its warm-up. `finished` stays null where it was killed;
    `cells_before` is how many cells had a row when it began."""
    return {
        "created": _now(),
        "finished": None,
        "interrupted": False,
        "kvbench_version": __version__,
        "commit": environment["commit"],
        "command": ["kvbench", *sys.argv[1:]],
        "model_load_s": job.machine.load_s,
        "cold_first_token_s": cold_s,
        "cells_before": done,
        "forced": list(forced),
    }


def begin_session(job: Job, folder: RunFolder, cold_s: float | None, *, done: int, forced: Sequence[str]) -> None:
    """The run goes on: its earlier sessions stay, and `forced` joins what was different in them."""
    known = folder.manifest
    session = _session(job, versions(), cold_s, done=done, forced=forced)
    marks = list(dict.fromkeys([*known.get("forced", []), *forced]))
    folder.update_manifest(
        sessions=[*known.get("sessions", []), session],
        finished=None,
        interrupted=False,
        **({"forced": marks} if marks else {}),
    )


def end_session(job: Job, folder: RunFolder, *, interrupted: bool) -> None:
    """The last cell is stored, or Ctrl-C was pressed. The run's peak of memory is that of its largest session; what it
    takes to compute a card is none of it."""
    *before, session = folder.manifest["sessions"]
    end = {"finished": _now(), "interrupted": interrupted}
    if job.machine.evidence == SIMULATED:
        folder.update_manifest(**end, sessions=[*before, session | end])
        return
    peak_bytes = peak_memory_bytes()
    most_bytes = max(peak_bytes, *(earlier.get("peak_memory_bytes", 0) for earlier in [*before, session]))
    ended = session | end | {"peak_memory_bytes": peak_bytes}
    folder.update_manifest(**end, peak_memory_bytes=most_bytes, sessions=[*before, ended])


def mark_whole(folder: RunFolder) -> None:
    """A run whose last cell was stored just before it was killed or interrupted has ended all the same."""
    if folder.manifest.get("interrupted") or not folder.manifest.get("finished"):
        folder.update_manifest(finished=_now(), interrupted=False)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
