"""How long one request took, by each of the definitions. All times in seconds.

Only a finished request has latencies. A failed, rejected, aborted or unfinished one has none (not 0): it is counted
instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

from kvbench.metrics.records import FINISHED, RequestRecord


def ttft_s(request: RequestRecord) -> float | None:
    """Time to first token, first - scheduled: it includes a late sender and the queue (no coordinated omission)."""
    if request.status != FINISHED:
        return None
    assert request.first_s is not None, f"request {request.request} finished without a first token"
    return request.first_s - request.scheduled_s


def tpot_s(request: RequestRecord) -> float | None:
    """Time per output token, (last - first) / (n - 1); None below two tokens, however many came in one step."""
    if request.status != FINISHED or request.output_tokens < 2:
        return None
    assert request.first_s is not None, f"request {request.request} finished without a first token"
    assert request.last_s is not None, f"request {request.request} finished without a last token"
    return (request.last_s - request.first_s) / (request.output_tokens - 1)


def e2e_s(request: RequestRecord) -> float | None:
    """End to end, last - scheduled."""
    if request.status != FINISHED:
        return None
    assert request.last_s is not None, f"request {request.request} finished without a last token"
    return request.last_s - request.scheduled_s


def queue_s(request: RequestRecord) -> float | None:
    """Wait for the first batch, admitted - scheduled; None where nobody could see the admission (a server)."""
    if request.status != FINISHED or request.admitted_s is None:
        return None
    return request.admitted_s - request.scheduled_s


def gaps_s(request: RequestRecord) -> list[float]:
    """The gaps between a request's tokens, n - 1 of them (ITL). The time to the first token is none of them."""
    if request.status != FINISHED:
        return []
    return [after - before for before, after in pairwise(request.token_s)]


PER_REQUEST: dict[str, Callable[[RequestRecord], float | None]] = {
    "ttft": ttft_s,
    "tpot": tpot_s,
    "e2e": e2e_s,
    "queue": queue_s,
}


def latencies(requests: Iterable[RequestRecord]) -> dict[str, list[float]]:
    """The samples of each latency by its name: ttft, tpot, e2e, queue one a request at most, itl pooled."""
    requests = list(requests)
    samples = {
        name: [value for request in requests if (value := measure(request)) is not None]
        for name, measure in PER_REQUEST.items()
    }
    return samples | {"itl": [gap for request in requests for gap in gaps_s(request)]}
