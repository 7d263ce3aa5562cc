"""What to beware of where a server was measured: a slow client, faults, answers that are not what was asked for, and
tokens of which it tells more than one story."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvbench.metrics.remote import ERRORS
from kvbench.reports.groups import Group, Results, Row
from kvbench.reports.sign import GOOD, WARNING, Check
from kvbench.reports.words import count, listing, number, percent

LAG_S = 0.005
LAG_SHARE = 0.1
"""The client was the limit where the p99 of its send lag is over both: this time, and this share of the median TTFT."""


def remote(group: Group) -> bool:
    """Whether a server served it."""
    return any("send_lag_p99_s" in row for row in group.rows)


def any_remote(results: Results) -> bool:
    return any(map(remote, results.groups))


def server_line(manifest: Row) -> str:
    """`server smollm2 (vllm 0.32.0) at http://127.0.0.1:8000`; empty without one."""
    server = manifest.get("server")
    if not isinstance(server, dict):
        return ""
    made = " ".join(str(server[key]) for key in ("software", "version") if server.get(key))
    model = str(server.get("model"))
    name = model.rstrip("/").rpartition("/")[2] if model.startswith("/") else model  # a folder by its name
    return f"server {name}{f' ({made})' if made else ''} at {server.get('url')}"


def server_checks(manifest: Row, results: Results) -> list[Check]:
    """Nothing where no server was measured."""
    rows = [row for group in results.groups if remote(group) for row in group.rows]
    if not rows:
        return []
    found = [_client(results), *_errors(rows)]
    if _asked_lengths(manifest):
        found += _said(
            rows,
            "requests_stopped",
            lambda n, of: (
                f"{n} of {of} answers of the server ended by themselves "
                "before they had the length asked for, so it did less work than was asked"
            ),
        )
    found += _said(
        rows,
        "requests_overlong",
        lambda n, of: (
            f"{n} of {of} answers of the server had more tokens than were asked for: it passes over max_tokens, or its "
            "usage is wrong, and out tok/s with it"
        ),
    )
    found += _said(
        rows,
        "usage_missing",
        lambda n, of: f"{n} of {of} answers of the server came without usage: their tokens are chunks of the stream",
    )
    found += _said(
        rows,
        "usage_differences",
        lambda n, of: (
            f"in {n} of {of} answers of the server the stream shows "
            "other tokens than its usage, which is what counts here"
        ),
    )
    found += _said(
        rows,
        "prompt_differences",
        lambda n, of: f"{n} of {of} prompts had other lengths on the server than in the workload: the server's count",
    )
    return found + _counters(rows)


def _asked_lengths(manifest: Row) -> bool:
    effective = manifest.get("effective")
    return isinstance(effective, dict) and bool(effective.get("ignore_eos"))


def _client(results: Results) -> Check:
    """Whether requests left late, which would make the server look slow."""
    slow: list[tuple[float, Group]] = []
    worst_s = 0.0
    for group in filter(remote, results.groups):
        for row in group.ok:
            lag_s, ttft_s = row.get("client_lag_p99_s"), row.get("ttft_p50_s")
            worst_s = max(worst_s, lag_s or 0.0)
            if lag_s is not None and lag_s > LAG_S and ttft_s is not None and lag_s > LAG_SHARE * ttft_s:
                slow.append((lag_s, group))
    if not slow:
        return Check(GOOD, f"requests left on time: the client's lag p99 up to {number(worst_s * 1e3, 1)} ms")
    lag_s, group = max(slow, key=lambda late: late[0])
    where = f"{results.name(group.variant)} at {group.load}"
    return Check(
        WARNING,
        f"the client was the limit in {count(len(slow), 'cell')}: 1 % of requests left {number(lag_s * 1e3, 1)} ms "
        f"late or more ({where}), which counts as the server's TTFT; give the client more CPU or a smaller load",
    )


def _errors(rows: Sequence[Row]) -> list[Check]:
    """`faults of the server's requests: 12 refused, 3 http 429`."""
    kinds: Counter[str] = Counter()
    for row in rows:
        for name, value in row.items():
            if name.startswith(ERRORS) and value:
                kinds[name.removeprefix(ERRORS).replace("_", " ")] += int(value)
    said = listing([f"{n:,} {kind}" for kind, n in kinds.most_common()])
    return [Check(WARNING, f"requests to the server that failed, by kind: {said}")] if kinds else []


def _said(rows: Sequence[Row], column: str, words: Callable[[str, str], str]) -> list[Check]:
    n, of = (sum(int(row.get(name) or 0) for row in rows) for name in (column, "requests_finished"))
    return [Check(WARNING, words(f"{n:,}", f"{of:,}"))] if n else []


def _counters(rows: Sequence[Row]) -> list[Check]:
    """Whether the server's own counters agree with what it told of each answer."""
    gaps: Mapping[str, list[Any]] = {
        way: [row for row in rows if row.get(f"counters_{way}_tokens") is not None] for way in ("input", "output")
    }
    if not any(gaps.values()):
        return [Check(WARNING, "the server has no counters of tokens that are known here to check its usage against")]
    off = []
    for way, known in gaps.items():
        gap = sum(abs(int(row[f"counters_{way}_tokens"])) for row in known)
        if gap:
            of = sum(int(row.get(f"{way}_tokens_total") or 0) for row in known)
            share = f" ({percent(gap / of, 1)})" if of else ""
            off.append(f"{gap:,} {way} tokens{share}")
    if off:
        text = f"the server's own counters differ by {listing(off)} from its answers: other clients, or lost tokens"
        return [Check(WARNING, text)]
    return [Check(GOOD, "the server's own counters of tokens agree with its answers")]
