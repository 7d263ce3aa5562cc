"""A recorded run once more: its requests under the same engine and allocator, each step as long as it was.

What was measured by the wall clock is thereby shown to hang on nothing but requests and durations: batches, token times
and memory come out the same. `Tape` is executor and clock in one, since both must know how far the recording has come.
As long as nothing is changed an idle wait ends where the recorded one did, later than it was to; once a duration is
another, what follows is reckoned, and a wait ends when it was to.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import fields

from kvbench.engine.clock import VirtualClock
from kvbench.engine.sequence import stand_ins
from kvbench.engine.types import Batch, Request, Sampled, Ticket
from kvbench.errors import KvbenchError
from kvbench.metrics.records import FINISHED, RequestRecord, Run


class Tape(VirtualClock):
    """Executor and clock of recorded steps. Each sequence drawn gets the token it got; where it lives longer than it
    did, stand-ins follow."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._steps = run.steps
        self._end_s = run.end_s
        self._played = 0
        self._answers = {(one.request, one.sample): one.output_token_ids or [] for one in run.requests}
        self.wait_until(0.0)  # the first look at the clock was as late as the first step

    def launch(self, batch: Batch, now_s: float) -> Ticket:
        if self._played == len(self._steps):
            raise KvbenchError(f"the recording ends after {self._played} steps, and there is more to do")
        step = self._steps[self._played]
        self._played += 1
        done_s = step.end_s if now_s == step.start_s else now_s + (step.end_s - step.start_s)
        return Ticket(batch, done_s, pending=step.device_s)

    def collect(self, ticket: Ticket) -> Sampled:
        assert isinstance(ticket.pending, float)
        tokens = []
        for sequence in ticket.batch.drawn():
            known = self._answers.get((sequence.request.id, sequence.sample), [])
            at = sequence.generated
            tokens.append(known[at] if at < len(known) else stand_ins(sequence, sequence.known, sequence.known + 1)[0])
        return Sampled(tokens, ticket.pending)

    def wait_until(self, at_s: float) -> float:
        before_s = self._steps[self._played - 1].end_s if self._played else 0.0
        if self.now() == before_s:  # so far all is as it was
            ahead = self._steps[self._played :]
            at_s = max(at_s, ahead[0].start_s if ahead else self._end_s)
        return super().wait_until(at_s)


def recorded_requests(
    records: Many[RequestRecord], *, cache_salts: Many[str] = ("",), think_s: float = 0.0, ends_by_length: bool = True
) -> list[Request]:
    """What was asked in a run whose token ids were saved, the turns of a conversation as the load completes them.

    The head of a prompt that was cut is made up again, for it to be cut. What an unfinished answer would have come to
    is not known: as much as it declared. An answer that did not end by length alone ends at the token it ended at."""
    stops = frozenset() if ends_by_length else _stops(records)
    found: list[Request] = []
    conversation = -1
    whole: list[int] = []  # of the turn before, with its answer
    for record in [record for record in records if record.sample == 0]:
        if record.prompt_token_ids is None:
            raise KvbenchError("the run kept no token ids, so its requests are not known; record it with --save-tokens")
        prompt = [0] * record.truncated_tokens + record.prompt_token_ids
        conversation += record.turn == 0
        known = record.output_tokens if record.status == FINISHED and ends_by_length else None
        found.append(
            Request(
                id=record.request,
                prompt=tuple(prompt[len(whole) :] if record.turn else prompt),
                max_tokens=record.max_tokens,
                output_tokens=known or (record.max_tokens if ends_by_length else None),
                scheduled_s=0.0 if record.turn else record.scheduled_s,
                stop_ids=stops,
                cache_salt=cache_salts[conversation % len(cache_salts)],
                n=sum(other.request == record.request for other in records),
                turn=record.turn,
                think_s=think_s if record.turn else 0.0,
            )
        )
        whole = [*prompt, *(record.output_token_ids or [])]
    return found


def _stops(records: Many[RequestRecord]) -> frozenset[int]:
    """The tokens at which answers ended."""
    return frozenset(
        record.output_token_ids[-1] for record in records if record.reason == "stop" and record.output_token_ids
    )


def first_difference(recorded: Run, replayed: Run) -> str:
    """In words: `step 17: running was 4, is 5`; empty where both are the same to the last digit."""
    for kind in ("steps", "requests", "holds"):
        then, now = getattr(recorded, kind), getattr(replayed, kind)
        for number, (was, is_) in enumerate(zip(then, now, strict=False)):
            for field in fields(was):
                if (old := getattr(was, field.name)) != (new := getattr(is_, field.name)):
                    return f"{kind.removesuffix('s')} {number}: {field.name} was {old}, is {new}"[:300]
        if len(then) != len(now):
            return f"there were {len(then):,} {kind}, there are {len(now):,}"
    for name in ("end_s", "external_fragmentation_events", "pool_tokens"):
        if getattr(recorded, name) != getattr(replayed, name):
            return f"{name} was {getattr(recorded, name)}, is {getattr(replayed, name)}"
    return ""
