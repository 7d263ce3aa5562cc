"""What each number of a report means, with its formula: the shown ones only, in the order in which they appear."""

OF_SHARING = ("prefix hits", "KV shared")
"""The terms that only a run with a prefix cache has."""

DEFINITIONS = (
    ("contiguous", "Every request holds one range of rows from its start to its end, as long as its policy reserves."),
    ("paged", "Every request holds blocks of rows from a shared pool and takes another when it needs one."),
    (
        "users, requests/s",
        "The load. Users: so many requests are in flight, each sends its next when one ends. Requests/s: sent by the "
        "clock, however many are still running.",
    ),
    (
        "out tok/s",
        "Output tokens of the window ÷ its seconds, those of unfinished requests included. The total window runs from "
        "the first request scheduled to the last event.",
    ),
    (
        "TTFT, time to first token",
        "First token − the time the request was scheduled. It includes the wait for a slot. p50 and p99 over the "
        "requests of a cell, by linear interpolation.",
    ),
    ("TPOT, time per output token", "(last token − first token) ÷ (n − 1), for answers of n ≥ 2 tokens."),
    (
        "in time",
        "Share of the requests asked that finished and met every SLO that speaks of each request; errors are bad.",
    ),
    ("KV used", "Rows of the KV memory that hold tokens ÷ rows of the pool: time-weighted mean while steps run."),
    (
        "KV wasted",
        "(never filled + rounding) ÷ rows held, time-weighted mean. Never filled: asked for by the policy, unused to "
        "the end. Rounding: held only because the allocator rounds up.",
    ),
    (
        "prefix hits",
        "Input tokens that a request found in the prefix cache when it was first admitted ÷ input tokens of all that "
        "were admitted. What is found again after a preemption counts for nothing.",
    ),
    (
        "KV shared",
        "1 − rows that hold tokens ÷ the same rows counted once for each request that reads them: time-weighted mean.",
    ),
    ("reserved", "Rows held that the same request fills later."),
    ("preempted", "How often a running request lost its memory and was computed again: mean per repeat."),
    ("peak running", "The most requests that ran at once, the largest of the repeats."),
    ("$/1M out", "Price per device-hour ÷ (out tok/s × 3600) × 10⁶."),
    ("repeat", "An independent run with its own seed; every variant gets the same requests under the same seed."),
    (
        "95 % interval",
        "Between repeats, mean ± t(n − 1) · s ÷ √n. Of a ratio: the same on its logarithm, paired by seed, and wider "
        "the more ratios a run compares, so that all of them hold together (Bonferroni). One repeat has none.",
    ),
    ("proven", "The interval of the ratio leaves out 1. Otherwise there is no proven difference."),
    ("failed", "Failed cells and requests carry no number. They are counted, never averaged as 0."),
)
