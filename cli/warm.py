"""Before the first cell: every variant is tried, so that none pays for what happens once, and how long the cells will
take is guessed from that. On a card that is only computed nothing happens once; it is tried for the guess alone."""

from __future__ import annotations

import importlib
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from kvbench.cli.job import Job
from kvbench.cli.server import COLD_S
from kvbench.cli.stack import SERVER, shares
from kvbench.engine.types import Request
from kvbench.errors import KvbenchError
from kvbench.metrics.latency import tpot_s, ttft_s
from kvbench.metrics.points import Context, LoadPoint, Variant
from kvbench.metrics.records import Run
from kvbench.workloads.grid import Cell
from kvbench.workloads.load import ClosedLoop


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a variant goes, from its warm-up, in seconds: of a prompt's token, of a decode step with one sequence,
    and of one with `together` sequences, the most that ran."""

    prefill_s: float = 0.0
    alone_s: float = 0.0
    together_s: float = 0.0
    together: int = 1

    def step_s(self, sequences: float) -> float:
        """A decode step grows linearly with its sequences."""
        slope = (self.together_s - self.alone_s) / (self.together - 1) if self.together > 1 else 0.0
        return self.alone_s + max(0.0, slope) * (sequences - 1)


SHORT, LONG = 8, 1024
"""Tokens of an answer that is tried: enough for a pace; enough that little but answers counts."""

KEEPING_S = 0.2
"""About what it takes to sum a cell up and to store it, however short it was."""


def warm_up(job: Job) -> tuple[float | None, dict[str, float]]:
    """Serve a few short answers through every variant at its largest load, so that no cell pays for what happens once.

    Returns the first token's time of the very first request after loading, that of the check of the model included
    (None where it did not finish), and a guess of every cell's duration in seconds.
    """
    cold_s = None
    paces: dict[Variant, Pace] = {}
    for cell in job.cells:
        variant = cell.variant
        if variant in paces:
            continue
        requests = _short(job, variant, SHORT)
        first = _try(job, variant, [replace(requests[0], n=1)])  # alone, without siblings
        local = variant.backend != SERVER and all(past.backend == SERVER for past in paces)
        if local and first is not None and first.requests[0].first_s is not None:
            cold_s = job.machine.first_forward_s + first.requests[0].first_s
        many = _try(job, variant, requests) if job.config.warmups else None
        paces[variant] = _pace(first, many)
    asked: dict[tuple[LoadPoint, Context], Asked] = {}
    for cell in job.cells:
        if _point(cell) not in asked:
            asked[_point(cell)] = Asked.by(job.requests(cell))
    return cold_s, {cell.id: _guess(job, cell, paces[cell.variant], asked[_point(cell)]) for cell in job.cells}


def rehearse(job: Job) -> dict[str, float]:
    """How long it will take to compute each cell, in the time of this machine, not of the card: from a few answers of
    each variant."""
    importlib.import_module("pyarrow.parquet")  # a cell is written with it: loaded before the first one is timed
    token_s: dict[Variant, float] = {}
    for variant in dict.fromkeys(cell.variant for cell in job.cells):
        requests = _short(job, variant, LONG)
        _try(job, variant, requests[:1])
        began_s = time.perf_counter()
        _try(job, variant, requests)
        tokens = sum((one.output_tokens or 1) * one.n for one in requests)
        token_s[variant] = (time.perf_counter() - began_s) / tokens
    answers: dict[tuple[LoadPoint, Context], int] = {}
    for cell in job.cells:
        if _point(cell) not in answers:
            answers[_point(cell)] = Asked.by(job.requests(cell)).answers
    return {
        cell.id: KEEPING_S + token_s[cell.variant] * answers[_point(cell)] * cell.context.samples for cell in job.cells
    }


def _point(cell: Cell) -> tuple[LoadPoint, Context]:
    """What a cell's time hangs on beside its variant. Seeds change it little, and samples answer the same prompts."""
    return cell.load, cell.context.single


