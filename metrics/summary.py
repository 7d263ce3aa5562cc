"""A run's rows become the numbers of its line in `cells.csv`. Undefined is None, never 0, NaN or infinity."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.metrics.batches import rate_interval
from kvbench.metrics.latency import latencies
from kvbench.metrics.memory import memory_summary
from kvbench.metrics.points import LoadPoint
from kvbench.metrics.rate import rates
from kvbench.metrics.records import ABORTED, FAILED, FINISHED, REJECTED, UNFINISHED, RequestRecord, Run
from kvbench.metrics.remote import remote_counts, remote_window
from kvbench.metrics.slo import ATTAINMENT_TARGET, DEFAULT_SLOS, Slo
from kvbench.metrics.stats import P99_SAMPLES, percentile
from kvbench.metrics.window import STEADY, TOTAL, Window, last_seen_s, steady, total

Number = float | int | str | None


TWIN = "total_window_"
"""Where the headline is of the steady window, each of its numbers has a twin of the total one under this prefix."""


def summarise(
    run: Run,
    *,
    load: LoadPoint | None = None,
    slos: Sequence[Slo] = DEFAULT_SLOS,
    price_usd_per_hour: float | None = None,
    cards: int = 1,
) -> dict[str, Number]:
    """The metric columns of one cell; each formula stands with its function.

    Rates, latencies, attainment and memory are those of the `window`: the steady one where the run under `load` has one
    worth quoting, else the total one, and `window_reason` says why. Counts are of the whole run, so that nothing is
    missing. `price_usd_per_hour` is that of one card, `cards` how many served the run. Requests belong to the window
    they were scheduled in and are followed to their end, tokens to the one their time stamp lies in. Latencies are
    those of each sample; whatever counts requests counts one of several samples once: as finished where all are.
    """
    assert price_usd_per_hour is None or 0 <= price_usd_per_hour < math.inf, price_usd_per_hour
    assert cards >= 1, cards
    assert all(len(request.token_s) == request.output_tokens for request in run.requests), "a token without its time"
    whole = total(run)
    settled, why = (None, "") if load is None else steady(run, load)

    def told(window: Window) -> dict[str, Number]:
        return _of_window(run, window, slos, price_usd_per_hour, cards)

    twins = {} if settled is None else {f"{TWIN}{name}": value for name, value in told(whole).items()}
    window = settled or whole
    counts = {**_counts(run), **(remote_counts(run) if run.remote else {})}
    return {"window": window.name, "window_reason": why, **told(window), **counts, **twins}


def of_total(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A cell's row with the numbers of its total window in the place of those of the steady one."""
    if row.get("window") != STEADY:
        return row
    twins = {name.removeprefix(TWIN): value for name, value in row.items() if name.startswith(TWIN)}
    return {**row, **twins, "window": TOTAL}


def _of_window(
    run: Run, window: Window, slos: Sequence[Slo], price_usd_per_hour: float | None, cards: int
) -> dict[str, Number]:
    """What is said of a window."""
    requests = [request for request in run.requests if window.asked(request)]
    throughput = _throughput(run, requests, window, cards)
    return {
        "window_start_s": window.start_s,
        "duration_s": window.duration_s,
        "window_requests": len(_asked(requests)),
        **_latency(requests),
        **throughput,
        **rates(requests),
        **_within(run, window),
        **_objectives(requests, slos, window),
        **memory_summary(run, window),
        "prefix_hit_rate": _prefix_hit_rate(requests),
        **(remote_window(run, requests, window) if run.remote else {}),
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
        summary[f"{name}_p99_flagged"] = len(values) < P99_SAMPLES if values else None
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
    tokens_in = sum(one.input_tokens for one in run.requests if one.sample == 0 and window.made(one.first_s))
    return tokens_in, sum(window.made(at_s) for request in run.requests for at_s in request.token_s)


def _within(run: Run, window: Window) -> dict[str, Number]:
    """The interval of output tokens/s within the run, by means of `batches` (see there): of a steady window only, for
    the start and the end of a load are no sample of what lies between."""
    token_s = [at_s for request in run.requests for at_s in request.token_s if window.made(at_s)]
    found = None if window.whole else rate_interval(token_s, window.start_s, window.end_s)
    return {
        "output_tokens_per_s_within_low": None if found is None else found.low,
        "output_tokens_per_s_within_high": None if found is None else found.high,
        "batches": None if found is None else found.n,
    }


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


def _counts(run: Run) -> dict[str, Number]:
    """What happened how often in the whole run; submitted = finished + failed + rejected + aborted + unfinished. Of the
    output tokens, those of samples that did not finish are incomplete answers."""
    requests, window = run.requests, total(run)
    asked = _asked(requests)
    by_status = Counter(map(_status, asked))
    statuses = (FINISHED, FAILED, REJECTED, ABORTED, UNFINISHED)
    ends = {f"requests_{status}": by_status[status] for status in statuses}
    assert sum(ends.values()) == len(asked), f"a request has an unknown status: {dict(by_status)}"
    tokens_in, tokens_out = _tokens(run, window)
    return {
        "preemptions": sum(request.preemptions for request in requests),
        "swaps": sum(request.swaps for request in requests),
        "peak_running": max((step.running for step in run.steps), default=0),
        "peak_in_flight": _peak_in_flight(run),
        "requests_submitted": len(asked),
        **ends,
        "cached_tokens_total": sum(request.cached_tokens for request in requests),
        "requests_truncated": sum(samples[0].truncated_tokens > 0 for samples in asked),
        "requests_one_token": sum(
            _status(samples) == FINISHED and all(one.output_tokens == 1 for one in samples) for samples in asked
        ),
        "input_tokens_total": tokens_in,
        "output_tokens_total": tokens_out,
        "output_tokens_incomplete": sum(len(request.token_s) for request in requests if request.status != FINISHED),
        "external_fragmentation_events": run.external_fragmentation_events,
        "steps": len(run.steps),
    }


def _peak_in_flight(run: Run) -> int:
    """The most requests that were sent and had not ended at once, by the exact moments: one that ends when another is
    sent makes room for it. One that failed is in flight until it was last seen, an unfinished one to the end."""
    moments = []
    for samples in _asked(run.requests):
        sent_s = min(one.sent_s for one in samples)
        end_s = max(run.end_s if one.status == UNFINISHED else last_seen_s(one) for one in samples)
        if sent_s < end_s:
            moments += [(sent_s, 1), (end_s, -1)]
    moments.sort()
    return max(itertools.accumulate((step for _, step in moments)), default=0)


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
