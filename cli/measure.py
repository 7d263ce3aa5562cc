"""One cell of a sweep: run it, sum it up, and turn whatever stops it into a row with a reason."""

from __future__ import annotations

import math
import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict

from kvbench.cli.job import Job
from kvbench.cli.stack import SERVER
from kvbench.engine.engine import Watch
from kvbench.errors import CellError, KvbenchError
from kvbench.metrics.points import Variant
from kvbench.metrics.rate import rates
from kvbench.metrics.records import FINISHED, MEASURED, REJECTED, UNFINISHED, Run
from kvbench.metrics.summary import TWIN, summarise
from kvbench.workloads.grid import Cell

Row = dict[str, object]


def measure(job: Job, cell: Cell, watch: Watch | None = None) -> tuple[Row, Run | None]:
    """The cell's row for `cells.csv` and its records (None where it could not run). Faults of kvbench itself and of its
    libraries end the cell, not the sweep; Ctrl-C and a user error end both."""
    status, reason, run = "ok", "", None
    numbers: Row = {}
    load, timeout_s = job.load(cell), job.config.cell_timeout_s or math.inf
    local = cell.variant.backend != SERVER
    footprint, telemetry = (job.machine.footprint(), job.machine.telemetry()) if local else (None, None)
    try:
        with telemetry or nullcontext():
            run = job.stack.run(cell.variant, load, watch, timeout_s=timeout_s)
        price = job.price.usd_per_hour if job.price and local else None  # it is that of this device
        cards = job.machine.tp if local else 1
        numbers = dict(summarise(run, load=cell.load, slos=job.config.slos, price_usd_per_hour=price, cards=cards))
        numbers |= job.machine.caveats(run, numbers) if local else {}
        status, reason = _verdict(run, load.remaining, timeout_s)
    except CellError as error:
        status, reason = error.status, str(error)
    except KvbenchError:
        raise
    except Exception as error:
        status, reason, run = "failed", f"{type(error).__name__}: {' '.join(str(error).split())}"[:500], None
    job.machine.release()
    if cell.load.concurrency is not None and numbers:  # a closed loop asks for no rate
        numbers |= {name: None for name in numbers if name.removeprefix(TWIN) in rates([])}
    if job.config.turns > 1:
        numbers["turns_not_asked"] = load.unasked
    memory: Row = _memory_bytes(job, cell.variant) if local else {}
    memory |= {} if footprint is None else footprint.read()  # what is held now is held without the cell
    if telemetry is not None:
        memory |= telemetry.read(numbers.get("output_tokens_total"))
    return _leading(job, cell, status, reason) | numbers | memory, run


def _memory_bytes(job: Job, variant: Variant) -> Row:
    """Keys and values of all rows on the device, the same for each backend, and of those in the host's memory."""
    memory, per_token = job.stack.cache_of(variant), job.machine.kv_bytes_per_token
    return {
        "kv_arena_bytes": memory.arena_rows * per_token,
        "swap_space_bytes": memory.swap_tokens * per_token,
    }


def _verdict(run: Run, unasked: int, timeout_s: float) -> tuple[str, str]:
    """`timeout` where the cell was ended; `ok` where any request finished; else what most of them met, reasons that
    differ in their numbers being one."""
    unfinished = sum(request.status == UNFINISHED for request in run.requests)
    if unfinished or unasked:
        return "timeout", f"ended by --cell-timeout {timeout_s:g}s: {unfinished} unfinished, {unasked} never asked"
    if any(request.status == FINISHED for request in run.requests):
        return "ok", ""
    kinds = Counter(re.sub(r"\d+", "#", request.reason) for request in run.requests)
    (kind, count), *_ = kinds.most_common(1)
    reason = next(request.reason for request in run.requests if re.sub(r"\d+", "#", request.reason) == kind)
    rejected = all(request.status == REJECTED for request in run.requests)
    return "rejected" if rejected else "failed", f"no request finished; {count} of {len(run.requests)} like: {reason}"


def _leading(job: Job, cell: Cell, status: str, reason: str) -> Row:
    return {
        "cell": cell.id,
        "backend": cell.variant.backend,
        **(_server(job) if cell.variant.backend == SERVER else _engine(job, cell)),
        **asdict(cell.load),
        "input_tokens": cell.context.input_tokens,
        "output_tokens": cell.context.output_tokens,
        "repeat": cell.repeat,
        "seed": cell.seed,
        "window": None,
        "status": status,
        "reason": reason,
        "order": cell.order,
        **asdict(cell.variant),
        **asdict(cell.context),
    }


def _engine(job: Job, cell: Cell) -> Row:
    cache, machine = job.stack.cache, job.machine
    return {
        "evidence": machine.evidence,
        "device": machine.name,
        "model": machine.model_name,
        "dtype": machine.dtype,
        "reserve": cell.variant.reserve,
        "block_size": cache.block_size if cell.variant.reserve is None else None,
        "max_model_len": cache.max_model_len,
        "attention": machine.attention,
        "tp": machine.tp,
    }


def _server(job: Job) -> Row:
    """How it runs the model is the server's own affair."""
    unknown = ("dtype", "reserve", "block_size", "max_model_len", "attention", "tp")
    assert job.stack.endpoint is not None
    return {"evidence": MEASURED, "device": None, "model": job.stack.endpoint.model, **dict.fromkeys(unknown)}
