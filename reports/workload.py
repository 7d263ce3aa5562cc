"""A workload's numbers, for people a line each beside what they mean, for programs a flat row for each point."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence

from kvbench.reports.plain import as_markdown, as_text
from kvbench.reports.words import DASH, number

Value = str | float | int | None
Row = Mapping[str, Value]

LINES: tuple[tuple[str, str, int], ...] = (
    ("requests", "requests", 0),
    ("conversations", "conversations", 0),
    ("total_input_tokens", "input tokens in all", 0),
    ("total_output_tokens", "output tokens in all", 0),
    ("longest_request_tokens", "longest request: input + output tokens", 0),
    *(
        line
        for way in ("input", "output")
        for line in (
            (f"{way}_mean_tokens", f"{way} tokens: mean", 1),
            (f"{way}_cv", "CV: standard deviation / mean", 2),
            (f"{way}_p50_tokens", "p50", 0),
            (f"{way}_p90_tokens", "p90", 0),
            (f"{way}_p99_tokens", "p99", 0),
            (f"{way}_longest_tokens", "longest", 0),
            (f"{way}_dist_mean_tokens", "mean that it draws from, clipping included", 1),
            (f"{way}_dist_longest_tokens", "longest that can be drawn", 0),
        )
    ),
    ("rate_per_s", "requests/s: (N - 1) / (last - first)", 3),
    ("duration_s", "seconds to the last arrival", 1),
    ("interarrival_cv", "CV of the gaps between arrivals", 2),
    ("dispersion_1s", "index of dispersion at 1 s: variance / mean", 2),
    ("dispersion_10s", "at 10 s", 2),
    ("dispersion_60s", "at 60 s", 2),
    ("infinite_cache_hit_rate", "input tokens found in a prefix cache without limits, %", 1),
)
"""What a person reads: key, words, decimals."""


def render(rows: Sequence[Row], fmt: str) -> str:
    """The rows as `table`, `markdown`, `csv` or `json`; the last two at full precision."""
    if fmt == "json":
        return json.dumps(list(rows), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if fmt == "csv":
        out = io.StringIO()
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue()
    lines = [["", *map(_title, rows)]]
    for key, words, decimals in LINES:
        cells = [_cell(row.get(key), key, decimals) for row in rows]
        if any(cell != DASH for cell in cells):
            lines.append([words, *cells])
    return as_markdown(lines) if fmt == "markdown" else as_text(lines)


def _cell(value: Value, key: str, decimals: int) -> str:
    assert not isinstance(value, str)
    return number(value * 100 if value is not None and key.endswith("_rate") else value, decimals)


def _title(row: Row) -> str:
    """`random 64/40, 4 users`; `azure, trace`."""
    lengths = [row["input_tokens"], row["output_tokens"]]
    prefix = f" after {row['prefix_tokens']}" if row.get("prefix_tokens") else ""
    what = f"{row['dataset']} {lengths[0]}/{lengths[1]}{prefix}" if any(lengths) else str(row["dataset"])
    if row["concurrency"] is not None:
        return f"{what}, {number(float(row['concurrency']))} users"
    rate = f" {row['request_rate']:g}/s" if row["request_rate"] is not None else ""
    return f"{what}, {row['arrivals']}{rate}"
