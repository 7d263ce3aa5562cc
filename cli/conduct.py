"""Runs a sweep from its configuration to its report: prepare, say what will happen, warm up, measure, conclude."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.cli import until
from kvbench.cli.announce import announce, announce_time
from kvbench.cli.config import SweepConfig
from kvbench.cli.find import announce_search, find_limits
from kvbench.cli.manifest import (
    begin_session,
    dataset_facts,
    end_session,
    kv_facts,
    manifest,
    mark_whole,
    server_facts,
)
from kvbench.cli.resume import Continuation, take_up
from kvbench.cli.stack import SERVER
from kvbench.engine.diagnosis import BUSY, unusable_gpu
from kvbench.engine.environment import cpu_in_use, find_device, versions
from kvbench.errors import KvbenchError
from kvbench.metrics.records import SIMULATED, Run
from kvbench.metrics.store import RunFolder, refuse_used

if TYPE_CHECKING:
    from rich.console import Console

    from kvbench.cli.job import Job
    from kvbench.workloads.grid import Cell

INTERRUPTED = 130


def conduct(
    config: SweepConfig, output: Path | None, output_format: str, *, dry_run: bool, resume: bool, force: bool
) -> int:
    """Run the sweep, or what is missing of it; returns the exit code: 1 where no cell is ok, 130 after Ctrl-C, which
    keeps what was measured."""
    from kvbench.cli.show import show

    if force and not resume:
        raise KvbenchError("--force says what --resume may overlook; add --resume or drop it")
    if resume and config.find:
        raise KvbenchError("a search cannot be resumed: each run decides what is asked next; drop --resume")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` and `docker stop` end like Ctrl-C
    past = take_up(output, force=force, dry_run=dry_run) if resume else None
    if resume and past is None:
        sys.stderr.write(f"kvbench: {output} holds nothing yet; the run begins there\n")
    folder = _measured(config, output, dry_run) if past is None else _continued(past, config, dry_run)
    if folder is None:
        return 0
    show(folder, output_format)
    if folder.manifest["interrupted"]:
        return INTERRUPTED
    return 0 if any(row["status"] == "ok" for row in folder.rows()) else 1


def _measured(config: SweepConfig, output: Path | None, dry_run: bool) -> RunFolder | None:
    """All up to the last cell, in a frame of its own: the model's memory is free again before the report is drawn."""
    say = _console()
    _check_output(output)
    job = _prepared(config, say)
    announce(job, say)
    cold_s, guesses_s = _warmed_up(job, say)
    if config.find:
        announce_search(job, say)
    else:
        announce_time(job, guesses_s, say)
    if dry_run:
        return None
    folder = _create(job, output, cold_s)
    with closing(folder):
        if config.find:
            find_limits(job, folder, cold_s, say)
        else:
            _run_cells(job, folder, cold_s, guesses_s, say)
    return folder


def _continued(past: Continuation, config: SweepConfig, dry_run: bool) -> RunFolder | None:
    """The cells that are left of a run, once it is sure that they would be measured as the others were."""
    from kvbench.cli.progress import clock

    say, folder = _console(), past.folder
    with closing(folder):
        past.check(config=config.facts(), dataset=dataset_facts(config))
        if not past.left:
            say.print(f"kvbench: nothing to do: {folder.path} has all its {past.done} cells", markup=False)
            if dry_run:
                return None
            mark_whole(folder)
            return folder
        say.print(f"{'resume':>14}  {folder.path}: {past.done} cells done, {len(past.left)} to go", markup=False)
        past.check(environment=versions())
        if config.card is None:  # a real device is known before anything is loaded on it
            past.check(device=find_device(config.device).facts())
        job = past.job(_prepared(past.pinned(config), say))
        past.check(
            device=job.machine.device_facts(),
            model=job.machine.model_facts(),
            kv=kv_facts(job),
            server=server_facts(job),
        )
        for difference in past.forced:
            say.print(
                f"kvbench: {difference}; going on because of --force", style="bold red", markup=False, soft_wrap=True
            )
        announce(job, say)
        cold_s, guesses_s = _warmed_up(job, say)
        say.print(f"{'plan':>14}  {len(job.cells)} cells, about {clock(sum(guesses_s.values()))}", markup=False)
        if dry_run:
            return None
        begin_session(job, folder, cold_s, done=past.done, forced=past.forced)
        _run_cells(job, folder, cold_s, guesses_s, say)
    return folder


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def _check_output(output: Path | None) -> None:
    """Refuse a folder that cannot be written before the first second is spent."""
    where = output or Path("runs")
    try:
        if output is not None:
            refuse_used(output)
        near = next(parent for parent in (where.absolute(), *where.absolute().parents) if parent.exists())
    except OSError as error:
        raise KvbenchError(f"cannot write --output {str(where)[:80]}: {error.strerror}; choose another") from error
    if not near.is_dir() or not os.access(near, os.W_OK | os.X_OK):
        raise KvbenchError(f"cannot write {where}: {near} is no writable folder; choose another --output")


