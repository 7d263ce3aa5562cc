"""Small run folders made by hand for the tests of the reports, and how their cells become groups and tables.

`serve` is a closed loop in miniature: so many slots, every request the same length, one token a step. Its numbers can
be worked out on paper.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from kvbench.metrics.points import Context, LoadPoint
from kvbench.metrics.records import FINISHED, REJECTED, Hold, RequestRecord, Run, StepRecord
from kvbench.metrics.store import RunFolder
from kvbench.metrics.summary import summarise
from kvbench.reports.context import checks
from kvbench.reports.groups import Results, Variant
from kvbench.reports.sign import WARNING
from kvbench.reports.tables import render
from kvbench.reports.words import THIN

POOL = 80
INPUT, OUTPUT = 4, 4  # 7 rows filled at the end
HELD = {"contiguous": 16, "paged": 8}  # rows a request holds; it asked for all of them
SLOTS = {"contiguous": 5, "paged": 10}


def serve(backend: str, users: int, requests: int, step_s: float) -> Run:
    """`requests` in waves of as many as `users` and slots allow; each takes OUTPUT steps of `step_s`."""
    wave = min(users, SLOTS[backend])
    records, steps, holds = [], [], []
    for start in range(0, requests, wave):
        members = range(start, min(start + wave, requests))
        first_step = start // wave * OUTPUT
        scheduled_s = 0.0 if start < users else first_step * step_s
        tokens_s = [(first_step + i + 1) * step_s for i in range(OUTPUT)]
        for id_ in members:
            records.append(
                RequestRecord(
                    *(id_, scheduled_s, scheduled_s, INPUT, OUTPUT),
                    admitted_s=first_step * step_s,
                    first_s=tokens_s[0],
                    last_s=tokens_s[-1],
                    token_s=tokens_s,
                    output_tokens=OUTPUT,
                    status=FINISHED,
                    reason="length",
                )
            )
            holds.append(Hold(id_, first_step, first_step + OUTPUT, HELD[backend], HELD[backend], INPUT + OUTPUT - 1))
        for i in range(OUTPUT):
            n, held = len(members), len(members) * HELD[backend]
            counts = (n, 0 if i else n * INPUT, n if i else 0, n, 0, 0, n, requests - members[-1] - 1, 0)
            at_s = ((first_step + i) * step_s, (first_step + i + 1) * step_s)
            steps.append(
                StepRecord(first_step + i, *at_s, 0.0, step_s, *counts, POOL, n * (INPUT + i), held, POOL - held)
            )
    return Run(records, steps, holds, POOL, steps[-1].end_s)


def refused(requests: int) -> Run:
    """A run in which every request was rejected on arrival."""
    return Run(
        [RequestRecord(i, 0.0, 0.0, 99, 9, status=REJECTED, reason="too long") for i in range(requests)],
        [],
        [],
        POOL,
        1.0,
    )


def add(
    folder: RunFolder,
    backend: str,
    users: int | None,
    repeat: int,
    run: Run | None = None,
    *,
    status: str = "ok",
    price: float | None = None,
    cell: str = "",
    **columns: Any,
) -> None:
    """Store one cell as a sweep does."""
    leading = {
        "backend": backend,
        "evidence": "measured",
        "reserve": "max" if backend == "contiguous" else None,
        "concurrency": users,
        "request_rate": None,
        "input_tokens": INPUT,
        "output_tokens": OUTPUT,
        "repeat": repeat,
        "seed": 7 + repeat,
        "window": None,
        "status": status,
        "reason": "",
    }
    numbers = {} if run is None else summarise(run, price_usd_per_hour=price)
    name = cell or "-".join(
        str(v) for v in (backend, columns.get("reserve"), users, columns.get("request_rate"), repeat) if v is not None
    )
    folder.write_cell(name, {**leading, **numbers, **columns}, run)


def make(path: Path, **manifest: Any) -> RunFolder:
    """An empty run of a small model."""
    facts = {
        "kvbench_version": "0.1.0",
        "created": "2026-11-29T18:40:00+00:00",
        "command": ["kvbench", "sweep", "--model", "SmolLM2-135M"],
        "model": {"name": "SmolLM2-135M", "parameters": 134_515_008, "weights": "real", "dtype": "bfloat16"},
        "device": {"name": "2 CPU cores", "kind": "cpu", "cores": 2, "memory_bytes": 8 << 30},
        "environment": {"python": "3.11.2", "torch": "2.13.0", "transformers": "5.24.0"},
        "kv": {"pool_tokens": POOL, "pool_bytes": 80 * 23_040, "block_size": 8, "max_model_len": 16},
        "dataset": {"name": "random", "input": "4 tokens", "output": "4 tokens"},
    }
    return RunFolder.create(path, facts | manifest)


def both(
    path: Path, loads: Iterable[int] = (5, 10), repeats: int = 3, faster: float = 1.0, **manifest: Any
) -> RunFolder:
    """Both backends at each load. A step takes 0.1 s, 1 % more in each further repeat; paged steps are `faster`."""
    folder = make(path, **manifest)
    for users in loads:
        for repeat in range(repeats):
            for backend, speed in (("contiguous", 1.0), ("paged", faster)):
                add(folder, backend, users, repeat, serve(backend, users, 20, 0.1 * (1 + repeat / 100) / speed))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return both(tmp_path / "run")


def test_repeats_become_groups_in_the_order_asked(tmp_path: Path) -> None:
    planned = [
        {"backend": backend, "reserve": None if backend == "paged" else "max"} for backend in ("paged", "contiguous")
    ]
    results = Results.of(both(tmp_path / "run", cells=planned))
    assert results.variants == (Variant("paged"), Variant("contiguous", "max"))
    assert results.loads == (LoadPoint(5), LoadPoint(10))
    assert results.contexts == (Context(INPUT, OUTPUT),)
    assert [(results.name(g.variant), g.load.concurrency, len(g.rows)) for g in results.groups] == [
        *(("paged", 5, 3), ("paged", 10, 3), ("contiguous", 5, 3), ("contiguous", 10, 3))
    ]


def test_means_and_intervals_by_hand(folder: RunFolder) -> None:
    """20 requests of 4 tokens in 4 waves of 5, each 4 steps: 80 tokens in 16 steps of 0.1, 0.101 and 0.102 s."""
    speed = (
        Results.of(folder)
        .at(Variant("contiguous", "max"), LoadPoint(5), Context(INPUT, OUTPUT))
        .mean("output_tokens_per_s")
    )
    values = [50.0, 50 / 1.01, 50 / 1.02]
    mean = sum(values) / 3
    spread = (sum((value - mean) ** 2 for value in values) / 2) ** 0.5
    assert speed.value == pytest.approx(mean)
    assert speed.high == pytest.approx(mean + 4.302653 * spread / 3**0.5)  # t(2) at 97.5 %
    assert speed.n == 3


def test_failed_cells_are_counted_and_not_averaged(tmp_path: Path) -> None:
    folder = both(tmp_path / "run", loads=[5])
    add(folder, "paged", 5, 3, status="oom", reason="needs 9 bytes, has 8")
    add(folder, "paged", 5, 4, refused(3), status="rejected", reason="no request finished")
    group = Results.of(folder).at(Variant("paged"), LoadPoint(5), Context(INPUT, OUTPUT))
    assert (len(group.ok), len(group.failed), group.mean("output_tokens_per_s").n) == (3, 2, 3)


def test_the_same_cell_twice_is_a_variant_of_its_own(tmp_path: Path) -> None:
    """vllm#54227: the second copy can be held against the first, and is no further repeat."""
    folder = both(tmp_path / "run", loads=[5])
    for repeat in range(3):
        add(folder, "paged", 5, repeat, serve("paged", 5, 20, 0.1), cell=f"paged-5-{repeat}.2")
    results = Results.of(folder)
    assert [results.name(variant) for variant in results.variants] == ["contiguous", "paged", "paged (2)"]
    assert all(len(group.rows) == 3 for group in results.groups)


