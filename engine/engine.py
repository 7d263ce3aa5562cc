"""The engine: sequences in, batches to an executor, records out; and `serve`, the loop that drives it.

The engine never reads a clock. `serve` reads it once a step and hands the time in, so a recorded run can be replayed
on a virtual clock with the same batches and token times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import replace
from heapq import heappop, heappush

from kvbench.engine.decoding import in_order
from kvbench.engine.interfaces import Allocator, Clock, Executor, Foresight, Load
from kvbench.engine.ledger import Ledger
from kvbench.engine.scheduler import Limits, Plan, Scheduler
from kvbench.engine.sequence import Sequence
from kvbench.engine.types import COPY, IN, OUT, Batch, Request, Sampled, Ticket, Usage
from kvbench.metrics.records import ABORTED, FAILED, FINISHED, REJECTED, UNFINISHED, RequestRecord, Run, StepRecord


class Engine:
    """Serves requests over one allocator and one executor, one batch in flight at a time.

    A step is `launch(now)` → `collect()` → `commit(now)`: it starts at the first `now` and its tokens exist at the
    second. `take_done()` hands out what ended since the last call. `abort` may come at any moment. `scheduler`
    batches in its own way, over the same allocator and limits; the default is continuous batching.
    """

    def __init__(
        self,
        allocator: Allocator,
        executor: Executor,
        limits: Limits,
        *,
        save_tokens: bool = False,
        scheduler: Scheduler | None = None,
    ) -> None:
        self.allocator = allocator
        self.executor = executor
        self.limits = limits
        self.scheduler = scheduler or Scheduler(allocator, limits)
        self.ledger = Ledger()
        self.records: list[RequestRecord] = []
        self.steps: list[StepRecord] = []
        self.ends_s: list[float] = []  # of the steps
        self._save_tokens = save_tokens
        self._done: list[RequestRecord] = []
        self._told: list[RequestRecord] = []  # those handed out last
        self._living: dict[int, list[Sequence]] = {}  # of each request, the samples that have not ended
        self._leaving: dict[int, str] = {}  # aborted while the batch in flight writes to their rows, and why
        self._deadlines: list[tuple[float, int]] = []  # a heap; requests that have ended stay in it until theirs
        self._flight: tuple[Ticket, Plan, float] | None = None
        self._sampled: Sampled | None = None
        self._stalls = 0
        self._foresight: Foresight | None = executor if isinstance(executor, Foresight) else None

    @property
    def busy(self) -> bool:
        """Whether a batch is in flight."""
        return self._flight is not None

    @property
    def pending(self) -> bool:
        """Whether any request is queued or running."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def submit(self, request: Request) -> None:
        """Queue a request, or reject it at once where it is certain to fail."""
        prompt, reason = self._fitted(request)
        samples = [Sequence.of(request, prompt, sample) for sample in range(request.n)]
        self._living[request.id] = samples
        if not reason and not self.allocator.could_hold(samples[0], samples[0].known):
            reason = (
                f"its first reservation under this policy cannot fit even an empty KV pool of "
                f"{self.allocator.pool_tokens} tokens (prompt {samples[0].known}, declared answer {request.max_tokens})"
            )
        if reason:
            for sample in list(samples):
                self._end(sample, REJECTED, reason)
            return
        self.scheduler.add(list(samples))
        if self.limits.request_timeout_s is not None:
            heappush(self._deadlines, (request.scheduled_s + self.limits.request_timeout_s, request.id))

    def _fitted(self, request: Request) -> tuple[tuple[int, ...], str]:
        """The prompt as it will be served, and why it cannot be (empty: it can)."""
        if request.n > self.limits.seats:
            return request.prompt, (
                f"its {request.n} samples never run at once: max_num_seqs {self.limits.max_sequences}, "
                f"max_num_batched_tokens {self.limits.max_batched_tokens}"
            )
        room = self.limits.max_model_len - request.max_tokens
        if len(request.prompt) <= room:
            return request.prompt, ""
        if self.limits.truncate and room >= 1:
            return request.prompt[-room:], ""
        return request.prompt, (
            f"prompt of {len(request.prompt)} tokens and {request.max_tokens} declared go beyond "
            f"max_model_len {self.limits.max_model_len}"
            + ("; cut to fit, nothing of the prompt would be left" if self.limits.truncate else "")
        )

    def abort(self, request_id: int, reason: str = "aborted by its client") -> bool:
        """End a request wherever it is, with all its samples: at once, or with the next commit where the batch in
        flight still writes to its rows (a token of that batch is kept). False where it has ended, or never came."""
        if request_id not in self._living:
            return False
        if self._flight is not None and (
            any(sample.decodes for sample in self._living[request_id])
            or any(chunk.sequence.request.id == request_id for chunk in self._flight[1].chunks)
        ):
            self._leaving.setdefault(request_id, reason)
        else:
            self._abort(request_id, reason)
            self.ledger.note(self.allocator.take_holdings(), len(self.steps))
        return True

    def _abort(self, request_id: int, reason: str) -> None:
        while samples := self._living.get(request_id):
            self.scheduler.drop(samples[0])
            self._end(samples[0], ABORTED, reason)

    def _abort_overdue(self, now_s: float) -> None:
        while self._deadlines and self._deadlines[0][0] < now_s:
            _, request_id = heappop(self._deadlines)
            self.abort(request_id, f"not finished {self.limits.request_timeout_s:g} s after it was scheduled")

    def launch(self, now_s: float, until_s: float = -math.inf) -> None:
        """Schedule the next batch and start it; nothing is in flight where nothing can run. On virtual time all steps
        in which nothing else happens follow in one go, but for those that would begin at `until_s` or later: then
        somebody may come."""
        assert not self.busy, "one batch at a time"
        self._abort_overdue(now_s)
        plan = self.scheduler.schedule()
        for sequence, reason in plan.hopeless:
            self._end(sequence, FAILED, reason)
        for sequence in plan.admitted:
            if sequence.admitted_s is None:
                sequence.admitted_s, sequence.cached_tokens = now_s, sequence.computed
        self.ledger.note(self.allocator.take_holdings(), len(self.steps))
        if plan:
            ticket = self.executor.launch(plan.batch(len(self.steps)), now_s)
            self._flight = (ticket, plan, now_s)
            self._stalls = 0
            if until_s > now_s and not self._done:  # who ended is told first: somebody may come for it
                self._foresee(ticket, plan, until_s)
        elif self.scheduler.waiting and not plan.hopeless:
            self._stalls += 1
            assert self._stalls < 3, "nothing runs although requests wait: the pool leaks rows"

    def _foresee(self, ticket: Ticket, plan: Plan, until_s: float) -> None:
        """Add the steps that follow the batch in one go, where its executor knows how long they take."""
        if self._foresight is None or (steps := self.scheduler.quiet(plan)) == 1:
            return
        assert ticket.done_s is not None, "who foresees knows when a batch is done"
        until_s = min(until_s, self._deadlines[0][0] if self._deadlines else math.inf)
        ticket.later_s = self._foresight.ahead(ticket.batch, ticket.done_s, steps - 1, until_s)

    def collect(self) -> float | None:
        """Wait for the batch in flight. Returns its predicted end on virtual time, None on a real device."""
        assert self._flight is not None, "nothing is in flight"
        ticket = self._flight[0]
        self._sampled = self.executor.collect(ticket)
        return ticket.ends_s()[-1] if ticket.later_s else ticket.done_s

    def commit(self, now_s: float) -> None:
        """The collected batch was done at `now_s`, and with it those steps that followed it in one go: tokens, memory,
        ends and aborts take effect. An answer whose last token came too late is no answer."""
        assert self._flight is not None and self._sampled is not None, "collect before commit"
        (ticket, plan, start_s), sampled = self._flight, self._sampled
        if not ticket.later_s:
            self._commit(ticket.batch, plan, sampled, start_s, now_s)
            return
        ends_s = ticket.ends_s()
        self._commit(ticket.batch, plan, sampled, start_s, ends_s[0])
        self._coast(ticket.later_s[:-1], ends_s)
        self.scheduler.grow()
        self.ledger.note(self.allocator.take_holdings(), len(self.steps))
        last = Plan(decodes=plan.decodes, context=self.scheduler.decoding.context + len(plan.decodes))
        batch = last.batch(len(self.steps))
        self._flight = (Ticket(batch), last, ends_s[-2])
        self._commit(batch, last, Sampled(None, ticket.later_s[-1]), ends_s[-2], ends_s[-1])

    def _coast(self, took_s: Ordered[float], ends_s: list[float]) -> None:
        """Steps behind the one that was committed last, in which nobody comes or goes; the first ends at ends_s[1]."""
        decoding, usage, pool_tokens = self.scheduler.decoding, self.allocator.usage(), self.allocator.pool_tokens
        count, held, free, cached, swapped = decoding.count, usage.held, usage.free, usage.cached, usage.swapped
        saved, saved_held = usage.saved, usage.saved_held
        for device_s, start_s, end_s in zip(took_s, ends_s, ends_s[1:], strict=False):
            step = decoding.steps.done
            self.scheduler.grow()
            if changes := self.allocator.take_holdings():
                self.ledger.note(changes, step)
                usage = self.allocator.usage()
                held, free, cached = usage.held, usage.free, usage.cached
                saved, saved_held = usage.saved, usage.saved_held
            decoding.steps.done = step + 1
            context, filled = decoding.context, usage.filled + decoding.unnoted
            self.ends_s.append(end_s)
            self.steps.append(
                StepRecord(
                    step,
                    start_s,
                    end_s,
                    max(0.0, end_s - start_s - device_s),
                    device_s,
                    count,
                    0,
                    count,
                    count,
                    context,
                    context,
                    count,
                    0,
                    0,
                    pool_tokens,
                    filled,
                    held,
                    free,
                    cached,
                    swapped,
                    filled + saved,
                    held + saved_held,
                )
            )

    def _commit(self, batch: Batch, plan: Plan, sampled: Sampled, start_s: float, now_s: float) -> None:
        self._abort_overdue(now_s)
        self._flight = self._sampled = None
        for chunk in batch.fresh:
            chunk.sequence.computed = chunk.end
            self.allocator.commit(chunk.sequence)
        fresh, ended = self._emit(batch, sampled)
        self.ends_s.append(now_s)
        self.steps.append(self._step_record(batch, plan, len(batch.decodes) + len(fresh), sampled, start_s, now_s))
        for chunk in batch.fresh:
            if chunk.samples and chunk.sequence.forks:
                self.scheduler.fork(chunk.sequence)
        for sequence in ended:
            if sequence.request.id not in self._leaving:
                self.scheduler.finish(sequence)
                self._end(sequence, FINISHED, sequence.ended)
        for sequence in fresh:
            if not sequence.ended:
                self.scheduler.decode(sequence)
        leaving, self._leaving = self._leaving, {}
        for request_id, reason in leaving.items():
            self._abort(request_id, reason)
        self.ledger.note(self.allocator.take_holdings(), len(self.steps))

    def _emit(self, batch: Batch, sampled: Sampled) -> tuple[list[Sequence], list[Sequence]]:
        """Hand out the tokens of a step. Returns the sequences that will decode from now on, and those of all whose
        answers are complete, in the batch's order."""
        decodes, fresh = batch.decodes, batch.drawn_fresh()
        ended: list[Sequence] = []
        if sampled.tokens is not None:
            for sequence, token in zip((*decodes, *fresh), sampled.tokens, strict=True):
                sequence.emit(token, batch.step)
                if token in sequence.stop_ids:
                    ended.append(sequence)
        else:
            for sequence in fresh:
                sequence.emit(None, batch.step)
        self.scheduler.decoding.steps.done += 1
        ended += self.scheduler.decoding.ending()
        ended += [one for one in fresh if one.ended]
        return fresh, in_order(ended)

    def _step_record(
        self, batch: Batch, plan: Plan, drawn: int, sampled: Sampled, start_s: float, end_s: float
    ) -> StepRecord:
        usage, decoding = self.allocator.usage(), self.scheduler.decoding
        filled = usage.filled + decoding.unnoted
        chunks, count = batch.fresh, len(batch.decodes)
        decode = count + sum(c.length == 1 and c.samples and c.sequence.generated > 1 for c in chunks)
        return StepRecord(
            step=batch.step,
            start_s=start_s,
            end_s=end_s,
            host_s=max(0.0, end_s - start_s - sampled.device_s),
            device_s=sampled.device_s,
            sequences=count + len(chunks),
            prefill_tokens=batch.tokens - decode,
            decode_tokens=decode,
            sampled_tokens=drawn,
            attended_pairs=decoding.context + sum((c.start + 1 + c.end) * c.length // 2 for c in chunks),
            context_tokens=decoding.context + sum(c.end for c in chunks),
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            preemptions=len(plan.preempted),
            pool_tokens=self.allocator.pool_tokens,
            used_tokens=filled,
            held_tokens=usage.held,
            free_tokens=usage.free,
            cached_tokens=usage.cached,
            swapped_tokens=usage.swapped,
            logical_tokens=filled + usage.saved,
            logical_held_tokens=usage.held + usage.saved_held,
            copied_tokens=batch.moved(COPY) if batch.moves else 0,
            swapped_out_tokens=batch.moved(OUT) if batch.moves else 0,
            swapped_in_tokens=batch.moved(IN) if batch.moves else 0,
        )

    def usage(self) -> Usage:
        """Filled, held and free rows at this moment: what the allocator says, and what those that decode have filled
        since it last heard of them."""
        usage = self.allocator.usage()
        return replace(usage, filled=usage.filled + self.scheduler.decoding.unnoted)

    def take_done(self) -> list[RequestRecord]:
        """Of each request that ended since the last call, the record of the sample that ended last. Until the next call
        it has the answer's ids, from which a conversation goes on; after that only where tokens are saved."""
        if not self._save_tokens:
            for record in self._told:
                record.output_token_ids = None
        self._told, self._done = self._done, []
        return self._told

    def _end(self, sequence: Sequence, status: str, reason: str) -> None:
        """It ends, and with it the samples that still wait for its prompt."""
        living = self._living[sequence.request.id]
        for one in (sequence, *sequence.forks):
            living.remove(one)
            record = self._record(one, status, reason)
        if not living:
            del self._living[sequence.request.id]
            record.output_token_ids = sequence.output if record.output_token_ids is None else record.output_token_ids
            self._done.append(record)

    def _record(self, sequence: Sequence, status: str, reason: str) -> RequestRecord:
        request = sequence.request
        times = [at_s for first, end in sequence.spans for at_s in self.ends_s[first:end]]
        record = RequestRecord(
            request=request.id,
            sample=sequence.sample,
            scheduled_s=request.scheduled_s,
            sent_s=request.scheduled_s if request.sent_s is None else request.sent_s,
            input_tokens=sequence.prompt_tokens,
            max_tokens=request.max_tokens,
            admitted_s=sequence.admitted_s,
            first_s=times[0] if times else None,
            last_s=times[-1] if times else None,
            token_s=times,
            output_tokens=sequence.generated,
            cached_tokens=sequence.cached_tokens,
            truncated_tokens=sequence.truncated_tokens,
            preemptions=sequence.preemptions,
            swaps=sequence.swaps,
            status=status,
            reason=reason,
            turn=request.turn,
            prompt_token_ids=sequence.tokens[: sequence.prompt_tokens] if self._save_tokens else None,
            output_token_ids=list(sequence.output) if self._save_tokens else None,
        )
        self.records.append(record)
        return record

    def run(self, end_s: float) -> Run:
        """All that was observed until `end_s`; what is still queued or running becomes `unfinished`."""
        self.take_done()
        self.take_done()
        self.scheduler.drain()
        for sequence in [sequence for samples in self._living.values() for sequence in samples]:
            self._record(sequence, UNFINISHED, "the run ended first")
        self.ledger.note(self.allocator.take_holdings(), len(self.steps))
        return Run(
            requests=sorted(self.records, key=lambda record: (record.request, record.sample)),
            steps=self.steps,
            holds=self.ledger.holds,
            pool_tokens=self.allocator.pool_tokens,
            end_s=end_s,
            external_fragmentation_events=self.allocator.external_fragmentation_events,
        )


Watch = Callable[[Engine, float], None]
"""Called with the engine and the time after every turn of `serve`, to show progress."""


def serve(load: Load, engine: Engine, clock: Clock, watch: Watch | None = None, *, timeout_s: float = math.inf) -> Run:
    """Drive `engine` with `load` until nothing is left to do, or until the first step that ends at `timeout_s` or
    later: what still runs then is unfinished, what was not asked yet is never asked. The only code that moves `clock`.
    """
    now_s = clock.now()
    while now_s < timeout_s:
        while requests := load.due(now_s):  # a rejection frees its client, who may have more to ask at once
            for request in requests:
                engine.submit(request)
            _report_ends(engine, load, now_s)
        next_s = load.next_s()
        engine.launch(now_s, timeout_s if next_s is None else min(next_s, timeout_s))
        if engine.busy:
            now_s = clock.after(engine.collect())
            engine.commit(now_s)
        _report_ends(engine, load, now_s)
        if watch is not None:
            watch(engine, now_s)
        if not engine.pending:
            if (next_s := load.next_s()) is None:
                break
            if next_s > now_s:
                now_s = clock.wait_until(min(next_s, timeout_s))
    return engine.run(now_s)


def _report_ends(engine: Engine, load: Load, now_s: float) -> None:
    for record in engine.take_done():
        load.on_done(record, now_s)
