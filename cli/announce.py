"""What a sweep says before it starts: what it will run, why that was chosen, and how long it will take."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvbench.cli.manifest import lengths
from kvbench.cli.progress import clock
from kvbench.cli.server import described
from kvbench.metrics.precision import FEWEST_REPEATS
from kvbench.metrics.records import SIMULATED
from kvbench.workloads.arrivals import TRACE
from kvbench.workloads.client import PATIENCE_S

if TYPE_CHECKING:
    from rich.console import Console

    from kvbench.cli.job import Job


def announce(job: Job, say: Console) -> None:
    """What will run, and why what was left open was chosen so."""
    cache, endpoint = job.stack.cache, job.stack.endpoint
    lines = {
        **job.machine.described(),
        "server": described(endpoint) if endpoint else "",
        "request_timeout": _patience(job) if endpoint else "",
        "compared": ", ".join(dict.fromkeys(str(cell.variant) for cell in job.cells)),
        "kv_memory": f"{_size(job, cache.pool_tokens)}, the same for each backend" if job.stack.machine else "",
        "swap_space": f"{_size(job, cache.swap_tokens)} of host memory" if cache.swap_tokens else "",
        "max_model_len": f"{cache.max_model_len} tokens",
        "concurrency": _loads(job),
        "lengths": lengths(job),
    }
    for name, line in lines.items():
        if not line:
            continue
        reason = f"  ({job.choices[name]})" if name in job.choices else ""
        say.print(f"{name.replace('_', ' '):>14}  {line}{reason}", markup=False, soft_wrap=True)


def _patience(job: Job) -> str:
    """How long a request may take; a server is never waited for without an end."""
    told = job.config.request_timeout_s
    return f"{told or PATIENCE_S:g} s{'' if told else ', of the server only; --request-timeout sets your own'}"


def _size(job: Job, tokens: int) -> str:
    """`33 MiB = 1,504 tokens`."""
    size = tokens * job.machine.kv_bytes_per_token / 2**20
    return f"{size:,.{0 if size >= 10 else 2}f} MiB = {tokens:,} tokens"


def _loads(job: Job) -> str:
    loads = dict.fromkeys(cell.load for cell in job.cells)
    numbers = ", ".join(load.number for load in loads)
    if any(load.concurrency is None for load in loads):
        return _open_loads(job, numbers)
    return f"{numbers} user{'s' * (numbers != '1')} at once"


def _open_loads(job: Job, numbers: str) -> str:
    """`2 requests/s, poisson, at most 8 in flight`; `as recorded, 10 times as fast`."""
    config = job.config
    if config.process.kind != TRACE:
        said = f"{numbers} requests/s, {config.arrivals or 'poisson'}"
    elif any(cell.load.request_rate for cell in job.cells):
        said = f"{numbers} requests/s, as the trace had them"
    else:
        said = "as recorded" + (f", {config.trace_scale:g} times as fast" if config.trace_scale else "")
    return said + (f", at most {config.max_concurrency} in flight" if config.max_concurrency else "")


def announce_time(job: Job, guesses_s: dict[str, float], say: Console) -> None:
    """The whole grid and how long it will take."""
    variants = len(dict.fromkeys(cell.variant for cell in job.cells))
    points = len(job.cells) // variants // job.repeats
    counts = {"variant": variants, "point": points, "repeat": job.repeats}
    grid = " x ".join(f"{count} {noun}{'s' * (count > 1)}" for noun, count in counts.items())
    fewer = "  (fewer repeats, but two, where time runs short; --repeats sets your own)"
    if job.config.until_ci is not None:
        fewer = f"  (fewer repeats, but {FEWEST_REPEATS}, once each interval is within ± {job.config.until_ci:.4g})"
    elif job.config.repeats or job.machine.patience_s == math.inf:
        fewer = ""
    took = clock(sum(guesses_s[cell.id] for cell in job.cells))
    took += " to compute" if job.machine.evidence == SIMULATED else ""
    line = f"{'plan':>14}  {len(job.cells)} cell{'s' * (len(job.cells) > 1)} = {grid}, about {took}{fewer}"
    say.print(line, markup=False, soft_wrap=True)