def _prepared(config: SweepConfig, say: Console) -> Job:
    if config.card is not None:  # its time does not hang on who else uses this machine
        from kvbench.cli.job import prepare

        return prepare(config)
    others = _mind_others()
    with say.status("loading torch and the model"):
        from kvbench.cli.job import prepare

        lost = unusable_gpu() if config.device is None else None
        if lost:
            say.print(f"kvbench: {lost}; measuring the CPU", style="bold red", markup=False)
        job = prepare(config)
    if present := job.machine.others():
        say.print(f"kvbench: {job.machine.name} is also used by {present}", style="bold red", markup=False)
    if others > BUSY:
        line = f"kvbench: other programs use {others:.0%} of this CPU: times will be longer and vary, ratios too"
        say.print(line, style="bold red", markup=False, soft_wrap=True)
    return job


def _warmed_up(job: Job, say: Console) -> tuple[float | None, dict[str, float]]:
    from kvbench.cli.warm import rehearse, warm_up

    if job.machine.evidence == SIMULATED:
        return None, rehearse(job)
    with say.status("warming up"):
        return warm_up(job)


def _mind_others() -> float:
    """The share of the CPU that other programs use. Where it counts, torch's threads shall sleep while they wait for
    each other: spinning beside somebody else's work is several times slower, and on an idle machine faster. torch reads
    this when it is loaded."""
    others = cpu_in_use()
    if others > BUSY:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    return others


def _create(job: Job, output: Path | None, cold_s: float | None) -> RunFolder:
    if output is None:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        name = Path("runs", f"{stamp}-{job.machine.model_name.replace('/', '--')}")
        output = next(path for path in map(Path, _spellings(str(name))) if not path.exists())
    return RunFolder.create(output, manifest(job, cold_s))


def _spellings(name: str) -> Iterator[str]:
    """`name`, then `name-2`, `name-3` …: two sweeps may start in the same second."""
    yield name
    yield from (f"{name}-{number}" for number in itertools.count(2))


def _run_cells(job: Job, folder: RunFolder, cold_s: float | None, guesses_s: dict[str, float], say: Console) -> None:
    """Measure every cell of the job into the folder, until Ctrl-C at most."""
    from kvbench.cli.measure import measure
    from kvbench.cli.progress import Progress

    progress = Progress(say, job.cells, guesses_s, done=len(folder.manifest["cells"]) - len(job.cells))
    once = {"model_load_s": job.machine.load_s, "cold_first_token_s": cold_s}
    interrupted, share = False, job.config.until_ci
    began_s, whole = time.monotonic(), len(job.cells) == len(folder.manifest["cells"])
    try:
        for place, cell in enumerate(job.cells):
            first = place > 0 and job.cells[place - 1].repeat < cell.repeat
            if share is not None and _precise(folder, cell, share):
                say.print(f"every interval is within ± {share:.4g}: stopped after {cell.repeat} repeats")
                break
            if first and whole and job.enough(cell, time.monotonic() - began_s):
                say.print(f"no time for more than {cell.repeat} repeats; --repeats sets your own")
                folder.update_manifest(cells=[done.facts() for done in job.cells[:place]])
                break
            progress.start(cell)
            row, run = measure(job, cell, progress.watch)
            known = dict.fromkeys(once) if cell.variant.backend == SERVER else once
            folder.write_cell(cell.id, row | known, run)
            progress.finish(cell, _said(row, run))
    except KeyboardInterrupt:
        interrupted = True
        folder.catch_up()
    finally:
        progress.stop()
        if share is not None:
            folder.update_manifest(until_ci=until.outcome(folder, share))
        end_session(job, folder, interrupted=interrupted)
    if interrupted:
        say.print(f"kvbench: the same command with --resume --output {folder.path} measures the rest", markup=False)


def _precise(folder: RunFolder, cell: Cell, share: float) -> bool:
    """Whether `--until-ci` ends the run before `cell`: it would begin a repeat that is not needed. The plan ends there
    then."""
    stored, planned = folder.stored(), folder.manifest["cells"]
    if any(known["repeat"] == cell.repeat and known["id"] in stored for known in planned):
        return False
    if not until.enough(folder, cell.repeat, share):
        return False
    folder.update_manifest(cells=[known for known in planned if known["repeat"] < cell.repeat])
    return True


def _said(row: dict[str, Any], run: Run | None) -> str:
    if row["status"] != "ok":
        return f"{row['status']}: {row['reason']}"
    if (speed := row["output_tokens_per_s"]) is None:
        return "ok"
    slowed = f", slowed down: {row['throttle_reasons']}" if row.get("throttled") else ""
    together = f", {row['peak_running']} at once" if row["peak_running"] is not None else ""
    computed = f", {run.end_s:.1f} s simulated" if run and row["evidence"] == SIMULATED else ""
    return f"{speed:.0f} out tok/s{together}{computed}{slowed}"
