"""What a report says about memory: columns that say something and no others, the chart of one run, torch's figures."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_reports_page import Page
from test_reports_runs import INPUT, OUTPUT, POOL, add, both, make, serve, warned

from kvbench.metrics.records import ABORTED, FINISHED, Hold, Run
from kvbench.metrics.store import RunFolder
from kvbench.reports.charts import figures
from kvbench.reports.figure import Figure
from kvbench.reports.groups import Results
from kvbench.reports.html import render_report
from kvbench.reports.tables import Table, device_table, pool_table, render
from kvbench.reports.terminal import closing
from kvbench.reports.words import THIN

PARTS = ["used %", "reserved %", "never filled %", "rounding %", "free %"]
OF_HELD = ["efficiency %", "KV wasted %"]


def shown(table: Table | None) -> list[dict[str, str]]:
    """The table's rows by the heads of their columns."""
    assert table is not None
    heads = [*table.label_heads, *(column.head for column in table.columns)]
    return [
        dict(zip(heads, [*labels, *(column.cell(group) for column in table.columns)], strict=True))
        for labels, group in table.rows
    ]


def heads(folder: RunFolder) -> list[str]:
    table = pool_table(Results.of(folder))
    return [column.head for column in table.columns] if table else []


def eventful(cached: int = 0, swapped: int = 0, spared: int = 0, rounding: int = 0) -> Run:
    """One wave of 5 on paged: 20, 25, 30, 35 of 80 rows used, 40 held. In the last two of its four steps there is what
    is asked for; `rounding` of a request's 8 rows were not."""
    run = serve("paged", 5, 5, 0.1)
    run.holds = [Hold(h.request, h.first_step, h.end_step, 8, 8 - rounding, h.final_tokens) for h in run.holds]
    for number, step in enumerate(run.steps):
        late = number >= 2
        step.logical_tokens = step.used_tokens + late * spared
        step.cached_tokens, step.swapped_tokens = late * cached, late * swapped
    return run


def test_the_parts_of_the_pool_by_hand(tmp_path: Path) -> None:
    """5 requests hold 8 rows each, fill 4 to 7 of them (5.5 on average), and asked for 7: 27.5, 7.5, 0, 5 and 40 of 80
    rows. Of the 40 held, 68.75 % are used and 12.5 % wasted."""
    folder = make(tmp_path / "run")
    add(folder, "paged", 5, 0, eventful(rounding=1))
    assert shown(pool_table(Results.of(folder))) == [
        {
            "backend": "paged",
            "users": "5",
            "used %": "34.4",
            "reserved %": "9.4",
            "never filled %": "0.0",
            "rounding %": "6.2",
            "free %": "50.0",
            "efficiency %": "68.8",
            "KV wasted %": "12.5",
            "pre- empted": "0.0",
        }
    ]


def test_a_column_is_shown_where_it_says_something(tmp_path: Path) -> None:
    def told(name: str, run: Run, **columns: Any) -> list[str]:
        folder = make(tmp_path / name)
        add(folder, "paged", 5, 0, run, **columns)
        return heads(folder)

    assert told("plain", eventful()) == [*PARTS, *OF_HELD, "pre- empted"]
    assert told("swapped", eventful(swapped=8)) == [*PARTS, *OF_HELD, "pre- empted", "swapped rows, peak"]
    assert told("shared", eventful(spared=8)) == [*PARTS, *OF_HELD, "KV shared %", "pre- empted"]
    caching = told("nothing found", eventful(), prefix_caching=True)
    assert caching == [*PARTS, "cached %", *OF_HELD, "KV shared %", "pre- empted"]


