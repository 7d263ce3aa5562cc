"""What there is to say of a run against a server: when requests were sent, how they failed, what the server told.

What a server does not tell is None, never 0. These columns come after those of any run, and take the place of the ones
that only an engine can fill.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import kvbench.metrics.stats as stats
from kvbench.metrics.records import FINISHED, RequestRecord, Run, SampleRecord
from kvbench.metrics.window import Window

Number = float | int | str | None

ERRORS = "errors_"
"""How the columns begin that count the requests of one kind of fault."""


def remote_window(run: Run, requests: Sequence[RequestRecord], window: Window) -> dict[str, Number]:
    """What is said of a window, of the `requests` that belong to it.

    send_lag         sent - scheduled, of every request that was due           p50, p99
    client_lag       sent - due, without the wait that --max-concurrency asks   p99
    service_ttft     first - sent, of those that finished                      p50, p99
    kv_cache_usage   held / pool by the server's own word                      time-weighted mean, peak
    prefix_hit_rate  input tokens found in memory / input tokens, where told
    """
    asked = [request for request in requests if request.sample == 0]
    lags = [request.sent_s - request.scheduled_s for request in asked]
    late = [request.sent_s - request.due_s for request in asked if request.due_s is not None]
    service = [one.first_s - one.sent_s for one in requests if one.status == FINISHED and one.first_s is not None]
    cached = [request for request in asked if request.told_cached_tokens is not None]
    return {
        **{f"send_lag_p{q}_s": stats.percentile(lags, q) for q in (50, 99)},
        "client_lag_p99_s": stats.percentile(late, 99),
        **{f"service_ttft_p{q}_s": stats.percentile(service, q) for q in (50, 99)},
        "prefix_hit_rate": _ratio(sum(one.cached_tokens for one in cached), sum(one.input_tokens for one in cached)),
        **_usage_of_memory([sample for sample in run.samples if sample.end_s in window]),
    }


def remote_counts(run: Run) -> dict[str, Number]:
    """What happened how often in the whole run.

    requests_stopped    finished, but not because they had the length asked for
    requests_overlong   finished, with more tokens than were asked for
    usage_missing       answers without a usage, whose tokens were counted in the stream
    usage_differences   answers whose stream shows other tokens than its usage
    prompt_differences  answers whose prompt the server counted differently
    counters_*          tokens by the server's counters - tokens by its usage
    errors_<kind>       requests that failed or timed out, by kind
    """
    whole = [request for request in run.requests if request.status == FINISHED]
    cached = [request for request in run.requests if request.told_cached_tokens is not None]
    return {
        "preemptions": _total(sample.preemptions for sample in run.samples),
        "swaps": None,
        "peak_running": max((sample.running for sample in run.samples if sample.running is not None), default=None),
        "peak_waiting": max((sample.waiting for sample in run.samples if sample.waiting is not None), default=None),
        "cached_tokens_total": sum(request.cached_tokens for request in cached) if cached else None,
        "external_fragmentation_events": None,
        "steps": None,
        "requests_stopped": sum(request.reason != "length" for request in whole),
        "requests_overlong": sum(one.output_tokens > (one.asked_output_tokens or math.inf) for one in whole),
        "usage_missing": sum(request.told_tokens is None for request in whole),
        "usage_differences": sum(map(_contradicts, whole)),
        "prompt_differences": sum(one.sample == 0 and one.input_tokens != one.asked_tokens for one in whole),
        **_by_counters(run),
        **_errors(request for request in run.requests if request.sample == 0),
    }


def _ratio(part: int, of: int) -> float | None:
    return part / of if of else None


def kind(reason: str) -> str:
    """`http 429` of `http 429: too many requests`."""
    return reason.partition(":")[0]


def _errors(asked: Iterable[RequestRecord]) -> dict[str, int]:
    kinds = Counter(kind(one.reason) for one in asked if one.status != FINISHED and ":" in one.reason)
    return {ERRORS + re.sub(r"\W+", "_", name): count for name, count in sorted(kinds.items())}


def _contradicts(request: RequestRecord) -> bool:
    """Whether usage and stream cannot both be right: token ids are counted, chunks have one token at least."""
    if request.told_tokens is None:
        return False
    if request.streamed_tokens is not None:
        return request.streamed_tokens != request.told_tokens
    return (request.chunks or 0) > request.told_tokens


def _by_counters(run: Run) -> dict[str, int | None]:
    """0 where the server's counters agree with what it told of each answer; other clients of it show here, and so do
    tokens that never arrived."""
    told = {
        "input": (run.server_input_tokens, sum(one.input_tokens for one in run.requests if one.sample == 0)),
        "output": (run.server_output_tokens, sum(one.output_tokens for one in run.requests)),
    }
    return {f"counters_{way}_tokens": None if count is None else count - ours for way, (count, ours) in told.items()}


def _usage_of_memory(samples: Sequence[SampleRecord]) -> dict[str, float | None]:
    """Each sample stands for the time since the one before."""
    known = [sample for sample in samples if sample.kv_cache_usage is not None]
    weights = [known[0].end_s - known[0].start_s] if known else []
    weights += [after.end_s - before.end_s for before, after in pairwise(known)]
    levels = [sample.kv_cache_usage or 0.0 for sample in known]
    mean = (
        sum(level * weight for level, weight in zip(levels, weights, strict=True)) / sum(weights)
        if sum(weights) > 0
        else None
    )
    return {"kv_cache_usage_mean": mean, "kv_cache_usage_peak": max(levels, default=None)}


def _total(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