def test_policies_are_named_where_there_are_several(tmp_path: Path) -> None:
    folder = both(tmp_path / "run", loads=[5])
    add(folder, "contiguous", 5, 0, serve("contiguous", 5, 20, 0.1), reserve="declared")
    results = Results.of(folder)
    assert [results.name(v) for v in results.variants] == ["contiguous max", "contiguous declared", "paged"]


def test_variants_are_named_by_what_they_add(tmp_path: Path) -> None:
    folder = both(tmp_path / "run", loads=[5], repeats=1)
    more: dict[str, dict[str, Any]] = {
        "a": {"prefix_caching": True},
        "b": {"preemption": "swap"},
        "c": {"prefix_caching": True, "preemption": "swap"},
    }
    for cell, columns in more.items():
        add(folder, "paged", 5, 0, serve("paged", 5, 20, 0.1), cell=cell, **columns)
    results = Results.of(folder)
    names = ["contiguous", "paged", "paged + prefix cache", "paged + prefix cache + swap", "paged + swap"]
    assert sorted(results.name(variant) for variant in results.variants) == names
    rows = {str((row["prefix_caching"], row["preemption"])) for row in json.loads(render(results, "json"))}
    assert len(rows) == 4


def test_prefixes_and_samples_are_columns_where_the_grid_has_several(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    for prefix, samples in ((0, 1), (0, 4), (80, 1), (80, 4)):
        columns: dict[str, Any] = {"prefix_tokens": prefix, "samples": samples}
        add(folder, "paged", 5, 0, serve("paged", 5, 20, 0.1), cell=f"p{prefix}n{samples}", **columns)
    results = Results.of(folder)
    assert results.varied == ("prefix_tokens", "samples")
    assert results.middle_told == "4 tokens in, 4 tokens out, a shared prefix of 80 tokens and 4 samples"
    lines = render(results, "markdown").splitlines()
    assert lines[2].startswith("| users | prefix tokens | samples | requests |")
    assert [line.split("|")[1:4] for line in lines[4:8]] == [
        [" 5 ", f" {prefix} ", f" {samples} "] for prefix in (0, 80) for samples in (1, 4)
    ]
    assert [(row["prefix_tokens"], row["samples"]) for row in json.loads(render(results, "json"))] == [
        *((0, 1), (0, 4), (80, 1), (80, 4))
    ]


def test_the_terminals_table_by_hand(tmp_path: Path) -> None:
    """20 requests run in 4 waves of 5, each 4 steps of 0.1 s: 80 tokens in 1.6 s. 15 requests have their first token
    after a step, the second wave waits for the first: after 0.5 s. 5 x 5.5 of 80 rows are used on average, and all are
    held, 5 x (16 - 7) of them for nothing. At 100 ms a token none is in time. $3.6 an hour for 50 tokens/s."""
    folder = make(tmp_path / "run")
    add(folder, "contiguous", 10, 0, serve("contiguous", 10, 20, 0.1), price=3.6)
    lines = render(Results.of(folder), "table", 200).splitlines()
    assert lines[0] == "Contiguous, reserving max"
    cells = next(line for line in lines if line.startswith("   10")).split()
    assert cells == [
        "10",
        "20",
        "50.0",
        "100",
        "500",
        "100.0",
        "100.0",
        "0.0",
        "34.4",
        "56.2",
        "0.0",
        "5",
        "20.000",
        "0",
    ]


def test_narrow_tables_say_what_they_leave_out(folder: RunFolder) -> None:
    text = render(Results.of(folder), "table", 80)
    assert max(map(len, text.splitlines())) <= 80
    assert "(left out at this width: requests" in text
    assert "\x1b" not in text


def test_a_missing_number_is_a_dash(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    add(folder, "paged", 5, 0, status="oom", reason="no room")
    for fmt in ("table", "markdown"):
        row = render(Results.of(folder), fmt, 200).splitlines()[-1].replace("|", " ").split()
        assert row == ["5", *["–"] * 12, "1"]


def warned(folder: RunFolder) -> str:
    return " | ".join(check.text for check in checks(folder, Results.of(folder)) if check.kind == WARNING)


def test_an_overload_says_what_was_asked_drawn_and_answered(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    for backend, answered in (("contiguous", 7.0), ("paged", 9.9)):
        run = serve(backend, 10, 20, 0.1)
        more: dict[str, Any] = {"request_rate": 10.0, "achieved_rate_per_s": 10.2, "requests_per_s": answered}
        add(folder, backend, None, 0, run, cell=backend, **more)
    assert "contiguous answered 7.0 (asked 10 requests/s, drawn 10.2)" in warned(folder)
    assert "paged answered" not in warned(folder)


def test_repeats_that_differ_by_more_than_seeds_can_are_doubted(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    for repeat, step_s in enumerate((0.1, 0.14, 0.2)):
        add(folder, "paged", 5, repeat, serve("paged", 5, 20, step_s))
        if repeat < 2:
            assert "differ up to" not in warned(folder)
    assert "repeats of one point differ up to 2.0 ×: was the machine busy" in warned(folder).replace(THIN, " ")


def test_objectives_that_fail_are_said(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", slos=["ttft:1.5s", "tpot:0.05s"])
    add(folder, "paged", 5, 0, serve("paged", 5, 20, 0.1))
    add(folder, "contiguous", 5, 0, serve("contiguous", 5, 20, 0.04))
    assert "in time (ttft:1.5s and tpot:0.05s) for 99 % of requests in 1 of 2 cells" in warned(folder)


def test_markdown_has_a_table_per_backend(folder: RunFolder) -> None:
    text = render(Results.of(folder), "markdown")
    tables = text.split("### ")[1:]
    titles = ["Contiguous, reserving max", "Paged", "Where the KV memory went, in % of the pool"]
    assert [table.splitlines()[0] for table in tables] == titles
    for table in tables:
        assert len({line.count("|") for line in table.splitlines() if line.startswith("|")}) == 1


def test_csv_and_json_keep_full_precision_in_base_units(folder: RunFolder) -> None:
    results = Results.of(folder)
    rows = json.loads(render(results, "json"), parse_constant=pytest.fail)
    assert [(row["backend"], row["concurrency"], row["repeats"]) for row in rows] == [
        *(("contiguous", 5, 3), ("contiguous", 10, 3), ("paged", 5, 3), ("paged", 10, 3))
    ]
    speed = results.groups[0].mean("output_tokens_per_s")
    assert (rows[0]["output_tokens_per_s"], rows[0]["output_tokens_per_s_low"]) == (speed.value, speed.low)
    assert rows[0]["usd_per_million_output_tokens"] is rows[0]["usd_per_million_output_tokens_low"] is None
    table = list(csv.DictReader(io.StringIO(render(results, "csv"))))
    assert float(table[0]["output_tokens_per_s_high"]) == speed.high
    assert table[0]["usd_per_million_output_tokens"] == table[2]["reserve"] == ""
    assert [list(row) for row in rows] == [list(row) for row in table]


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)"])
def test_csv_runs_no_formula(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path / "run")
    add(folder, name, 5, 0, cell="a", status="failed")
    (row,) = csv.DictReader(io.StringIO(render(Results.of(folder), "csv")))
    assert row["backend"] == f"'{name}"


def test_rates_and_contexts_label_the_rows(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    for tokens in (64, 128):
        add(
            folder,
            "paged",
            None,
            0,
            serve("paged", 5, 20, 0.1),
            cell=f"i{tokens}",
            request_rate=0.5,
            input_tokens=tokens,
        )
    text = render(Results.of(folder), "table", 200)
    assert "requests/s" in text
    rows = [line.split() for line in text.splitlines() if "0.5" in line]
    assert [row[:3] for row in rows[:2]] == [["0.5", "64", "4"], ["0.5", "128", "4"]]
    assert [row[:4] for row in rows[2:]] == [["paged", "0.5", "64", "4"], ["paged", "0.5", "128", "4"]]