@pytest.mark.parametrize(("reserve", "told"), [("max", False), ("declared", True), ("pow2", True), ("oracle", True)])
def test_no_external_fragmentation_is_an_answer_of_a_buddy_allocator(reserve: str, told: bool, tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    add(folder, "contiguous", 5, 0, serve("contiguous", 5, 20, 0.1), reserve=reserve)
    add(folder, "paged", 5, 0, serve("paged", 5, 20, 0.1))
    rows = shown(pool_table(Results.of(folder)))
    assert [row.get("external events") for row in rows] == ["0.0" if told else None] * 2


def test_nothing_is_said_of_memory_where_nothing_ran_or_is_known(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    add(folder, "paged", 5, 0, status="oom", reason="no room")
    assert pool_table(Results.of(folder)) is device_table(Results.of(folder)) is None
    text = render_report(folder)
    assert 'id="memory"' not in text and "efficiency" not in text and "torch keeps books" not in text


def test_an_earlier_run_keeps_its_table_without_what_it_did_not_note(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    add(folder, "paged", 5, 0, cell="old", kv_utilisation_mean=0.5, kv_efficiency_mean=0.9, preemptions=2)
    assert heads(folder) == ["used %", "efficiency %", "pre- empted"]


def test_csv_and_json_have_all_columns_about_memory(tmp_path: Path) -> None:
    folder = both(tmp_path / "run", loads=[5], repeats=2)
    names = "reserved internal rounding free cached efficiency fragmentation sharing".split()
    for row in json.loads(render(Results.of(folder), "json")):
        assert {f"kv_{name}_mean" for name in names} | {"swapped_tokens_peak", "host_rss_bytes_peak"} <= row.keys()
        assert row["device_reserved_bytes_peak"] is None
        parts = [row[f"kv_{name}_mean"] for name in ("utilisation", "reserved", "internal", "rounding", "free")]
        assert sum(parts) == pytest.approx(1)
    (head, *_) = csv.reader(io.StringIO(render(Results.of(folder), "csv")))
    assert len(head) == len(set(head)) and "kv_cached_mean_low" in head


def chart(folder: RunFolder) -> Figure:
    figure = figures(folder, Results.of(folder))[-1]
    assert not figure.error
    return figure


def written(figure: Figure) -> list[str]:
    """The words in a picture, without those of its axes."""
    texts = [text.replace(THIN, " ") for text in re.findall(r"<text[^>]*>([^<]*)</text>", figure.svg)]
    return [text for text in texts if re.search("[a-z]", text) and text != "seconds since the start"]


def test_a_plain_run_names_the_parts_that_can_be_seen(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    add(folder, "paged", 5, 0, eventful(rounding=1))
    assert written(chart(folder)) == ["used 34 %", "reserved 9 %", "rounding 6 %", "free 50 %"]
    assert 'viewBox="0 0 360 206"' in chart(folder).svg


def test_what_is_cached_spared_and_swapped_is_drawn_and_told(tmp_path: Path) -> None:
    """In the second half 16 of 80 rows are cached, 8 spared and 120 swapped: 20, 10 and 150 %, and half of that on
    average. What lies outside the pool stands above it."""
    folder = make(tmp_path / "run")
    add(folder, "paged", 5, 0, eventful(cached=16, swapped=120, spared=8))
    figure = chart(folder)
    assert written(figure) == [
        *("used 34 %", "reserved 9 %", "never filled 6 %", "of it cached 10 %", "free 50 %"),
        *("Rows that sharing spares: 5 %, up to 10 %", "Rows swapped to the host: 75 %, up to 150 %"),
    ]
    assert 'viewBox="0 0 360 278"' in figure.svg
    assert figure.subtitle.endswith("above it rows that sharing spares and rows swapped to the host, in % of the pool")
    assert figure.heads == ("from second", *PARTS, "cached %", "spared %", "swapped %")
    ((_, rows),) = figure.numbers
    assert rows[0] == ("0.00", "25.0", "18.8", "6.2", "0.0", "50.0", "0.0", "0.0", "0.0")
    assert rows[-1] == ("0.37", "43.8", "0.0", "6.2", "0.0", "50.0", "20.0", "10.0", "150.0")


def test_what_is_cached_stays_so_while_nothing_runs(tmp_path: Path) -> None:
    run = eventful(cached=16, spared=8)
    run.steps[3].start_s, run.steps[3].end_s, run.end_s = 0.7, 0.8, 0.8
    folder = make(tmp_path / "run")
    add(folder, "paged", 5, 0, run)
    ((_, rows),) = chart(folder).numbers
    idle = next(row for row in rows if row[0] == "0.47")
    assert idle[1:] == ("0.0", "0.0", "0.0", "0.0", "100.0", "20.0", "0.0")


MIB = 1 << 20
TORCH = {"requested": 90, "allocated": 91, "active": 92, "reserved": 128, "inactive_split": 0}


def test_torchs_figures_stand_beside_the_pool_the_largest_of_the_repeats(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", device={"name": "a GPU", "kind": "cuda"})
    for repeat in range(2):
        figures = {f"device_{name}_bytes_peak": (value + repeat) * MIB for name, value in TORCH.items()}
        more: dict[str, Any] = {**figures, "kv_arena_bytes": 5 * MIB // 2, "host_rss_bytes_peak": (700 - repeat) * MIB}
        add(folder, "paged", 5, repeat, eventful(), **more)
    assert shown(device_table(Results.of(folder))) == [
        {
            "backend": "paged",
            "users": "5",
            "KV arena MiB": "2.5",
            "torch requested MiB": "91.0",
            "torch allocated MiB": "92.0",
            "torch active MiB": "93.0",
            "torch reserved MiB": "129.0",
            "torch inactive split MiB": "1.0",
            "process MiB": "700.0",
        }
    ]
    text = render_report(folder)
    Page(text)
    assert "torch reserved MiB" in text and "torch&#39;s figures" in text and "for GPUs only" not in text
    assert "Beside the pool, in MiB at the peak" in render(Results.of(folder), "markdown")
    assert "Beside the pool" not in render(Results.of(folder), "table", 200)


def test_a_page_about_a_cpu_says_that_torch_has_no_figures_of_it(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    add(folder, "paged", 5, 0, eventful(), kv_arena_bytes=5 * MIB, host_rss_bytes_peak=700 * MIB)
    (row,) = shown(device_table(Results.of(folder)))
    assert row == {"backend": "paged", "users": "5", "KV arena MiB": "5.0", "process MiB": "700.0"}
    text = render_report(folder)
    Page(text)
    assert "memory for GPUs only. This run used the CPU, so there are none" in text
    assert "<dt>process</dt>" in text and "torch&#39;s figures" not in text and "<dt>external events</dt>" not in text


def cut_short(whole: int, parts: int) -> Run:
    """20 requests in waves of 5, of 4 tokens each: so many are answered whole, so many more are aborted after `OUTPUT`
    tokens, the others after none."""
    run = serve("contiguous", 5, 20, 0.1)
    for number, request in enumerate(run.requests):
        request.status = FINISHED if number < whole else ABORTED
        if number >= whole + parts:
            request.first_s = request.last_s = None
            request.output_tokens, request.token_s = 0, []
    return run


def test_tokens_of_answers_that_nobody_got_whole_are_told(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    add(folder, "paged", 5, 0, cut_short(19, 1))
    assert "did not finish" not in warned(folder)  # 5 %
    add(folder, "contiguous", 5, 0, cut_short(3, 9))
    line = (
        "in 1 of 2 cells requests that did not finish made up to 75 % of the output tokens (contiguous at 5 users): "
        "out tok/s counts them, nobody got those answers whole"
    )
    assert line in warned(folder).replace(THIN, " ")
    assert f"! {line}" in " ".join(closing(folder, width=500).split("\n"))
    assert line in render_report(folder).replace(THIN, " ")


def test_a_cell_without_any_whole_answer_does_not_show_its_speed_without_a_word(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    add(folder, "paged", 5, 0, cut_short(0, 20), status="failed", reason="no request finished; 20 of 20 like: late")
    assert folder.rows()[0]["output_tokens_per_s"] > 0
    line = "requests that did not finish made up to 100 % of the output tokens (paged at 5 users)"
    assert line in warned(folder).replace(THIN, " ")


def test_the_fixture_is_what_it_says() -> None:
    run = eventful()
    assert [step.used_tokens for step in run.steps] == [5 * (INPUT + i) for i in range(OUTPUT)]
    assert {step.held_tokens for step in run.steps} == {40} and {step.free_tokens for step in run.steps} == {POOL - 40}
