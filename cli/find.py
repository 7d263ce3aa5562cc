"""`--find-max-rate` and `--find-max-concurrency`: the largest load whose runs meet the SLOs, by variant and context.

A probe is a cell like any other, in the run folder under its load, its `repeat` counting the runs of that load; each
has a seed of its own. What was found is `search` in `run.json`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from kvbench.cli.manifest import end_session
from kvbench.cli.stack import SERVER
from kvbench.errors import KvbenchError
from kvbench.metrics.points import Context, LoadPoint, Variant
from kvbench.metrics.store import RunFolder
from kvbench.workloads.grid import Cell, cells
from kvbench.workloads.search import RETESTS, Limit, Range, Trial, search

if TYPE_CHECKING:
    from rich.console import Console

    from kvbench.cli.job import Job

RATE, USERS = "rate", "concurrency"
LEAST_RATE, MOST_RATE, MOST_USERS = 0.01, 10_000.0, 4096
IDLE = 0.1
"""At a rate at which fewer requests than this are in the system on average, they hardly ever meet."""
IN_VAIN = 2
"""So many runs in a row that a smaller load could not have helped end a search."""
LONG_S = 60.0
"""A run that takes longer says so beforehand."""


def announce_search(job: Job, say: Console) -> None:
    """How long it may become."""
    from kvbench.workloads.search import BUDGET

    searches = len(_searches(job))
    each = f" for each of {searches} variants and contexts" if searches > 1 else ""
    first = _range(job, job.cells[0].context).first
    say.print(f"{'plan':>14}  a search from {first:g} on, of {BUDGET} runs at most{each}", markup=False, soft_wrap=True)


def find_limits(job: Job, folder: RunFolder, cold_s: float | None, say: Console) -> None:
    """Search for every variant and context of the job into the folder, until Ctrl-C at most."""
    once = {"model_load_s": job.machine.load_s, "cold_first_token_s": cold_s}
    folder.update_manifest(cells=[], search=[])
    interrupted = False
    try:
        for variant, context in _searches(job):
            known = dict.fromkeys(once) if variant.backend == SERVER else once
            probe = _Probe(job, folder, variant, context, known, say)
            try:
                found = search(probe, _range(job, context), seed=job.config.seed)
            except _Hopeless as hopeless:
                found = Limit(None, None, None, 0, str(hopeless), (), tuple(probe.trials))
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


def _range(job: Job, context: Context) -> Range:
    """From where the user said the search begins; no more clients than the workload keeps busy."""
    load = job.cells[0].load
    if job.config.find == RATE:
        assert load.request_rate is not None
        return Range(load.request_rate, min(LEAST_RATE, load.request_rate), max(MOST_RATE, load.request_rate))
    assert load.concurrency is not None
    most = job.asking.most_clients(context) or MOST_USERS
    return Range(float(load.concurrency), 1.0, float(max(most, load.concurrency)), whole=True)


class _Hopeless(Exception):
    """No smaller load can be expected to pass, or a larger one to be asked."""


class _Probe:
    """Runs a load as a cell and says whether it met the SLOs; a cell that failed did not.

    A search halves a load that fails, and at a hundredth of a request a second a run takes hours. So it ends where that
    cannot help: after runs in which no request finished (a server that died), or after none but such as fail although
    their requests hardly meet.
    """

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
        self._in_vain = 0
        self.trials: list[Trial] = []

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
        self._check(cell)
        self._folder.update_manifest(cells=[*planned, cell.facts()])
        with self._say.status(describe(cell)):
            row, run = measure(self._job, cell)
        self._folder.write_cell(cell.id, row | self._once, run)
        passed = row["status"] == "ok" and row.get("slo_met") is True
        self._say.print(
            f"{describe(cell)}: {'passes' if passed else 'fails'}, {self._told(row)}", markup=False, soft_wrap=True
        )
        self.trials.append(Trial(load, seed, passed))
        self._give_up(load, row, passed)
        return passed

    def _told(self, row: dict[str, Any]) -> str:
        """`99.3% in time`, `ttft p99 1.2 s`: by which a run passes or fails; each kind of SLO where it is asked for."""
        if row["status"] != "ok":
            return str(row["status"])
        slos, share = self._job.config.slos, row.get("attainment")
        told = [] if share is None or all(slo.rank for slo in slos) else [f"{share:.1%} in time"]
        for slo in slos:
            if slo.rank:
                value_s = row.get(f"slo_{slo.metric}_{slo.rank}_s")
                told.append(f"{slo.metric} {slo.rank} {'unknown' if value_s is None else f'{value_s:.3g} s'}")
        return ", ".join(told)

    def _check(self, cell: Cell) -> None:
        """What cannot be asked ends the search, not the run; before the first run it is a user error."""
        from kvbench.cli.progress import clock

        try:
            self._job.check(cell)
            lasts_s = (self._job.asking.arrivals(cell.load, cell.context, cell.seed) or [0.0])[-1]
        except KvbenchError as error:
            if not self.trials:
                raise
            raise _Hopeless(str(error)) from error
        if lasts_s > LONG_S:
            self._say.print(f"{cell.load}: requests come for {clock(lasts_s)}", markup=False, soft_wrap=True)

    def _give_up(self, load: float, row: dict[str, Any], passed: bool) -> None:
        """Raises _Hopeless after the last of `IN_VAIN` runs in vain."""
        ran, lasted_s = row["status"] == "ok", row.get("e2e_mean_s")
        idle = lasted_s is not None and load * lasted_s < IDLE and self._job.config.find == RATE
        never = not any(trial.passed for trial in self.trials)
        vain = not passed and ((idle and never) if ran else row["status"] in ("failed", "rejected"))
        self._in_vain = self._in_vain + 1 if vain else 0
        if self._in_vain < IN_VAIN:
            return
        if ran:
            raise _Hopeless(f"even {load:g} fails, where requests hardly ever meet")
        raise _Hopeless(f"{IN_VAIN} runs in a row had no answer at all, the last since {row['reason']}")


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
