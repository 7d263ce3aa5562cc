"""Which tokens are computed next.

There are no phases. Each sequence has `known` tokens and `computed` ones, and a step runs chunks that let computed
catch up with known under a token budget: chunked prefill, decode and recomputation after a preemption are this one
rule. The policy of memory is the allocator's; the scheduler only asks, and on shortage takes from the latest admitted.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

from kvbench.engine.decoding import Decoding
from kvbench.engine.interfaces import Allocator, Paging
from kvbench.engine.types import Batch, Chunk, Move, Sequence
from kvbench.errors import KvbenchError

_SAMPLES = 2**20
"""Places of a request's samples, the first of which is admitted for all."""


FARTHEST = 4096
"""Steps that are foreseen at once, at most."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_batched_tokens` tokens a step, `max_sequences` running at once, `max_model_len` tokens of prompt and
    declared answer together; `truncate` cuts the head of a prompt that goes beyond it instead of rejecting. A request
    that has not finished `request_timeout_s` seconds after it was scheduled is aborted; None waits for ever."""

    max_model_len: int
    max_batched_tokens: int = 2048
    max_sequences: int = 256
    truncate: bool = False
    request_timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_batched_tokens", "max_sequences"):
            if getattr(self, name) < 1:
                raise KvbenchError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.request_timeout_s is not None and not self.request_timeout_s > 0:
            raise KvbenchError(f"request_timeout_s must be above 0, not {self.request_timeout_s}")

    @property
    def seats(self) -> int:
        """How many sequences can run at once, with a token each in every step."""
        return min(self.max_sequences, self.max_batched_tokens)


