"""A load on the cost model in milliseconds: the engine's rules without its bookkeeping.

The step-by-step engine on the virtual clock is the reference (`simulator.py`); fitting parameters and scoring thousands
of published points needs something faster. Here requests are only lengths and times. Prefill runs chunk by chunk like
the engine's; between two events (an arrival, the end of a request, a full pool) every step is a pure decode with the
same sequences, and all of them are taken at once.

Two schedulers are known: `mixed` puts chunks of prompts beside decodes under a token budget (vLLM since V1,
TensorRT-LLM with chunked context, this engine); otherwise prompts run in steps of their own, ahead of decodes (vLLM V0,
SGLang).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvbench.planner.cost import CostModel
from kvbench.planner.work import StepWork

if TYPE_CHECKING:
    import numpy as np

Work = tuple[int, int, int, int, int]
"""The first five fields of StepWork."""


class StepSeconds(Protocol):
    """How long a step takes."""

    def seconds(self, work: StepWork) -> float:
        """Seconds of one step; above 0."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Every step takes a second: for loads whose order of steps no time changes."""

    def seconds(self, work: StepWork) -> float:
        return 1.0

    def decode_seconds(self, sequences: int, context_tokens: int, steps: int) -> np.ndarray:
        import numpy as np

        return np.ones(steps)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler of an engine may put into a step, and the rows of its pool. `reserve`: a request begins only
    where its last token has room too (TensorRT-LLM's default), so nothing is ever preempted."""

    sequences: int = 256
    batched_tokens: int = 2048
    pool_tokens: int = 1 << 40
    mixed: bool = True
    reserve: bool = False


@dataclass(slots=True)
class Job:
    """A request: when it comes, how long it is, and what became of it. `first_s` and `last_s` are None where it never
    began."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0  # of the prompt, found in a prefix cache
    first_s: float | None = None
    last_s: float | None = None
    prompt: int = 0  # what must be computed before it decodes (again): more than the input after a preemption
    computed: int = 0
    began: bool = False  # holds rows
    made: int = 0
    joined: int = 0  # decode steps that were over when it began to decode
    opened_by: int = 0  # how many stretches were over when it came, had its first and its last token
    first_by: int = 0
    last_by: int = 0


@dataclass(slots=True)
class Forecast:
    """What a load came to: its jobs, when the last one ended, and the stretches of steps it took. A stretch is a number
    of steps and the work of its first and of its last one."""

    jobs: list[Job]
    end_s: float
    steps: int
    preemptions: int
    stretches: list[tuple[int, Work, Work]]

    def times(self) -> np.ndarray:
        """Arrival, first and last token of the jobs that have them: `float64 [3, jobs]`."""
        import numpy as np

        done = [(j.arrival_s, j.first_s, j.last_s) for j in self.jobs if j.last_s is not None and j.first_s is not None]
        return np.array(done).T.reshape(3, -1)


@dataclass(slots=True)
class Replay:
    """A load whose order of steps no step's time changes (all at once, or by concurrency), ready for any cost model."""

    counts: np.ndarray
    first: np.ndarray
    last: np.ndarray
    events: np.ndarray
    outputs: np.ndarray
    inputs: np.ndarray

    @classmethod
    def of(cls, done: Forecast) -> Replay:
        import numpy as np

        counts, first, last = zip(*done.stretches, strict=True)
        whole = [job for job in done.jobs if job.last_s is not None]
        return cls(
            np.array(counts, dtype=float),
            np.array(first, dtype=float).T,
            np.array(last, dtype=float).T,
            np.array([(job.opened_by, job.first_by, job.last_by) for job in whole]).T.reshape(3, -1),
            np.array([job.output_tokens for job in whole], dtype=float),
            np.array([job.input_tokens for job in whole], dtype=float),
        )

    def times(self, cost: CostModel) -> np.ndarray:
        """As `Forecast.times` would have it under `cost`."""
        import numpy as np

        seconds = self.counts * (cost.seconds_of(self.first) + cost.seconds_of(self.last)) / 2
        return np.asarray(np.concatenate(([0.0], np.cumsum(seconds)))[self.events])


class Line:
    """One replica at work on its jobs."""

    def __init__(self, cost: StepSeconds, limits: Limits, jobs: Sequence[Job], concurrency: int | None) -> None:
        self.cost = cost
        self.limits = limits
        self.jobs = list(jobs)
        self.concurrency = concurrency
        self.coming = deque(self.jobs)
        self.waiting: deque[Job] = deque()
        self.running: list[tuple[int, int, Job]] = []  # a heap by the decode step that ends it
        self.order: list[Job] = []  # those that decode, in the order they joined
        self.now = 0.0
        self.clock = 0
        self.steps = 0
        self.rows = 0  # held by all that began
        self.context = 0  # computed tokens of those that decode
        self.preemptions = 0
        self.stretches: list[tuple[int, Work, Work]] = []
        self.pushed = 0
        self.open = 0

    def run(self) -> Forecast:
        while True:
            self._arrive()
            if self.waiting and self._prefill():
                continue
            if self.running:
                self._decode()
            elif self.waiting:
                self.waiting.popleft()  # it fits no empty pool
                self.open -= 1
            elif self.coming:
                self.now = max(self.now, self.coming[0].arrival_s)
            else:
                return Forecast(self.jobs, self.now, self.steps, self.preemptions, self.stretches)

    def _arrive(self) -> None:
        while self.coming and (self.open < self.concurrency if self.concurrency else self._due(self.coming[0])):
            job = self.coming.popleft()
            if self.concurrency:
                job.arrival_s = self.now
                job.opened_by = len(self.stretches)
            job.prompt = job.input_tokens
            self.waiting.append(job)
            self.open += 1

    def _due(self, job: Job) -> bool:
        return job.arrival_s <= self.now

    def _prefill(self) -> bool:
        """One step with prompts in it; False where no prompt may begin."""
        limits, decodes = self.limits, 0
        if limits.mixed and self.running:
            self._room()
            decodes = len(self.running)
        budget = limits.batched_tokens - decodes
        tokens = pairs = context = 0
        whole: list[Job] = []
        while self.waiting and budget > 0 and len(self.running) + len(whole) < limits.sequences:
            job = self.waiting[0]
            left = job.prompt - max(job.computed, job.cached_tokens)
            if not job.began and not self._fits(job, decodes):
                break
            if tokens and left > budget and not limits.mixed:
                break
            n = min(budget, left)
            if not job.began:
                job.began = True
                job.computed = job.cached_tokens
                self.rows += self._need(job)
            pairs += n * job.computed + n * (n + 1) // 2
            job.computed += n
            context += job.computed
            tokens += n
            budget -= n
            if n < left:
                break
            whole.append(self.waiting.popleft())
        if not tokens:
            return False
        held = self.context + decodes if decodes else 0
        work = (decodes, tokens, pairs + held, context + held, decodes + len(whole))
        self._pass(1, work, work)
        if decodes:
            self._advance(1)
        for job in whole:
            self._begin(job)
        return True

    def _need(self, job: Job) -> int:
        return job.input_tokens + job.output_tokens if self.limits.reserve else job.prompt + 1

    def _fits(self, job: Job, decodes: int) -> bool:
        return self.rows + self._need(job) + decodes <= self.limits.pool_tokens

    def _begin(self, job: Job) -> None:
        if job.first_s is None:
            job.first_s = self.now
            job.first_by = len(self.stretches)
        job.made += 1
        if job.made >= job.output_tokens:
            self._close(job)
            self.rows -= self._need(job)
            return
        job.joined = self.clock
        self.pushed += 1
        self.context += job.prompt
        heapq.heappush(self.running, (self.clock + job.output_tokens - job.made, self.pushed, job))
        self.order.append(job)

    def _advance(self, steps: int) -> None:
        """`steps` tokens more for each that decodes; those that are whole end."""
        sequences = len(self.running)
        self.clock += steps
        self.context += steps * sequences
        if not self.limits.reserve:
            self.rows += steps * sequences
        while self.running and self.running[0][0] <= self.clock:
            job = heapq.heappop(self.running)[2]
            self._leave(job)
            self._close(job)

    def _leave(self, job: Job) -> int:
        """Give back what a decoding job holds; the tokens it made since it joined."""
        made = self.clock - job.joined
        self.context -= job.prompt + made
        self.rows -= self._need(job) + (0 if self.limits.reserve else made)
        return made

    def _room(self) -> None:
        """Make room for one row for each that decodes, by preempting the latest; one alone goes on as it may."""
        if self.limits.reserve:
            return
        while self.rows + len(self.running) > self.limits.pool_tokens and len(self.running) > 1:
            job = self.order.pop()
            if job.last_s is not None:
                continue
            self.running = [entry for entry in self.running if entry[2] is not job]
            heapq.heapify(self.running)
            made = self._leave(job)
            job.made += made
            job.prompt += made
            job.computed, job.began = 0, False
            self.waiting.appendleft(job)
            self.preemptions += 1

    def _decode(self) -> None:
        """All pure decode steps up to the next event."""
        self._room()
        sequences = len(self.running)
        steps = self.running[0][0] - self.clock
        spare = self.limits.pool_tokens - self.rows
        if not self.limits.reserve and spare < steps * sequences:
            steps = max(1, spare // sequences)
        first = self._work(sequences, 1)
        if self.coming and not self.concurrency and sequences < self.limits.sequences:
            step = self.cost.seconds(StepWork(*first))
            steps = min(steps, max(1, math.ceil((self.coming[0].arrival_s - self.now) / step)))
        self._pass(steps, first, self._work(sequences, steps))
        self._advance(steps)

    def _work(self, sequences: int, step: int) -> Work:
        context = self.context + step * sequences
        return sequences, 0, context, context, sequences

    def _pass(self, steps: int, first: Work, last: Work) -> None:
        """Let the time of some steps pass: linear in the context but where a bound changes on the way."""
        seconds = self.cost.seconds(StepWork(*first))
        if steps > 1:
            seconds = steps * (seconds + self.cost.seconds(StepWork(*last))) / 2
        self.now += seconds
        self.steps += steps
        self.stretches.append((steps, first, last))

    def _close(self, job: Job) -> None:
        job.last_s = self.now
        job.last_by = len(self.stretches)
        self.open -= 1


def forecast(cost: StepSeconds, limits: Limits, jobs: Sequence[Job], concurrency: int | None = None) -> Forecast:
    """Run `jobs`, in order of arrival, or at most `concurrency` at once, each as soon as one ended."""
    assert limits.sequences > 0 and limits.batched_tokens > 0 and limits.pool_tokens > 0, limits
    return Line(cost, limits, jobs, concurrency).run()
