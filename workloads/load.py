"""Two ways of asking: a fixed number of clients that wait for their answers, or a schedule that waits for nobody."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvbench.engine.types import GREEDY, Request, Sampling
from kvbench.errors import KvbenchError
from kvbench.metrics.records import RequestRecord
from kvbench.workloads.datasets import Dataset
from kvbench.workloads.streams import stream


class _Issuer:
    """The requests still to be handed out, and the count of those that were.

    `submitted` have been handed out, `in_flight` of them not yet ended, `remaining` are still to come; `last_issued_s`
    is when the latest one was handed out, None before the first.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        self._left = deque(requests)
        self._running: set[int] = set()
        self.submitted = 0
        self.last_issued_s: float | None = None
        assert len({request.id for request in self._left}) == len(self._left), "two requests have the same id"

    @property
    def remaining(self) -> int:
        return len(self._left)

    @property
    def in_flight(self) -> int:
        return len(self._running)

    def on_done(self, record: RequestRecord, now_s: float) -> None:
        """A request ended at `now_s`, well or not."""
        assert record.request in self._running, f"request {record.request} ended without having been handed out"
        self._running.remove(record.request)

    def _issue(self, now_s: float) -> Request:
        request = self._left.popleft()
        self._running.add(request.id)
        self.submitted += 1
        self.last_issued_s = now_s
        return request


class ClosedLoop(_Issuer):
    """`concurrency` clients, each with one request in flight: the next is scheduled the moment the last one ended.

    All clients start at 0. Fewer requests than clients is an error, for the concurrency asked would never be reached.
    """

    def __init__(self, requests: Iterable[Request], concurrency: int) -> None:
        super().__init__(requests)
        if concurrency < 1:
            raise KvbenchError(f"--concurrency must be at least 1, not {concurrency}")
        check_clients(self.remaining, concurrency)
        self._freed_s = deque([0.0] * concurrency)  # one entry a free slot, in the order in which they became free

    def due(self, now_s: float) -> list[Request]:
        """A request for every free slot, scheduled at the time its slot became free."""
        issued = []
        while self._left and self._freed_s and self._freed_s[0] <= now_s:
            issued.append(replace(self._issue(now_s), scheduled_s=self._freed_s.popleft()))
        return issued

    def next_s(self) -> float | None:
        """When the first free slot became free; None while all are taken, or when nothing is left to ask."""
        return self._freed_s[0] if self._left and self._freed_s else None

    def on_done(self, record: RequestRecord, now_s: float) -> None:
        """A request ended at `now_s`, also by failure or rejection: its slot is free from then on."""
        super().on_done(record, now_s)
        self._freed_s.append(now_s)


class OpenLoop(_Issuer):
    """Requests at their own `scheduled_s`, whatever became of the others: a late engine meets the whole backlog."""

    def __init__(self, requests: Iterable[Request]) -> None:
        super().__init__(sorted(requests, key=lambda request: request.scheduled_s))

    def due(self, now_s: float) -> list[Request]:
        """Every request scheduled at or before `now_s` that has not been handed out."""
        issued = []
        while self._left and self._left[0].scheduled_s <= now_s:
            issued.append(self._issue(now_s))
        return issued

    def next_s(self) -> float | None:
        """When the next request is scheduled; None when none is left."""
        return self._left[0].scheduled_s if self._left else None


def check_clients(requests: int, concurrency: int) -> None:
    """KvbenchError where so few requests would never keep so many clients busy."""
    if requests < concurrency:
        raise KvbenchError(
            f"{requests} requests never reach concurrency {concurrency}; "
            f"raise --num-prompts to {concurrency} or lower --concurrency to {requests}"
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
) -> list[Request]:
    """`count` requests with ids from 0, each sampled as `sampling` says but with a seed of its own.

    `max_tokens` is declared by all of them (default: the longest answer `dataset` can draw), `arrivals` gives their
    `scheduled_s` (default 0: a closed loop sets it). With `ignore_eos` an answer has exactly its drawn length; without,
    it ends at one of `stop_ids` or at `max_tokens`. The requests take the `cache_salts` in turns, and each asks for
    `samples` answers.
    """
    if count < 1:
        raise KvbenchError(f"--num-prompts must be at least 1, not {count}")
    declared = declared_tokens(dataset, max_tokens, ignore_eos=ignore_eos)
    times = [0.0] * count if arrivals is None else arrivals
    assert len(times) == count, f"{len(times)} arrivals for {count} requests"
    seeds = stream(seed, "sampling").integers(0, 2**63, size=count, dtype="uint64").tolist()
    return [
        Request(
            id=index,
            prompt=drawn.prompt,
            max_tokens=max_tokens or drawn.limit or declared,
            output_tokens=drawn.output_tokens if ignore_eos else None,
            scheduled_s=time_s,
            sampling=replace(sampling, seed=sampling_seed),
            stop_ids=frozenset() if ignore_eos else stop_ids,
            cache_salt=cache_salts[index % len(cache_salts)],
            n=samples,
        )
        for index, (drawn, time_s, sampling_seed) in enumerate(
            zip(dataset.draw(count, seed), times, seeds, strict=True)
        )
    ]
