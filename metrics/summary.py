"""A run's rows become the numbers of its line in `cells.csv`. Undefined is None, never 0, NaN or infinity."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from kvbench.metrics.latency import latencies
from kvbench.metrics.memory import memory_summary
from kvbench.metrics.rate import rates
from kvbench.metrics.records import ABORTED, FAILED, FINISHED, REJECTED, UNFINISHED, RequestRecord, Run
from kvbench.metrics.slo import ATTAINMENT_TARGET, DEFAULT_SLOS, Slo
from kvbench.metrics.stats import percentile
from kvbench.metrics.window import Window, total

Number = float | int | str | None


def summarise(
    run: Run, *, slos: Sequence[Slo] = DEFAULT_SLOS, price_usd_per_hour: float | None = None, cards: int = 1
) -> dict[str, Number]:
    """The metric columns of one cell over its total window; each formula stands with its function.

    `price_usd_per_hour` is that of one card, `cards` how many served the run. Requests belong to the window they were
    scheduled in and are followed to their end, tokens to the one their time stamp lies in. Latencies are those of each
    sample; whatever counts requests counts one of several samples once, by the worst that became of them.
    """
    assert price_usd_per_hour is None or 0 <= price_usd_per_hour < math.inf, price_usd_per_hour
    assert cards >= 1, cards
    assert all(len(request.token_s) == request.output_tokens for request in run.requests), "a token without its time"
    window = total(run)
    requests = [request for request in run.requests if request.scheduled_s in window]
    throughput = _throughput(run, requests, window, cards)
    return {
        "window": window.name,
        "duration_s": window.duration_s,
        **_latency(requests),
        **throughput,
        **rates(requests),
        **_objectives(requests, slos, window),
        **memory_summary(run, window),
        **_counts(run, requests, window),
        "usd_per_million_output_tokens": usd_per_million_output_tokens(
            throughput["output_tokens_per_s"], price_usd_per_hour, cards
        ),
    }


def usd_per_million_output_tokens(
    output_tokens_per_s: float | None, price_usd_per_hour: float | None, cards: int
) -> float | None:
    """Price per card-hour × cards / (output tokens/s × 3600) × 10⁶; None without a price or without tokens."""
    if price_usd_per_hour is None or not output_tokens_per_s:
        return None
    return price_usd_per_hour * cards / (output_tokens_per_s * 3600) * 1e6


def _latency(requests: Sequence[RequestRecord]) -> dict[str, Number]:
    summary: dict[str, Number] = {}
    for name, values in latencies(requests).items():
        summary[f"{name}_mean_s"] = math.fsum(values) / len(values) if values else None
        for q in (50, 90, 99):
            summary[f"{name}_p{q}_s"] = percentile(values, q)
        summary[f"{name}_samples"] = len(values)
    return summary


def _throughput(run: Run, requests: Sequence[RequestRecord], window: Window, cards: int) -> dict[str, float | None]:
    """Rates over the window. Tokens of requests that did not finish count; an input counts at its first token."""

    def per_s(count: int) -> float | None:
        return count / window.duration_s if window.duration_s > 0 else None

    tokens_in, tokens_out = _tokens(run, window)
    return {
        "output_tokens_per_s": per_s(tokens_out),
        "output_tokens_per_s_per_card": None if (rate := per_s(tokens_out)) is None else rate / cards,
        "input_tokens_per_s": per_s(tokens_in),
        "total_tokens_per_s": per_s(tokens_in + tokens_out),
        "requests_per_s": per_s(sum(_status(samples) == FINISHED for samples in _asked(requests))),
    }


def _tokens(run: Run, window: Window) -> tuple[int, int]:
    """Input and output tokens of the window; a prompt counts once, however many samples are drawn from it."""
    tokens_in = sum(one.input_tokens for one in run.requests if one.sample == 0 and one.first_s in window)
    return tokens_in, sum(at_s in window for request in run.requests for at_s in request.token_s)


def _objectives(requests: Sequence[RequestRecord], slos: Sequence[Slo], window: Window) -> dict[str, Number]:
    """Goodput = requests that meet every SLO / window, attainment = good / attempted, where errors are bad.

    `slo_met`: the attainment reaches its target and each percentile SLO holds. Their percentiles, with errors as
    +infinity, stand in columns of their own (`slo_ttft_p99_s`).
    """
    each = [slo for slo in slos if slo.percentile is None]
    asked = _asked(requests)
    good = sum(
        _status(samples) == FINISHED and all(slo.met_by(one) for slo in each for one in samples) for samples in asked
    )
    attainment = good / len(asked) if asked else None
    holds = [attainment >= ATTAINMENT_TARGET] if each and attainment is not None else []
    percentiles: dict[str, Number] = {}
    for slo in slos:
        if slo.percentile is not None:
            percentiles[f"slo_{slo.metric}_{slo.rank}_s"], held = slo.judge(requests)
            holds.append(held)
    return {
        "goodput_per_s": good / window.duration_s if window.duration_s > 0 else None,
        "attainment": attainment,
        "slo_met": all(holds) if requests and slos else None,
        **percentiles,
    }


def _counts(run: Run, requests: Sequence[RequestRecord], window: Window) -> dict[str, Number]:
    """What happened how often; submitted = finished + failed + rejected + aborted + unfinished. Of the output tokens,
    those of samples that did not finish are incomplete answers."""
    asked = _asked(requests)
    by_status = Counter(map(_status, asked))
    statuses = (FINISHED, FAILED, REJECTED, ABORTED, UNFINISHED)
    ends = {f"requests_{status}": by_status[status] for status in statuses}
    assert sum(ends.values()) == len(asked), f"a request has an unknown status: {dict(by_status)}"
    tokens_in, tokens_out = _tokens(run, window)
    steps = [step for step in run.steps if step.end_s in window]
    return {
        "preemptions": sum(request.preemptions for request in requests),
        "swaps": sum(request.swaps for request in requests),
        "peak_running": max((step.running for step in steps), default=0),
        "requests_submitted": len(asked),
        **ends,
        "cached_tokens_total": sum(request.cached_tokens for request in requests),
        "prefix_hit_rate": _prefix_hit_rate(requests),
        "requests_truncated": sum(samples[0].truncated_tokens > 0 for samples in asked),
        "requests_one_token": sum(
            _status(samples) == FINISHED and all(one.output_tokens == 1 for one in samples) for samples in asked
        ),
        "input_tokens_total": tokens_in,
        "output_tokens_total": tokens_out,
        "output_tokens_incomplete": sum(
            at_s in window for request in run.requests if request.status != FINISHED for at_s in request.token_s
        ),
        "external_fragmentation_events": run.external_fragmentation_events,
        "steps": len(steps),
    }


def _prefix_hit_rate(requests: Sequence[RequestRecord]) -> float | None:
    """Input tokens found in memory / input tokens, of the requests that were admitted; of several samples the one that
    looked."""
    admitted = [request for request in requests if request.admitted_s is not None and request.sample == 0]
    asked = sum(request.input_tokens for request in admitted)
    return sum(request.cached_tokens for request in admitted) / asked if asked else None


def _asked(requests: Sequence[RequestRecord]) -> list[list[RequestRecord]]:
    """The samples of each request."""
    found: dict[int, list[RequestRecord]] = {}
    for request in requests:
        found.setdefault(request.request, []).append(request)
    return list(found.values())


def _status(samples: Sequence[RequestRecord]) -> str:
    """What became of a request: `finished` where all its samples did, else what became of the first that did not."""
    return next((one.status for one in samples if one.status != FINISHED), FINISHED)
