"""`kvbench replay`: a recorded run served once more on its own step times, and whether all comes out the same."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvbench.cli.config import SweepConfig
    from kvbench.cli.stack import Backend, CacheConfig, Stack
    from kvbench.engine.interfaces import Allocator, Clock, Executor
    from kvbench.metrics.records import Run
    from kvbench.metrics.store import RunFolder
    from kvbench.planner.replay import Tape
    from kvbench.reports.tables import Value
    from kvbench.workloads.load import ClosedLoop, OpenLoop

DIFFERENT = 1
SAME = "identical"
WORDS = (0, 1, 5)
"""Columns of words."""


def replay(
    run: Annotated[Path | None, typer.Argument(help="A run made with --save-tokens; default: the latest.")] = None,
    cell: Annotated[list[str] | None, typer.Option(help="Only this cell of it, repeatable.")] = None,
    output_format: Annotated[str, typer.Option("--format", help="table | markdown | csv | json")] = "table",
) -> None:
    """Serve recorded requests again, each step as long as it was: batches, token times and memory must be the same.

    Needs neither the model nor the device. Ends with 1 where anything is different.
    """
    from kvbench.cli.config import FORMATS, SweepConfig
    from kvbench.errors import KvbenchError
    from kvbench.metrics.store import RunFolder, latest
    from kvbench.workloads.options import choice

    output_format = choice(output_format, FORMATS, "--format")
    folder = RunFolder.open(run or latest("runs"))
    if lacks := [name for name in ("config", "kv", "effective") if not isinstance(folder.manifest.get(name), dict)]:
        raise KvbenchError(f"{folder.path / 'run.json'} is malformed: it lacks {lacks[0]}; name another run")
    config = SweepConfig.of(folder.manifest["config"])
    rows = {row["cell"]: row for row in folder.rows() if folder.has_run(row["cell"])}
    if unknown := [name for name in cell or () if name not in rows]:
        raise KvbenchError(f"{folder.path} has no records of cell {unknown[0]!r}; see {folder.path / 'cells'}")
    found = [_verdict(folder, config, rows[name]) for name in cell or rows]
    if not found:
        raise KvbenchError(f"{folder.path} has no cell with records; nothing can be replayed")
    sys.stdout.write(_render(found, output_format))
    sys.stdout.flush()
    bad = sum(one["outcome"] != SAME for one in found)
    sys.stderr.write(
        f"kvbench: {bad} of {len(found)} cells are not as they were recorded\n"
        if bad
        else f"kvbench: {len(found)} cells came out as they were recorded, to the last digit\n"
    )
    raise typer.Exit(DIFFERENT if bad else 0)


def _render(rows: list[dict[str, Value]], fmt: str) -> str:
    from kvbench.reports.plain import as_markdown, as_text
    from kvbench.reports.tables import to_csv

    if fmt == "csv":
        return to_csv(rows)
    if fmt == "json":
        return json.dumps(rows, indent=2, ensure_ascii=False) + "\n"
    lines = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    return as_markdown(lines, WORDS) if fmt == "markdown" else as_text(lines, WORDS)


def _verdict(folder: RunFolder, config: SweepConfig, row: dict[str, Any]) -> dict[str, Value]:
    from kvbench.planner.replay import first_difference

    recorded = folder.run(row["cell"])
    outcome = _hindrance(config, row, recorded)
    if not outcome:
        stack, load = recording(folder, config, row, recorded)
        timeout_s = config.cell_timeout_s or math.inf
        from kvbench.metrics.points import Variant

        outcome = first_difference(recorded, stack.run(Variant.of(row), load, timeout_s=timeout_s)) or SAME
    return {
        "cell": row["cell"],
        "evidence": row.get("evidence"),
        "requests": len({one.request for one in recorded.requests}),
        "steps": len(recorded.steps),
        "preemptions": sum(one.preemptions for one in recorded.requests),
        "outcome": outcome,
    }


def _hindrance(config: SweepConfig, row: dict[str, Any], recorded: Run) -> str:
    """Why the cell cannot be replayed; empty where it can."""
    from kvbench.metrics.records import FINISHED

    if recorded.remote:
        return "not replayed: a server's steps are not known"
    unknown = sum(one.status != FINISHED for one in recorded.requests)
    if row.get("reserve") in ("pow2", "oracle") and unknown:
        return f"not replayed: {row['reserve']} went by the lengths of {unknown} answers that were never whole"
    return ""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A machine of recorded steps."""

    tape: Tape

    def begin(self, backend: Backend, memory: CacheConfig) -> tuple[Allocator, Executor, Clock]:
        return backend.make_allocator(memory), self.tape, self.tape


def recording(
    folder: RunFolder, config: SweepConfig, row: dict[str, Any], run: Run
) -> tuple[Stack, ClosedLoop | OpenLoop]:
    """A cell's engine, memory and load as they were, from its run folder alone, on the steps of `run`."""
    from kvbench.cli.stack import CacheConfig, Stack
    from kvbench.engine.scheduler import Limits
    from kvbench.planner.replay import Tape, recorded_requests
    from kvbench.workloads.load import ClosedLoop, OpenLoop

    kv = folder.manifest["kv"]
    memory = CacheConfig(
        kv["pool_tokens"], kv["block_size"], kv["max_model_len"], swap_tokens=kv.get("swap_tokens") or 0
    )
    limits = Limits(
        kv["max_model_len"],
        config.max_batched_tokens,
        config.max_sequences,
        config.overflow == "truncate",
        config.request_timeout_s,
    )
    requests = recorded_requests(
        run.requests,
        cache_salts=config.cache_salts,
        think_s=config.think_s,
        ends_by_length=folder.manifest["effective"]["ignore_eos"],
    )
    users = row.get("concurrency")
    load = OpenLoop(requests, config.max_concurrency) if users is None else ClosedLoop(requests, users)
    return Stack(Recorded(Tape(run)), memory, limits, save_tokens=True), load