@dataclass(slots=True)
class Plan:
    """What one call of `Scheduler.schedule` decided: who decodes, the other chunks to run and the moves of rows before
    them, the sequences admitted and preempted by it, and those that can never go on, each with its reason."""

    decodes: list[Sequence] = field(default_factory=list)
    context: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    hopeless: list[tuple[Sequence, str]] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether there is anything to run."""
        return bool(self.decodes or self.chunks)

    def batch(self, step: int) -> Batch:
        return Batch(step, self.chunks, self.moves, self.decodes, self.context)


class Scheduler:
    """First come, first served. `running` is in order of admission, `waiting` in order of service.

    The first of `running` are those that are `decoding`; of the others, whose prompts are not computed yet, the budget
    lets at most one go on at a time, so nobody behind it decodes.

    With `paging`, which is the allocator itself where it can do this, the samples of a request share one prompt, and
    the preempted put their rows aside where there is room.
    """

    def __init__(self, allocator: Allocator, limits: Limits, paging: Paging | None = None) -> None:
        self.allocator = allocator
        self.limits = limits
        self.paging = paging
        self.running: list[Sequence] = []
        self.decoding = Decoding()
        self.waiting: deque[Sequence] = deque()
        self._admissions = 0

    def add(self, samples: list[Sequence]) -> None:
        """Queue the samples of a request: the first one for all of them where they can share, else each for itself."""
        if self.paging is not None:
            samples[0].forks = samples[1:]
            samples = samples[:1]
        self.waiting.extend(samples)

    def fork(self, parent: Sequence) -> None:
        """The parent has computed the prompt: the other samples run beside it from now on."""
        assert self.paging is not None, "only those that can share wait for each other"
        at = self.running.index(parent) + 1
        self.running[at:at] = parent.forks
        for child in parent.forks:
            child.computed, child.admitted_s = parent.computed, parent.admitted_s
            self.paging.fork(parent, child)
        parent.forks = []

    def decode(self, sequence: Sequence) -> None:
        """It has computed all but its last token: from the next step on it gets one in each."""
        self.decoding.join(sequence, self.allocator.room(sequence))

    def finish(self, sequence: Sequence) -> None:
        """The sequence has ended, well or not: its rows go back."""
        self._leave(sequence)
        self.running.remove(sequence)
        self.allocator.free(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """It decodes no more."""
        if self.decoding.leave(sequence):
            self.allocator.commit(sequence)

    def drop(self, sequence: Sequence) -> None:
        """The sequence is no longer wanted, whether it runs or waits."""
        if sequence in self.running:
            self.finish(sequence)
        else:
            self.waiting.remove(sequence)
            self.allocator.free(sequence)  # it may have put rows aside

    def drain(self) -> None:
        """Everybody leaves, wanted or not, and all rows go back."""
        for sequence in (*self.running, *self.waiting):
            self._leave(sequence)
            self.allocator.free(sequence)
        self.running.clear()
        self.waiting.clear()

    def schedule(self) -> Plan:
        plan = Plan()
        budget = self._advance_running(plan)
        if not plan.preempted:
            self._admit_waiting(plan, budget)
        if self.paging is not None and plan:
            plan.moves = self.paging.take_moves()
        return plan

    def quiet(self, plan: Plan) -> int:
        """In how many steps, that of the plan included, those that decode now decode and nothing else happens but that
        they get memory, unless somebody comes or gives up; at least 1."""
        if plan.chunks or plan.moves or self.waiting or self.decoding.count != len(self.running):
            return 1
        steps = min(self.decoding.quiet(), FARTHEST)
        return steps if steps > 1 and self.allocator.could_grow(self.decoding.count, steps) else 1

    def grow(self) -> None:
        """Those that decode get the memory that the next of the quiet steps needs."""
        if due := self.decoding.due():
            self.decoding.expect_later(due, self.allocator.grow(due))

    def _advance_running(self, plan: Plan) -> int:
        """Give every running sequence its next chunk, the oldest first; returns what is left of the budget. Of those
        that decode only who needs memory is looked at."""
        due = self.decoding.due()
        if due and self.allocator.could_grow(len(due), 1):
            self.decoding.expect_later(due, self.allocator.grow(due))
            due = []
        for sequence in due:
            if sequence.decodes and self._make_room(sequence, sequence.computed + 1, plan):
                self.decoding.expect(sequence, self.allocator.room(sequence))
        at = self.decoding.count
        plan.decodes, plan.context = self.running[:at], self.decoding.context + at
        budget = self.limits.max_batched_tokens - at
        while budget and at < len(self.running):
            sequence = self.running[at]
            end = min(sequence.known, sequence.computed + budget)
            if self._make_room(sequence, end, plan):
                budget -= self._run(sequence, end, plan)
                at += 1
        return budget

    def _make_room(self, sequence: Sequence, rows: int, plan: Plan) -> bool:
        """Reserve, preempting the latest admitted until it succeeds or the sequence itself had to go."""
        while not self.allocator.reserve(sequence, rows):
            if not self.allocator.could_hold(sequence, rows):
                self.finish(sequence)
                plan.hopeless.append((sequence, self._outgrown(sequence, rows)))
                return False
            victim = self.running.pop()
            self._preempt(victim)
            plan.preempted.append(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        """Back to the head of the queue, its rows put aside where there is room for them and else to be recomputed."""
        self._leave(victim)
        victim.preemptions += 1
        if self.paging is not None and self.paging.swap_out(victim):
            victim.swaps += 1
        else:
            self.allocator.free(victim)
            victim.computed = 0
        self.waiting.appendleft(victim)

    def _admit_waiting(self, plan: Plan, budget: int) -> None:
        """Admit while the budget lasts, so that all who run get a token a step."""
        while budget and (sequence := self._admit(plan)):
            budget -= self._run(sequence, min(sequence.known, sequence.computed + budget), plan)

    def _admit(self, plan: Plan) -> Sequence | None:
        """Admit the head of the queue where its whole known part fits; nobody overtakes it."""
        while self.waiting:
            sequence = self.waiting[0]
            if self._running_soon() + 1 + len(sequence.forks) > self.limits.seats:
                return None
            if not self.allocator.could_hold(sequence, sequence.known):
                self.drop(sequence)
                plan.hopeless.append((sequence, self._outgrown(sequence, sequence.known)))
                continue
            if not self.allocator.reserve(sequence, sequence.known):
                return None
            self.waiting.popleft()
            self.running.append(sequence)
            self._admissions += 1
            for number, sample in enumerate((sequence, *sequence.forks)):
                sample.place = self._admissions * _SAMPLES + number
            plan.admitted.append(sequence)
            return sequence
        return None

    def _running_soon(self) -> int:
        """Those that run and the samples that wait for their prompts."""
        fresh = itertools.islice(self.running, self.decoding.count, None)
        return len(self.running) + sum(len(sequence.forks) for sequence in fresh)

    def _run(self, sequence: Sequence, end: int, plan: Plan) -> int:
        chunk = Chunk(sequence, sequence.computed, end, samples=end == sequence.known)
        plan.chunks.append(chunk)
        return chunk.length

    def _outgrown(self, sequence: Sequence, rows: int) -> str:
        return (
            f"outgrew the whole KV pool: {rows} tokens do not fit in {self.allocator.pool_tokens} "
            f"({sequence.prompt_tokens} of prompt, {sequence.generated} generated)"
        )