def _short(job: Job, variant: Variant, longest: int) -> list[Request]:
    """The first requests of the variant's largest load, as many as it has users (about 16 answers at most, or as many
    warm-ups as were asked for), each for `longest` tokens at most."""
    mine = [cell for cell in job.cells if cell.variant == variant]
    cell = max(mine, key=lambda cell: (cell.load.size * cell.context.samples, cell.context.size))
    count = max(job.config.warmups, min(cell.load.concurrency or 16, -(-16 // cell.context.samples)))
    return [
        replace(request, scheduled_s=0.0, output_tokens=min(longest, request.output_tokens or request.max_tokens))
        for request in [request for request in job.requests(cell) if not request.turn][:count]
    ]


def _try(job: Job, variant: Variant, requests: list[Request]) -> Run | None:
    """A run to be forgotten; one that cannot run will say so as a cell. Nobody is hurried by --request-timeout, for all
    is cold, but a server that hangs is not waited for beyond that."""
    told_s = job.stack.limits.request_timeout_s
    patience_s = max(COLD_S, told_s) if told_s is not None and variant.backend == SERVER else None
    patient = replace(job.stack, limits=replace(job.stack.limits, request_timeout_s=patience_s))
    try:
        return patient.run(variant, ClosedLoop(requests, len(requests)))
    except KvbenchError:
        raise
    except Exception:
        return None
    finally:
        job.machine.release()


def _pace(first: Run | None, many: Run | None) -> Pace:
    def decode_s(run: Run | None) -> float:
        steps = [step.end_s - step.start_s for step in run.steps if not step.prefill_tokens] if run else []
        return median(steps) if steps else 0.0

    run = many or first
    if run is not None and run.remote:
        return _pace_of_answers(first, many)
    prefills = [step for step in run.steps if step.prefill_tokens] if run else []
    tokens = sum(step.prefill_tokens for step in prefills)
    return Pace(
        prefill_s=sum(step.end_s - step.start_s for step in prefills) / tokens if tokens else 0.0,
        alone_s=decode_s(first),
        together_s=decode_s(many) or decode_s(first),
        together=max((step.running for step in many.steps), default=1) if many else 1,
    )


def _pace_of_answers(first: Run | None, many: Run | None) -> Pace:
    """Of a server only the answers are known: one alone, then all at once."""

    def token_s(run: Run | None) -> float:
        found = [tpot for one in run.requests if (tpot := tpot_s(one)) is not None] if run else []
        return median(found) if found else 0.0

    alone = first.requests[0] if first else None
    return Pace(
        prefill_s=((ttft_s(alone) or 0.0) / alone.input_tokens) if alone and alone.input_tokens else 0.0,
        alone_s=token_s(first),
        together_s=token_s(many) or token_s(first),
        together=len(many.requests) if many else 1,
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """What the requests of a point ask, in tokens: all prompts, what every one of them begins with, what they repeat of
    turns before (`history`, part of the prompts), and an answer to each. The last is scheduled at `until_s`; between
    turns `thought_s` pass in all."""

    requests: int
    prompts: int
    common: int
    answers: int
    until_s: float
    history: int = 0
    thought_s: float = 0.0

    @classmethod
    def by(cls, requests: Sequence[Request]) -> Asked:
        prompts = [request.prompt for request in requests if not request.turn]
        first, last = min(prompts), max(prompts)  # what these two share, all in between share
        history = known = 0
        for request in requests:
            known = known if request.turn else 0
            history += known
            known += len(request.prompt) + (request.output_tokens or request.max_tokens)
        pairs = zip(first, last, strict=False)
        return cls(
            len(requests),
            history + sum(len(request.prompt) for request in requests),
            sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)),
            sum(request.output_tokens or request.max_tokens for request in requests),
            max(request.scheduled_s for request in requests),
            history,
            sum(request.think_s for request in requests),
        )


def _guess(job: Job, cell: Cell, pace: Pace, asked: Asked) -> float:
    """Prompts and answers at the variant's pace, with as many sequences at once as users ask and memory lets run; an
    open loop lasts as long as its schedule at least, and no cell longer than it may.

    Each sample computes its own prompt unless its backend shares rows, and all but those of the first step find the
    full blocks of a common beginning in a prefix cache.
    """
    samples, users = cell.context.samples, cell.load.concurrency
    wanted = min(pace.together if users is None else users * samples, job.config.max_sequences)
    at_once = wanted if pace.together >= min(wanted, 16) else pace.together
    prompts = asked.prompts * (1 if shares(cell.variant) else samples)
    if cell.variant.prefix_caching:
        size = job.stack.cache.block_size
        fit = job.config.max_batched_tokens * asked.requests // max(1, asked.prompts)
        opening = max(1, min(-(-at_once // samples), fit), len(job.config.cache_salts))
        prompts -= asked.common // size * size * max(0, asked.requests - opening)
        prompts = max(0, prompts - asked.history)
    busy_s = prompts * pace.prefill_s + asked.answers * samples / at_once * pace.step_s(at_once)
    if users is not None:
        busy_s += asked.thought_s / users
    return min(max(asked.until_s, busy_s), job.config.cell_timeout_s or math.inf)
