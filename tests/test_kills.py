"""A sweep that is killed again and again and resumed each time ends as the same run as one that nobody disturbed.

The load is a closed loop of a fixed number of requests on a pool so small that paged sequences are preempted. There
the seed alone decides everything but the times: which request runs in which step, what it holds and answers.
"""

from __future__ import annotations

import random
import re
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from nursery import KILLED, Nursery

from kvbench.metrics.records import Run
from kvbench.metrics.store import RunFolder
from kvbench.metrics.summary import summarise
from kvbench.reports.html import render_report

SWEEP = (
    *("sweep", "--resume", "--model", "tiny", "--dtype", "float32", "--input-len", "8", "--output-len", "6"),
    *("--range-ratio", "0.5", "--concurrency", "2,4", "--block-size", "4", "--kv-memory", "128KiB"),
    *("--num-warmups", "1", "--save-tokens", "--price", "2", "--n", "2", "--temperature", "1", "--prefix-len", "4"),
    *("--prefix-caching", "on", "--preemption", "swap", "--swap-space", "64KiB"),
)
TIMES = re.compile(
    r"^window_reason$|_s$|_mean$|_per_s(_per_card)?$|^(goodput|attainment|slo|usd|host_rss)_|^attainment$"
)
"""Columns that no seed fixes: a clock has a part in them (a mean over the steps is weighted by their seconds), or the
rest of the process."""

FIXED = {
    *("preemptions", "peak_running", "requests_finished", "input_tokens_total", "output_tokens_total", "steps"),
    *("kv_utilisation_peak", "kv_fragmentation_peak", "pool_tokens", "external_fragmentation_events", "seed", "order"),
}
SESSION_FACTS = ("created", "finished", "sessions", "timings", "peak_memory_bytes", "command")


def untimed(run: Run) -> Run:
    """The same run on a clock that shows 10 ms more at every moment at which something happened."""
    moments = sorted({0.0, *(step.start_s for step in run.steps), *(step.end_s for step in run.steps)})
    at_s = {moment: number / 100 for number, moment in enumerate(moments)}
    run = deepcopy(run)
    run.end_s = at_s[run.end_s]
    for step in run.steps:
        step.start_s, step.end_s, step.host_s, step.device_s = at_s[step.start_s], at_s[step.end_s], 0.0, 0.0
    for request in run.requests:
        request.token_s = [at_s[moment] for moment in request.token_s]
        for name in ("scheduled_s", "sent_s", "admitted_s", "first_s", "last_s"):
            setattr(request, name, at_s[getattr(request, name)])
    return run


def without_times(folder: RunFolder, path: Path) -> RunFolder:
    """The run once more at `path`, but with every time replaced, and all that follows from times worked out anew."""
    manifest = {name: value for name, value in folder.manifest.items() if name not in SESSION_FACTS}
    copy = RunFolder.create(path, manifest | {"finished": "then"})
    for row in folder.rows():
        run = untimed(folder.run(row["cell"]))
        fixed = {name: value for name, value in row.items() if not TIMES.search(name) and name != "end_s"}
        copy.write_cell(row["cell"], fixed | summarise(run, price_usd_per_hour=2.0), run)
    return copy


def assert_same_but_for_times(found: Path, expected: Path, scratch: Path) -> None:
    rows, others = RunFolder.open(found).rows(), RunFolder.open(expected).rows()
    assert [row.keys() for row in rows] == [row.keys() for row in others]
    fixed = [name for name in rows[0] if not TIMES.search(name)]
    assert set(fixed) >= FIXED
    for row, other in zip(rows, others, strict=True):
        assert {name: row[name] for name in fixed} == {name: other[name] for name in fixed}
    copies = [without_times(RunFolder.open(path), scratch / path.name) for path in (found, expected)]
    assert copies[0].manifest == copies[1].manifest
    for row in rows:
        assert copies[0].run(row["cell"]) == copies[1].run(row["cell"])
    pages = [render_report(copy).replace(copy.path.name, "run") for copy in copies]
    assert pages[0] == pages[1] and len(pages[0]) > 10_000


def killed_and_resumed(
    nursery: Nursery, sweep: tuple[str, ...], out: Path, dice: random.Random, span_s: float, most: int
) -> int:
    """Kill a sweep at a random moment of its first `span_s` seconds and resume it, until it ends; not more often than
    `most` times. Returns how often it was killed. A cell that was once there neither changes nor goes."""
    kills, stored = 0, dict[str, dict[str, Any]]()
    while True:
        code = nursery.run(*sweep, kill_after_s=dice.uniform(0, span_s) if kills < most else None)
        assert code in (0, KILLED), nursery.said
        kills += code == KILLED
        if (out / "run.json").is_file():
            rows = {row["cell"]: row for row in RunFolder.open(out).rows()}
            assert {name: rows.get(name) for name in stored} == stored
            stored = rows
        if code == 0:
            return kills


def kill_often(tmp_path: Path, repeats: int, wanted: int, seed: int) -> None:
    """Whole sweeps, each killed as often as it comes, until there were `wanted` kills; all like an undisturbed one."""
    dice, kills, sweeps = random.Random(seed), 0, 0
    with Nursery(tmp_path) as nursery:
        sweep = (*SWEEP, "--repeats", str(repeats), "--output")
        started_s = time.monotonic()
        assert nursery.run(*sweep, "calm") == 0, nursery.said
        span_s = (time.monotonic() - started_s) / repeats
        while kills < wanted:
            sweeps += 1
            out = tmp_path / f"killed{sweeps}"
            here = killed_and_resumed(nursery, (*sweep, out.name), out, dice, span_s, wanted - kills)
            kills += here
            sessions = RunFolder.open(out).manifest["sessions"]
            assert sum(session["finished"] is None for session in sessions) <= here
            assert [session["cells_before"] for session in sessions] == sorted(s["cells_before"] for s in sessions)
            assert any(row["preemptions"] and row["swaps"] for row in RunFolder.open(out).rows())
            assert any(row["prefix_hit_rate"] for row in RunFolder.open(out).rows())
            assert_same_but_for_times(out, tmp_path / "calm", tmp_path / f"timeless{sweeps}")
    print(f"{kills} kills in {sweeps} sweeps of {4 * repeats} cells, the last in {len(sessions)} sessions")


def test_a_sweep_killed_ten_times_ends_as_if_nobody_had_disturbed_it(tmp_path: Path) -> None:
    kill_often(tmp_path, repeats=3, wanted=10, seed=1)


@pytest.mark.soak
def test_a_sweep_killed_a_hundred_times_ends_as_if_nobody_had_disturbed_it(tmp_path: Path) -> None:
    kill_often(tmp_path, repeats=10, wanted=100, seed=2)
