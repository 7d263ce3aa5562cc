"""What each number of a report means, with its formula: the shown ones only, in the order in which they appear."""

from __future__ import annotations

from collections.abc import Collection

EXTRAS, SAMPLES = "extras", "samples"
"""What shows the terms of variants that add something to their backend, and of prompts with several answers."""
RATE = "drawn_rate_per_s"
"""The column that only an open loop fills."""

SHOWN_WITH = {
    "+ static, + prefix cache, + swap": EXTRAS,
    "samples": SAMPLES,
    "server": "send_lag_p99_s",
    "send lag": "send_lag_p99_s",
    "KV held": "kv_cache_usage_mean",
    "rate held": RATE,
    "prefix hits": "prefix_hit_rate",
    "KV shared": "kv_sharing_mean",
    "blocks saved": "kv_blocks_saved_mean",
    "reserved, never filled, rounding, free": "kv_free_mean",
    "cached": "kv_cached_mean",
    "efficiency": "kv_efficiency_mean",
    "external events": "external_fragmentation_events",
    "swapped rows": "swapped_tokens_peak",
    "KV arena": "kv_arena_bytes",
    "swap space": "swap_space_bytes",
    "torch's figures": "device_reserved_bytes_peak",
    "process": "host_rss_bytes_peak",
    "J/out tok": "joules_per_output_token",
    "mean and peak W": "power_peak_w",
    "clock, °C": "temperature_peak_c",
    "slowed cells": "throttled",
}
"""The terms that not every run has, each with what brings it, mostly a column."""

