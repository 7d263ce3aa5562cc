"""Two ways of asking: a fixed number of clients that wait for their answers, or a schedule that waits for nobody.

In both a later turn of a conversation is scheduled when the turn before has ended and was thought about.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from heapq import heappop, heappush

from kvbench.engine.types import GREEDY, Request, Sampling
from kvbench.errors import KvbenchError
from kvbench.metrics.records import FINISHED, RequestRecord
from kvbench.workloads.datasets import Dataset, Drawn, Turn
from kvbench.workloads.streams import stream


class _Issuer(ABC):
    """The requests still to be handed out, and the count of those that were.

    `submitted` have been handed out, `in_flight` of them not yet ended, `remaining` are still to come and `unasked`
    will never come, for the turn before them failed; `last_issued_s` is when the latest one was handed out, None before
    the first.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        requests = list(requests)
        self._left = deque(request for request in requests if not request.turn)
        self._later = {request.id: request for request in requests if request.turn}
        self._turns: list[tuple[float, int, Request]] = []  # a heap: complete, with the time at which they are due
        self._running: dict[int, Request] = {}
        self.submitted = 0
        self.unasked = 0
        self.last_issued_s: float | None = None
        assert len({request.id for request in requests}) == len(requests), "two requests have the same id"

    @property
    def remaining(self) -> int:
        return len(self._left) + len(self._later) + len(self._turns)

    @property
    def in_flight(self) -> int:
        return len(self._running)

    def due(self, now_s: float) -> list[Request]:
        """Every request whose time has come and that has not been handed out, the earliest first."""
        issued = []
        while (at_s := self.next_s()) is not None and at_s <= now_s:
            request = self._next()
            self._running[request.id] = request
            self.submitted += 1
            self.last_issued_s = now_s
            issued.append(request)
        return issued

    @abstractmethod
    def next_s(self) -> float | None:
        """When the next request is due; None where that depends on one that is still running, or none is left."""

    @abstractmethod
    def _next(self) -> Request:
        """The request of `next_s`, with its times."""

    @abstractmethod
    def on_done(self, record: RequestRecord, now_s: float) -> None:
        """A request ended at `now_s`, also by failure or rejection."""

    def _follow(self, record: RequestRecord, now_s: float) -> bool:
        """Whether the conversation of a request that ended goes on. The next turn is asked after the answer that was
        really given; where that failed, the turns after it are never asked."""
        assert record.request in self._running, f"request {record.request} ended without having been handed out"
        before = self._running.pop(record.request)
        turn = self._later.get(record.request + 1)
        if turn is None:
            return False
        if record.status != FINISHED:
            following = itertools.takewhile(self._later.__contains__, itertools.count(turn.id))
            self.unasked += len([self._later.pop(id_) for id_ in list(following)])
            return False
        if record.output_token_ids is None:
            raise KvbenchError("--turns needs the ids of each answer's tokens, which this server does not tell")
        del self._later[turn.id]
        at_s = (now_s if record.last_s is None else record.last_s) + turn.think_s
        prompt = (*before.prompt, *record.output_token_ids, *turn.prompt)
        heappush(self._turns, (at_s, turn.id, replace(turn, prompt=prompt, scheduled_s=at_s)))
        return True


class ClosedLoop(_Issuer):
    """`concurrency` clients, each with one request in flight: the next is scheduled the moment the last one ended. Who
    holds a conversation thinks between its turns, and begins the next one when it has ended.

    All clients start at 0. Fewer conversations than clients is an error, for the concurrency asked would never be
    reached.
    """

    def __init__(self, requests: Iterable[Request], concurrency: int) -> None:
        super().__init__(requests)
        if concurrency < 1:
            raise KvbenchError(f"--concurrency must be at least 1, not {concurrency}")
        check_clients(len(self._left), concurrency)
        self._freed_s = deque([0.0] * concurrency)  # one entry a free slot, in the order in which they became free

    def next_s(self) -> float | None:
        """When the first free slot became free, or an earlier thought ends."""
        times = [self._turns[0][0]] if self._turns else []
        if self._left and self._freed_s:
            times.append(self._freed_s[0])
        return min(times, default=None)

    def _next(self) -> Request:
        if self._turns and self._turns[0][0] == self.next_s():
            return heappop(self._turns)[-1]
        return replace(self._left.popleft(), scheduled_s=self._freed_s.popleft())

    def on_done(self, record: RequestRecord, now_s: float) -> None:
        """A request ended at `now_s`, also by failure or rejection: its slot is free from then on, unless its
        conversation goes on."""
        if not self._follow(record, now_s):
            self._freed_s.append(now_s)


