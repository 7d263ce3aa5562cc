"""One cell of a sweep: run it, sum it up, and turn whatever stops it into a row with a reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from statistics import median

from kvbench.cli.job import Job
from kvbench.cli.stack import BACKENDS, release_memory
from kvbench.engine.engine import Watch
from kvbench.engine.types import Request
from kvbench.errors import CellError, KvbenchError
from kvbench.metrics.records import FINISHED, REJECTED, Run
from kvbench.metrics.summary import summarise
from kvbench.workloads.grid import Cell, Variant
from kvbench.workloads.load import ClosedLoop

Row = dict[str, object]


def measure(job: Job, cell: Cell, watch: Watch | None = None) -> tuple[Row, Run | None]:
    """The cell's row for `cells.csv` and its records (None where it could not run). Faults of kvbench itself and of its
    libraries end the cell, not the sweep; Ctrl-C and a user error end both."""
    status, reason, run = "ok", "", None
    try:
        run = job.stack.run(Variant(cell.backend, cell.reserve), job.load(cell), watch)
    except CellError as error:
        status, reason = error.status, str(error)
    except KvbenchError:
        raise
    except Exception as error:
        status, reason = "failed", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    release_memory(job.stack.model)
    numbers: Row = {}
    if run is not None:
        config = job.config
        numbers = dict(summarise(run, slos=config.slos, price_usd_per_hour=config.price_usd_per_hour))
        status, reason = _verdict(run)
    return _leading(job, cell, status, reason) | numbers, run


def _verdict(run: Run) -> tuple[str, str]:
    """`ok` where any request finished; else what most of them met."""
    if any(request.status == FINISHED for request in run.requests):
        return "ok", ""
    (reason, count), *_ = Counter(request.reason for request in run.requests).most_common(1)
    rejected = all(request.status == REJECTED for request in run.requests)
    return "rejected" if rejected else "failed", f"no request finished; {count} of {len(run.requests)}: {reason}"


def _leading(job: Job, cell: Cell, status: str, reason: str) -> Row:
    cache = job.stack.cache
    return {
        "cell": cell.id,
        "backend": cell.backend,
        "evidence": "measured",
        "device": job.device.name,
        "model": job.source.name,
        "dtype": str(job.stack.model.dtype).removeprefix("torch."),
        "reserve": cell.reserve,
        "block_size": cache.block_size if cell.reserve is None else None,
        "max_model_len": cache.max_model_len,
        "attention": "torch",
        "tp": 1,
        "concurrency": cell.concurrency,
        "request_rate": cell.request_rate,
        "input_tokens": cell.input_tokens,
        "output_tokens": cell.output_tokens,
        "repeat": cell.repeat,
        "seed": cell.seed,
        "window": None,
        "status": status,
        "reason": reason,
        "order": cell.order,
        "prefix_caching": cache.prefix_caching and BACKENDS[cell.backend].shares,
        "prefix_tokens": job.config.prefix_tokens,
    }


def warm_up(job: Job) -> tuple[float | None, dict[str, float]]:
    """Serve a few requests through every variant, so that no cell pays for what happens once.

    Returns the first token's time of the very first request after loading (None where it did not finish) and a guess of
    every cell's duration in seconds, from the median step of the warm-up.
    """
    cold_s, guesses_s = None, {}
    step_s: dict[Variant, float] = {}
    for cell in job.cells:
        variant = Variant(cell.backend, cell.reserve)
        if variant not in step_s:
            requests = [replace(request, scheduled_s=0.0) for request in job.requests(cell)]
            if not step_s:
                first = _try(job, variant, requests[:1])
                if first is not None and first.requests[0].status == FINISHED:
                    cold_s = first.requests[0].first_s
            run = _try(job, variant, requests[: job.config.warmups])
            step_s[variant] = median(step.end_s - step.start_s for step in run.steps) if run and run.steps else 0.0
        guesses_s[cell.id] = _guess(job, cell, step_s[variant])
    return cold_s, guesses_s


def _try(job: Job, variant: Variant, requests: list[Request]) -> Run | None:
    """A run to be forgotten; one that cannot run will say so as a cell."""
    if not requests:
        return None
    try:
        return job.stack.run(variant, ClosedLoop(requests, len(requests)))
    except KvbenchError:
        raise
    except Exception:
        return None
    finally:
        release_memory(job.stack.model)


def _guess(job: Job, cell: Cell, step_s: float) -> float:
    """Steps of decode at the cell's concurrency times the warm-up's step, and an open loop's own span at least."""
    requests = job.requests(cell)
    tokens = sum(request.output_tokens or request.max_tokens for request in requests)
    together = min(cell.concurrency or job.config.max_sequences, job.config.max_sequences)
    return max(requests[-1].scheduled_s, tokens / together * step_s)