DEFINITIONS = (
    ("contiguous", "Every request holds one range of rows from its start to its end, as long as its policy reserves."),
    ("paged", "Every request holds blocks of rows from a shared pool and takes another when it needs one."),
    (
        "server",
        "The server of --target, under the same requests. Times are its client's, tokens those of its usage. How it "
        "holds its memory is its own affair, so of the parts of the pool nothing is known.",
    ),
    (
        "+ static, + prefix cache, + swap",
        "What a variant adds. Static: requests join and leave a batch only as a whole. Prefix cache: full blocks of "
        "equal beginnings are stored once. Swap: who loses its memory is copied to host memory and back, not computed "
        "again.",
    ),
    (
        "samples",
        "Answers drawn for each prompt. Each has its own latency and its own tokens; prompts and requests count once, "
        "and a request is in time where all its samples are.",
    ),
    (
        "users, requests/s",
        "The load. Users: so many requests are in flight, each sends its next when one ends. Requests/s: sent by the "
        "clock, however many are still running.",
    ),
    (
        "out tok/s",
        "Output tokens of the window ÷ its seconds, those of unfinished requests included.",
    ),
    (
        "window",
        "What rates, latencies, in time and memory speak of; counts are of the whole run. Total: first request "
        "scheduled to last event. Steady: from when every opening request of a closed loop has ended (of an open loop: "
        "when the first answer is whole), and not before the last change in output tokens per interval, to when the "
        "last request is asked. Tokens belong to the window of their time stamp, requests to the one they were "
        "scheduled in. A load is told by its steady window where every cell of it has one, of at least 30 requests and "
        "three mean durations of a request, else by the total one; cells.csv has both.",
    ),
    (
        "TTFT, time to first token",
        "First token − the time the request was scheduled. It includes the wait for a slot. p50 and p99 over the "
        "requests of a cell, by linear interpolation.",
    ),
    (
        "rate held",
        "Of an open loop: the achieved rate, (N − 1) ÷ (last − first request sent), is at most 2 % below that of the "
        "drawn schedule, (N − 1) ÷ (last − first scheduled). Of conversations the first turns count.",
    ),
    ("TPOT, time per output token", "(last token − first token) ÷ (n − 1), for answers of n ≥ 2 tokens."),
    (
        "in time",
        "Share of the requests asked that finished and met every SLO that speaks of each request; errors are bad.",
    ),
    ("KV used", "Rows of the KV memory that hold tokens ÷ rows of the pool: time-weighted mean while steps run."),
    (
        "KV wasted",
        "(never filled + rounding) ÷ rows held, time-weighted mean.",
    ),
    (
        "send lag",
        "When a request left the client − when it was scheduled, of a server only: it is part of TTFT. The client was "
        "the limit where the p99 of it, without what --max-concurrency held back, is over 5 ms and over 10 % of the "
        "median TTFT.",
    ),
    (
        "KV held",
        "Rows held ÷ rows of the pool, time-weighted mean: of a server by its own word, sampled once a second.",
    ),
    (
        "prefix hits",
        "Input tokens that a request found in the prefix cache when it was first admitted ÷ input tokens of all that "
        "were admitted. What is found again after a preemption counts for nothing.",
    ),
    (
        "KV shared",
        "1 − rows that hold tokens ÷ the same rows counted once for each answer that reads them: time-weighted mean.",
    ),
    (
        "blocks saved",
        "1 − blocks held ÷ the blocks that would be held if nothing were shared: time-weighted mean. What the "
        "paged-attention paper tells of parallel sampling (SOSP'23, section 6.3).",
    ),
    (
        "reserved, never filled, rounding, free",
        "With the used ones they are all rows of the pool: time-weighted means of rows ÷ pool, and 100 % together. "
        "Reserved: held, and filled later by the same request. Never filled: asked for by the policy, unused to the "
        "end. Rounding: held only because the allocator rounds up. Free: held by nobody.",
    ),
    (
        "cached",
        "Free rows whose content a later request could reuse ÷ pool, time-weighted mean. They are part of free.",
    ),
    ("efficiency", "Rows that hold tokens ÷ rows held, time-weighted mean."),
    (
        "external events",
        "Admissions that failed although as many rows were free as the rounded request needs, only not side by side: "
        "mean per repeat. Each wait counts once; blocks can lie anywhere, so paged has none.",
    ),
    (
        "swapped rows",
        "Rows of preempted requests in the host's memory, outside the pool: the most at once, the largest of the "
        "repeats.",
    ),
    (
        "preempted",
        "How often a running request, or one of its samples, lost its memory, to be computed again or swapped back: "
        "mean per repeat.",
    ),
    ("peak running", "The most answers that were in the making at once, the largest of the repeats."),
    (
        "KV arena",
        "Bytes of keys and values for the rows of the pool and one block of padding, the same for each backend.",
    ),
    ("swap space", "Bytes of host memory for the rows of those that were preempted."),
    (
        "torch's figures",
        "Of its allocator on the GPU. Requested: what code asked for. Allocated: the same in whole blocks. Active: "
        "allocated, or freed but awaited by a stream. Reserved: taken from the device. Inactive split: free parts of "
        "blocks, which cannot be given back. Weights included; each at its own peak within a cell, the largest of the "
        "repeats.",
    ),
    (
        "process",
        "The most memory that the whole process had resident within a cell (VmHWM, started anew for each), weights and "
        "libraries included: the largest of the repeats.",
    ),
    (
        "J/out tok",
        "Energy of the device from the start of a cell to its end, prompts and idle moments included, ÷ its output "
        "tokens. Of a GPU the whole board's, of a CPU that of its packages, with all that else ran on them.",
    ),
    ("mean and peak W", "Energy of a cell ÷ its seconds; the most that was seen, looking once a second."),
    ("clock, °C", "Of the GPU's multiprocessors or the CPU's cores, and the hottest sensor, looking once a second."),
    (
        "slowed cells",
        "Cells in which the device was slower than it should be: for heat, a power brake or its hardware's own alarm. "
        "A GPU at its power limit is as fast as it may be and is not counted.",
    ),
    ("$/1M out", "Price per device-hour ÷ (out tok/s × 3600) × 10⁶."),
    ("repeat", "An independent run with its own seed; every variant gets the same requests under the same seed."),
    (
        "95 % interval",
        "Between repeats, mean ± t(n − 1) · s ÷ √n. Of a ratio: the same on its logarithm, paired by seed, and wider "
        "the more ratios a run compares, so that all of them hold together (Bonferroni). One repeat has none but that "
        "of out tok/s within its steady window: the same over 10 to 30 equal parts whose neighbours do not hang "
        "together (batch means).",
    ),
    ("proven", "The interval of the ratio leaves out 1. Otherwise there is no proven difference."),
    ("failed", "Failed cells and requests carry no number. They are counted, never averaged as 0."),
)


def definitions(shown: Collection[str]) -> list[tuple[str, str]]:
    """The terms of a report that shows these columns."""
    return [(term, meaning) for term, meaning in DEFINITIONS if SHOWN_WITH.get(term) in (None, *shown)]