class OpenLoop(_Issuer):
    """Requests at their own `scheduled_s`, whatever became of the others: a late engine meets the whole backlog.

    With `max_concurrency` no more than so many are in flight: who is due then is sent when one of them ends, and its
    latency still counts from when it was scheduled.
    """

    def __init__(self, requests: Iterable[Request], max_concurrency: int | None = None) -> None:
        super().__init__(sorted(requests, key=lambda request: request.scheduled_s))
        if max_concurrency is not None and max_concurrency < 1:
            raise KvbenchError(f"--max-concurrency must be at least 1, not {max_concurrency}")
        self._cap = max_concurrency
        self._freed_s = deque([0.0] * (max_concurrency or 0))  # as a closed loop's

    def next_s(self) -> float | None:
        """When the next request is scheduled, or later, when a slot became free for it."""
        times = [self._turns[0][0]] if self._turns else []
        times += [self._left[0].scheduled_s] if self._left else []
        if not times or (self._cap and not self._freed_s):
            return None
        return max(min(times), self._freed_s[0] if self._cap else 0.0)

    def _next(self) -> Request:
        turn = self._turns and not (self._left and self._left[0].scheduled_s < self._turns[0][0])
        request = heappop(self._turns)[-1] if turn else self._left.popleft()
        if self._cap and (freed_s := self._freed_s.popleft()) > request.scheduled_s:
            return replace(request, sent_s=freed_s)
        return request

    def on_done(self, record: RequestRecord, now_s: float) -> None:
        """A request ended at `now_s`: under a cap another may be sent."""
        self._follow(record, now_s)
        if self._cap:
            self._freed_s.append(now_s)


def check_clients(requests: int, concurrency: int, turns: int = 1) -> None:
    """KvbenchError where so few requests, or conversations of so many turns, would never keep so many clients busy."""
    noun = "requests" if turns == 1 else "conversations"
    if requests < concurrency:
        raise KvbenchError(
            f"{requests} {noun} never reach concurrency {concurrency}; "
            f"raise --num-prompts to {concurrency * turns} or lower --concurrency to {requests}"
        )


def declared_tokens(dataset: Dataset, max_tokens: int | None, *, ignore_eos: bool) -> int:
    """What a request declares where the data set knows no limit of its own; KvbenchError where an answer may be longer
    and nothing ends it."""
    declared = dataset.longest_output if max_tokens is None else max_tokens
    if declared < 1:
        raise KvbenchError(f"--max-tokens must be at least 1, not {declared}")
    if ignore_eos and declared < dataset.longest_output:
        raise KvbenchError(
            f"--max-tokens {declared} is less than the {dataset.longest_output} tokens of the longest answer that "
            f"{dataset.name} asks for; raise it to {dataset.longest_output} or let answers end with --no-ignore-eos"
        )
    return declared


def draw_requests(
    dataset: Dataset,
    count: int,
    seed: int,
    *,
    max_tokens: int | None = None,
    arrivals: list[float] | None = None,
    sampling: Sampling = GREEDY,
    ignore_eos: bool = True,
    stop_ids: frozenset[int] = frozenset(),
    cache_salts: Sequence[str] = ("",),
    samples: int = 1,
    think_s: float = 0.0,
) -> list[Request]:
    """`count` requests with ids from 0, each sampled as `sampling` says but with a seed of its own.

    `max_tokens` is declared by all of them (default: the longest answer `dataset` can draw), `arrivals` gives the
    `scheduled_s` of those that open a conversation or are one (default 0: a closed loop sets it); fewer of them mean
    fewer requests. With `ignore_eos` an answer has exactly its drawn length; without, it ends at one of `stop_ids` or
    at `max_tokens`. The conversations take the `cache_salts` in turns, and each request asks for `samples` answers.
    """
    if count < 1:
        raise KvbenchError(f"--num-prompts must be at least 1, not {count}")
    declared = declared_tokens(dataset, max_tokens, ignore_eos=ignore_eos)
    rows = dataset.draw(count, seed)[: None if arrivals is None else len(arrivals)]
    times = [0.0] * len(rows) if arrivals is None else arrivals[: len(rows)]
    seeds = iter(stream(seed, "sampling").integers(0, 2**63, size=count, dtype="uint64").tolist())
    return [
        Request(
            id=index,
            prompt=asked.prompt,
            max_tokens=max_tokens or asked.limit or declared,
            output_tokens=asked.output_tokens if ignore_eos else None,
            scheduled_s=0.0 if turn else time_s,
            sampling=replace(sampling, seed=next(seeds)),
            stop_ids=frozenset() if ignore_eos else stop_ids,
            cache_salt=cache_salts[number % len(cache_salts)],
            n=samples,
            turn=turn,
            think_s=think_s if turn else 0.0,
        )
        for index, (number, time_s, turn, asked) in enumerate(_turns(rows, times))
    ]


def _turns(rows: Sequence[Drawn], times: Sequence[float]) -> Iterable[tuple[int, float, int, Drawn | Turn]]:
    """Each turn of each conversation, with the conversation's number and time."""
    for number, (row, time_s) in enumerate(zip(rows, times, strict=True)):
        for turn, asked in enumerate((row, *row.later)):
            yield number, time_s, turn, asked
