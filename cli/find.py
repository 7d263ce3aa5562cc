"""`--find-max-rate` and `--find-max-concurrency`: the largest load whose runs meet the SLOs, by variant and context.

A probe is a cell like any other, in the run folder under its load, its `repeat` counting the runs of that load; each
has a seed of its own. What was found is `search` in `run.json`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from kvbench.cli.manifest import end_session
from kvbench.metrics.points import Context, LoadPoint, Variant
from kvbench.metrics.store import RunFolder
from kvbench.workloads.grid import cells
from kvbench.workloads.search import RETESTS, Limit, Range, search

if TYPE_CHECKING:
    from rich.console import Console

    from kvbench.cli.job import Job

RATE, USERS = "rate", "concurrency"
LEAST_RATE, MOST_RATE = 0.01, 10_000.0


def announce_search(job: Job, say: Console) -> None:
    """How long it may become."""
    from kvbench.workloads.search import BUDGET

    searches = len(_searches(job))
    each = f" for each of {searches} variants and contexts" if searches > 1 else ""
    where = _range(job)
    say.print(f"{'plan':>14}  a search from {where.first:g} on, of {BUDGET} runs at most{each}", markup=False)


def find_limits(job: Job, folder: RunFolder, cold_s: float | None, say: Console) -> None:
    """Search for every variant and context of the job into the folder, until Ctrl-C at most."""
    once = {"model_load_s": job.machine.load_s, "cold_first_token_s": cold_s}
    folder.update_manifest(cells=[], search=[])
    interrupted = False
    try:
        for variant, context in _searches(job):
            probe = _Probe(job, folder, variant, context, once, say)
            found = search(probe, _range(job), seed=job.config.seed)
            facts = _facts(job, variant, context, found)
            folder.update_manifest(search=[*folder.manifest["search"], facts])
    except KeyboardInterrupt:
        interrupted = True
        stored = folder.stored()
        folder.update_manifest(cells=[cell for cell in folder.manifest["cells"] if cell["id"] in stored])
        folder.catch_up()
    finally:
        end_session(job, folder, interrupted=interrupted)


def _searches(job: Job) -> list[tuple[Variant, Context]]:
    return list(dict.fromkeys((cell.variant, cell.context) for cell in job.cells))


def _range(job: Job) -> Range:
    """From where the user said the search begins; no more clients than there are requests."""
    load = job.cells[0].load
    if job.config.find == RATE:
        assert load.request_rate is not None
        return Range(load.request_rate, min(LEAST_RATE, load.request_rate), max(MOST_RATE, load.request_rate))
    assert load.concurrency is not None
    most = job.config.prompts or max(4096, load.concurrency)
    return Range(float(load.concurrency), 1.0, float(max(most, load.concurrency)), whole=True)


class _Probe:
    """Runs a load as a cell and says whether it met the SLOs; a cell that failed did not."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        variant: Variant,
        context: Context,
        once: dict[str, float | None],
        say: Console,
    ) -> None:
        self._job, self._folder, self._variant, self._context = job, folder, variant, context
        self._once, self._say = once, say
        self._runs: Counter[float] = Counter()

    def __call__(self, load: float, seed: int) -> bool:
        from kvbench.cli.measure import measure
        from kvbench.cli.progress import describe

        rate = self._job.config.find == RATE
        point = LoadPoint(request_rate=load) if rate else LoadPoint(concurrency=int(load))
        repeat = self._runs[load]
        self._runs[load] += 1
        (cell,) = cells((self._variant,), (point,), (self._context,), 1, seed)
        planned = self._folder.manifest["cells"]
        name = f"{cell.id.removesuffix('-r0')}-r{repeat}"
        cell = replace(cell, id=name, repeat=repeat, order=len(planned))
        self._job.check(cell)
        self._folder.update_manifest(cells=[*planned, cell.facts()])
        with self._say.status(describe(cell)):
            row, run = measure(self._job, cell)
        self._folder.write_cell(cell.id, row | self._once, run)
        passed = row["status"] == "ok" and row.get("slo_met") is True
        share = row.get("attainment")
        told = f"{share:.1%} in time" if isinstance(share, float) else str(row["status"])
        self._say.print(f"{describe(cell)}: {'passes' if passed else 'fails'}, {told}", markup=False, soft_wrap=True)
        return passed


def _facts(job: Job, variant: Variant, context: Context, found: Limit) -> dict[str, object]:
    """As `run.json` keeps it, with the names of `cells.csv`."""
    return {
        **asdict(variant),
        **asdict(context),
        "of": "request_rate" if job.config.find == RATE else "concurrency",
        "answer": found.answer,
        "low": found.low,
        "high": found.high,
        "retests": RETESTS,
        "retests_passed": found.retested,
        "runs": len(found.trials),
        "why": found.why,
        "warnings": list(found.warnings),
    }
