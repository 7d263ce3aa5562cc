"""Drives a server with a load and turns what comes back into a run, as `serve` does with an engine.

One event loop, a task for each request in flight. Every request is sent once: nothing is tried again, nothing waits in
the client for another request's end, and what goes wrong ends that request with a reason whose first words are its
kind. Times are the client's own, as a user of the server would take them.
"""

from __future__ import annotations

import asyncio
import gc
import math
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from kvbench.engine.clock import WallClock
from kvbench.engine.interfaces import Load
from kvbench.metrics.records import ABORTED, FAILED, FINISHED, UNFINISHED, RequestRecord, Run
from kvbench.workloads import faults
from kvbench.workloads.answer import Answer
from kvbench.workloads.counters import INPUT, OUTPUT, Counters, grown, read, samples
from kvbench.workloads.endpoint import Endpoint, authorization, open_session
from kvbench.workloads.exchange import exchange, fault_of
from kvbench.workloads.faults import Fault

if TYPE_CHECKING:
    import aiohttp

PATIENCE_S = 600.0
"""A request without a --request-timeout of its own is given up after so long: a server that hangs must not hold a run
for ever."""
SAMPLE_S = 1.0
"""Between two looks at the server's counters, which cost it some milliseconds each."""
SETTLE_S = 2.0
"""So long they may take to account for the last answer."""


def serve_by(
    load: Load,
    endpoint: Endpoint,
    *,
    request_timeout_s: float | None = None,
    timeout_s: float = math.inf,
    save_tokens: bool = False,
) -> Run:
    """Put `load` to the server until nothing is left to do, or until `timeout_s`: what still runs then is unfinished,
    what was not asked yet is never asked."""
    open_files()
    gc.collect()
    gc.freeze()  # the collector would walk through torch and all else in the middle of a run, and every send be late
    try:
        return asyncio.run(_Client(load, endpoint, request_timeout_s or PATIENCE_S, timeout_s, save_tokens).run())
    finally:
        gc.unfreeze()


class _Client:
    def __init__(self, load: Load, endpoint: Endpoint, patience_s: float, timeout_s: float, save_tokens: bool) -> None:
        self._load, self._endpoint = load, endpoint
        self._patience_s, self._timeout_s, self._save_tokens = patience_s, timeout_s, save_tokens
        self._clock = WallClock()
        self._records: list[RequestRecord] = []
        self._running: dict[asyncio.Task[None], Answer] = {}
        self._wake = asyncio.Event()
        self._broken: BaseException | None = None
        self._readings: list[tuple[float, Counters]] = []

    async def run(self) -> Run:
        async with open_session(self._endpoint.url) as session:
            watch, first = None, None
            if self._endpoint.counts:
                first = await self._read(session)
            self._clock = WallClock()
            if first is not None:
                watch = asyncio.create_task(self._watch(session))
            try:
                await self._drive(session)
                end_s = self._clock.now()
                await self._stop(end_s)
            finally:
                if watch is not None:
                    watch.cancel()
            last = await self._settled(session) if first is not None else None
        self._records.sort(key=lambda record: (record.request, record.sample))
        return Run(
            requests=self._records,
            steps=[],
            holds=[],
            pool_tokens=None,
            end_s=end_s,
            external_fragmentation_events=None,
            server_input_tokens=grown(first, last, INPUT),
            server_output_tokens=grown(first, last, OUTPUT),
            samples=samples(reading for reading in self._readings if reading[1].at_s <= end_s),
        )

    async def _drive(self, session: aiohttp.ClientSession) -> None:
        """Send what is due when it is due. The schedule is absolute: a late send makes no later one late."""
        while (now_s := self._clock.now()) < self._timeout_s:
            if self._broken is not None:
                raise self._broken
            self._wake.clear()
            for request in self._load.due(now_s):
                answer = Answer(request)
                task = asyncio.create_task(self._ask(session, answer))
                self._running[task] = answer
                task.add_done_callback(self._over)
            next_s = self._load.next_s()
            if next_s is None and not self._running:
                return
            until_s = min(math.inf if next_s is None else next_s, self._timeout_s)
            if until_s > (now_s := self._clock.now()):
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if until_s == math.inf else until_s - now_s):
                        await self._wake.wait()
            else:
                await asyncio.sleep(0)  # what was just issued is sent before the next look at the load

    async def _ask(self, session: aiohttp.ClientSession, answer: Answer) -> None:
        """One request from its sending to its record."""
        request = answer.request
        try:
            patience_s = request.scheduled_s + self._patience_s - self._clock.now()
            await exchange(session, self._endpoint, answer, self._clock.now, patience_s)
            self._end(answer, FINISHED, "")
        except asyncio.CancelledError:
            raise
        except Exception as error:
            fault = fault_of(error)
            if fault is None:
                raise
            if fault.kind == faults.TIMEOUT:
                fault = Fault(fault.kind, f"not finished {self._patience_s:g} s after it was scheduled")
                self._end(answer, ABORTED, str(fault))
            else:
                self._end(answer, FAILED, str(fault))

    def _end(self, answer: Answer, status: str, reason: str) -> None:
        now_s = self._clock.now()
        records = answer.records(status, reason, now_s, save_tokens=self._save_tokens)
        records = [replace(record, reason=self._endpoint.plain(record.reason)) for record in records]
        self._records += records
        last = max(records, key=lambda record: record.last_s or 0.0)
        self._load.on_done(replace(last, output_token_ids=answer.ids(last.sample)), now_s)

    def _over(self, task: asyncio.Task[None]) -> None:
        """A request has its record, and perhaps another is due now; or this program has a fault, which ends the run."""
        if not task.cancelled():
            del self._running[task]
            self._broken = self._broken or task.exception()
        self._wake.set()

    async def _stop(self, end_s: float) -> None:
        """What still runs is unfinished."""
        late = dict(self._running)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        for task, answer in late.items():
            if task.cancelled():
                self._records += answer.records(UNFINISHED, "the run ended first", end_s, save_tokens=self._save_tokens)

    async def _watch(self, session: aiohttp.ClientSession) -> None:
        """Look at the counters now and then; a look that fails is no look."""
        while True:
            asked_s = self._clock.now()
            if (reading := await self._read(session)) is not None:
                self._readings.append((asked_s, reading))
            await asyncio.sleep(max(0.0, asked_s + SAMPLE_S - self._clock.now()))

    async def _read(self, session: aiohttp.ClientSession) -> Counters | None:
        url, headers = self._endpoint.url + "/metrics", authorization(self._endpoint.key)
        try:
            async with asyncio.timeout(5), session.get(url, headers=headers, allow_redirects=False) as response:
                text = (await response.read()).decode(errors="replace")
                return read(text, self._clock.now()) if response.status == 200 else None
        except Exception as error:
            if fault_of(error) is None:
                raise
            return None

    async def _settled(self, session: aiohttp.ClientSession) -> Counters | None:
        """The counters once two looks at them agree."""
        before, began_s = await self._read(session), self._clock.now()
        while self._clock.now() - began_s < SETTLE_S:
            await asyncio.sleep(0.1)
            last = await self._read(session)
            if last is None or (before is not None and last.told == before.told):
                return last
            before = last
        return before


def open_files() -> None:
    """Every request in flight is an open file: allow as many as the system lets."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
