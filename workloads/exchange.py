"""One request and its answer over HTTP, and what can go wrong on the way, by its kind."""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from kvbench.engine.clock import WallClock
from kvbench.engine.types import Request
from kvbench.workloads import faults
from kvbench.workloads.answer import Answer
from kvbench.workloads.endpoint import Endpoint
from kvbench.workloads.faults import Fault
from kvbench.workloads.sse import Events

if TYPE_CHECKING:
    import aiohttp

DRAIN_S = 0.05
"""So long the end of a response may come after the end of its answer."""

Now = Callable[[], float]


async def exchange(
    session: aiohttp.ClientSession, endpoint: Endpoint, answer: Answer, now: Now, patience_s: float
) -> None:
    """Send a request and take its answer in. Whatever aiohttp raises passes through."""
    body = endpoint.body(answer.request)
    answer.sent_s = now()
    async with (
        asyncio.timeout(max(0.0, patience_s)) as limit,
        session.post(endpoint.path, data=body, headers=endpoint.headers, allow_redirects=False) as response,
    ):
        if response.status != 200:
            raise Fault(faults.http(response.status), await _said(response) or response.reason or "no word")
        if "json" in response.content_type:
            raise Fault(faults.MALFORMED, f"no event stream but {response.content_type}: {await _said(response)}")
        events = Events()
        async for chunk in response.content.iter_any():
            at_s = now()
            for event in events.feed(chunk):
                answer.take(event, at_s)
            if answer.done:
                break
        else:
            at_s = now()
            for event in events.close():
                answer.take(event, at_s)
        answer.check()
        if not limit.expired():
            limit.reschedule(None)  # the answer is whole: what follows makes it no later
        await _drain(response)


async def ask(session: aiohttp.ClientSession, endpoint: Endpoint, request: Request, patience_s: float) -> Answer:
    """One answer, whole. Raises Fault where it does not come."""
    answer = Answer(request)
    try:
        await exchange(session, endpoint, answer, WallClock().now, patience_s)
    except Exception as error:
        fault = fault_of(error)
        if fault is None:
            raise
        if fault.kind == faults.TIMEOUT:
            fault = Fault(fault.kind, f"no whole answer in {patience_s:g} s")
        raise fault from error
    return answer


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Take in what follows an answer that is whole, at most its last few bytes: only then can its connection carry the
    next one."""
    import aiohttp

    with suppress(TimeoutError, aiohttp.ClientError, OSError):
        async with asyncio.timeout(DRAIN_S):
            async for _ in response.content.iter_any():
                pass


async def _said(response: aiohttp.ClientResponse) -> str:
    """How a body begins."""
    return (await response.content.read(4096)).decode(errors="replace")


def fault_of(error: BaseException) -> Fault | None:
    """Which kind of fault an exception of the network is; None for a fault of this program."""
    import aiohttp

    if isinstance(error, Fault):
        return error
    said = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS):
        return Fault(faults.CLIENT, said)
    if isinstance(error, aiohttp.ClientConnectorSSLError | aiohttp.ClientConnectorCertificateError | ssl.SSLError):
        return Fault(faults.TLS, said)
    if isinstance(error, aiohttp.ClientConnectorError):
        return Fault(faults.REFUSED, said)
    if isinstance(error, TimeoutError):
        return Fault(faults.TIMEOUT, said)
    if isinstance(error, aiohttp.ClientResponseError | aiohttp.http_exceptions.HttpProcessingError):
        return Fault(faults.MALFORMED, said)
    if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ClientOSError | aiohttp.ServerDisconnectedError):
        return Fault(faults.RESET, said)
    if isinstance(error, aiohttp.ClientError | ConnectionError):
        return Fault(faults.RESET, said)
    return None
