"""Cases of load and statistics that broke others and belong to no single module."""

from __future__ import annotations

import re
from pathlib import Path

from kvbench.engine.types import Request
from kvbench.metrics.rate import rates
from kvbench.metrics.records import FINISHED, RequestRecord
from kvbench.workloads.arrivals import schedule
from kvbench.workloads.load import OpenLoop

ROOT = Path(__file__).resolve().parent.parent
WAYS = {"in", "out", "total", "input", "output"}


def test_a_client_that_looks_up_seldom_loses_no_request_of_ten_thousand() -> None:
    """vllm#21104: 200/s asked. Each look is up to 7 ms late, and no lateness is added to the next."""
    times = schedule("constant", 10_000, 200.0, seed=0)
    load = OpenLoop(Request(number, (1,), 1, 1, scheduled_s=at_s) for number, at_s in enumerate(times))
    records, now_s = [], 0.0
    while (next_s := load.next_s()) is not None:
        now_s = max(now_s + 0.007, next_s)
        for request in load.due(now_s):
            done = RequestRecord(request.id, request.scheduled_s, now_s, 1, 1, status=FINISHED)
            records.append(done)
            load.on_done(done, now_s)
    found = rates(records)
    assert len(records) == 10_000 and found["rate_held"]
    assert found["achieved_rate_per_s"] is not None and 198 <= found["achieved_rate_per_s"] <= 202
    assert max(one.sent_s - one.scheduled_s for one in records) <= 0.007 + 1e-9


def test_every_rate_of_tokens_says_which_tokens() -> None:
    """InferenceX#293: in, out or total, wherever a person reads of tokens a second."""
    labels = [
        (path.name, label)
        for folder in ("reports", "cli")
        for path in sorted((ROOT / folder).glob("*.[mpth]*"))
        for label in re.findall(r"([\w-]+)[\s\"'(]+(?:tok|tokens)/s\b", path.read_text())
    ]
    assert len(labels) > 20
    assert [(name, label) for name, label in labels if label.lower() not in WAYS] == []
