"""Recorded traffic: the statistics of the traces that are known, what they share, and files with mistakes in them."""

from __future__ import annotations

import csv
import json
import math
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvbench.cli.asking import make_asking
from kvbench.cli.load_config import LoadConfig
from kvbench.errors import KvbenchError
from kvbench.metrics.points import Context, LoadPoint
from kvbench.metrics.records import FINISHED, REJECTED
from kvbench.workloads.datasets import Dataset
from kvbench.workloads.facts import dispersion, facts, hit_rate, variation
from kvbench.workloads.load import OpenLoop, draw_requests
from kvbench.workloads.traces import HASHED, Trace, read_trace

RECORDED = (LoadPoint(),)


@pytest.fixture(scope="module")
def azure(shared_data: Path) -> Path:
    path = shared_data / "traces" / "azure_llm_2023_conv.csv"
    if not path.is_file():
        pytest.skip(f"no trace at {path}")
    return path


@pytest.fixture(scope="module")
def mooncake(shared_data: Path) -> Path:
    path = shared_data / "traces" / "mooncake_synthetic.jsonl"
    if not path.is_file():
        pytest.skip(f"no trace at {path}")
    return path


def played(path: Path, **told: Any) -> list[float]:
    """When the requests of a replay come."""
    config = LoadConfig(loads=told.pop("loads", RECORDED), contexts=None, dataset="azure", dataset_path=path, **told)
    asking = make_asking(config, "cpu", None, 100, frozenset(), {})
    assert config.loads
    times = asking.arrivals(config.loads[0], Context(), 0)
    assert times is not None and len(times) == asking.prompts(config.loads[0], Context(), 0)
    return times


def test_azures_rows_are_read_as_they_stand(azure: Path) -> None:
    trace = read_trace("azure", azure, 100)
    with azure.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row.input_tokens, row.output_tokens) for row in trace.rows] == [
        (int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows
    ]
    first, last = (datetime.fromisoformat(rows[at]["TIMESTAMP"][:26]) for at in (0, -1))
    assert trace.rows[0].at_s == 0
    assert trace.rows[-1].at_s == pytest.approx((last - first).total_seconds(), abs=2e-6)
    assert (trace.longest_input, trace.longest_output) == (14_050, 1_000)


@pytest.mark.parametrize("speed", [1.0, 10.0])
def test_azures_conversations_replay_with_their_own_bursts(azure: Path, speed: float) -> None:
    """CV of the gaps 1.09, index of dispersion 16 at 60 s (and at 6 s where it plays ten times as fast), the partial
    last minute dropped."""
    times = played(azure, trace_scale=speed)
    cv, index = variation([b - a for a, b in pairwise(times)]), dispersion(times, 60 / speed)
    assert cv is not None and index is not None
    assert (round(cv, 2), round(index)) == (1.09, 16)
    assert len(times) == 19_366 and times[-1] == pytest.approx(3_501.721937 / speed)


def test_a_load_hands_out_the_trace_as_it_was_scheduled_on_a_clock_that_stalls(azure: Path) -> None:
    """Requests of a replay at 10 x, each at its own time, however late a slow engine asks for them."""
    config = LoadConfig(
        loads=RECORDED, contexts=None, dataset="azure", dataset_path=azure, trace_scale=10.0, duration_s=12.0
    )
    asking = make_asking(config, "cpu", None, 100, frozenset(), {})
    times = asking.arrivals(RECORDED[0], Context(), 0)
    assert times is not None
    load = OpenLoop(draw_requests(asking.datasets[Context()], len(times), 0, arrivals=times))
    handed, now_s = [], 0.0
    while (next_s := load.next_s()) is not None:
        now_s = max(now_s, next_s) + 0.75
        handed += load.due(now_s)
    assert (
        [request.scheduled_s for request in handed] == times == [t for t in played(azure, trace_scale=10.0) if t <= 12]
    )
    trace = read_trace("azure", azure, 100)
    assert [len(request.prompt) for request in handed] == [row.input_tokens for row in trace.rows[: len(times)]]
    assert [request.output_tokens for request in handed] == [row.output_tokens for row in trace.rows[: len(times)]]
    assert asking.datasets[Context()].longest_input == max(row.input_tokens for row in trace.rows[: len(times)])


def test_speed_rate_duration_and_number_cut_and_stretch_a_trace(azure: Path) -> None:
    whole = played(azure)
    assert played(azure, prompts=50) == whole[:50]
    assert played(azure, duration_s=100.0) == [time for time in whole if time <= 100]
    assert played(azure, trace_scale=0.5, prompts=50) == [time * 2 for time in whole[:50]]
    assert played(azure, prompts=50, duration_s=1e9) == whole[:50]
    stretched = played(azure, loads=(LoadPoint(request_rate=2.0),), arrivals="trace")
    assert (len(stretched) - 1) / stretched[-1] == pytest.approx(2.0)
    assert stretched == pytest.approx([time * stretched[-1] / whole[-1] for time in whole])
    with pytest.raises(KvbenchError, match="has 19366 requests, fewer than --num-prompts 20000"):
        played(azure, prompts=20_000)


def test_a_traces_lengths_may_come_at_another_rate(azure: Path) -> None:
    loads = (LoadPoint(request_rate=5.0), LoadPoint(concurrency=4))
    config = LoadConfig(loads=loads, contexts=None, dataset="azure", dataset_path=azure, arrivals="constant")
    asking = make_asking(config, "cpu", None, 100, frozenset(), {})
    assert asking.prompts(loads[0], Context(), 0) == 150 and asking.prompts(loads[1], Context(), 0) == 12
    assert asking.arrivals(loads[0], Context(), 0) == [(number + 1) / 5 for number in range(150)]
    assert asking.arrivals(loads[1], Context(), 0) is None
    long = LoadConfig(loads=loads[:1], contexts=None, dataset="azure", dataset_path=azure, arrivals="constant",
                      duration_s=1e5)  # fmt: skip
    with pytest.raises(KvbenchError, match="has 19366 requests, and 500000 arrive; lower --duration"):
        make_asking(long, "cpu", None, 100, frozenset(), {}).check(loads[0], Context(), 0)


def test_mooncakes_equal_ids_are_equal_blocks_and_nothing_else_is(mooncake: Path) -> None:
    trace = read_trace("mooncake", mooncake, 5_000, frozenset({7}))
    dataset: Dataset = trace
    drawn = dataset.draw(60, 3)
    blocks: dict[int, tuple[int, ...]] = {}
    tails = 0
    for row, recorded in zip(drawn, trace.rows[:60], strict=True):
        assert len(row.prompt) == recorded.input_tokens and 7 not in row.prompt
        for place, block in enumerate(recorded.blocks):
            tokens = row.prompt[place * HASHED : (place + 1) * HASHED]
            known = blocks.setdefault(block, tokens)
            assert known[: len(tokens)] == tokens[: len(known)]
            tails += len(tokens) < HASHED
    assert len(set(blocks.values())) == len(blocks) and tails
    assert dataset.draw(20, 3) == drawn[:20] and dataset.draw(20, 4) != drawn[:20]


def test_mooncakes_hits_are_those_of_its_ids(mooncake: Path) -> None:
    """Counted out from the file: a full block is found where its id stood in the same place behind the same ids."""
    seen: set[tuple[int, ...]] = set()
    found = asked = 0
    for line in mooncake.read_text().splitlines():
        row = json.loads(line)
        full = row["hash_ids"][: (row["input_length"] - 1) // HASHED]
        paths = [(*full[max(0, end - 3) : end], end) for end in range(1, len(full) + 1)]
        hits = next((place for place, path in enumerate(paths) if path not in seen), len(full))
        found, asked = found + hits * HASHED, asked + row["input_length"]
        seen.update(paths)
    trace = read_trace("mooncake", mooncake, 5_000)
    rate = hit_rate(trace.outline(len(trace.rows), 0), HASHED)
    assert rate == pytest.approx(found / asked, abs=0.002) and 0.6 < found / asked < 0.7
    told = facts(trace.outline(len(trace.rows), 0), trace.played(1.0), 16)
    assert told["requests"] == 3_993 and told["total_input_tokens"] == asked == 61_194_628
    smaller = told["infinite_cache_hit_rate"]
    assert smaller is not None and rate is not None and rate <= smaller < rate + 0.02


def write_run(folder: Path, ids: bool) -> Path:
    rows: dict[str, Any] = {
        "request": [0, 1, 1, 2],
        "sample": [0, 0, 1, 0],
        "scheduled_s": [3.0, 5.0, 5.0, 5.5],
        "input_tokens": [2, 3, 3, 4],
        "output_tokens": [4, 5, 5, 0],
        "max_tokens": [8, 8, 8, 9],
        "status": [FINISHED, FINISHED, FINISHED, REJECTED],
    }
    if ids:
        rows["prompt_token_ids"] = [[1, 2], [1, 2, 3], [1, 2, 3], [1, 2, 3, 4]]
    pq.write_table(pa.table(rows), folder / "requests.parquet")
    return folder


@pytest.mark.parametrize("ids", [False, True])
def test_a_run_of_our_own_is_asked_again(tmp_path: Path, ids: bool) -> None:
    trace = read_trace("run", write_run(tmp_path, ids), 50)
    assert read_trace("run", tmp_path / "requests.parquet", 50) == trace
    assert trace.played(1.0) == [0.0, 2.0, 2.5]
    drawn = trace.draw(3, 0)
    assert [(len(row.prompt), row.output_tokens, row.limit) for row in drawn] == [(2, 4, 8), (3, 5, 8), (4, 9, 9)]
    assert trace.note.startswith("1 of its requests did not finish")
    hits = hit_rate(trace.outline(3, 0), 1)
    if ids:
        assert [row.prompt for row in drawn] == [(1, 2), (1, 2, 3), (1, 2, 3, 4)]
        assert hits == (0 + 2 + 3) / 9
    else:
        assert hits == 0
    with pytest.raises(KvbenchError, match="token id 3 lies outside"):
        read_trace("run", write_run(tmp_path, True), 3)


AZURE, MOON = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n",
    b'{"timestamp": 0, "input_length": 600, "output_length": 1, ',
)
DAMAGED = [
    ("azure", b"", "holds no requests"),
    ("azure", AZURE, "holds no requests"),
    ("azure", b"TIMESTAMP,Context,GeneratedTokens\n", ":1 lacks the column ContextTokens"),
    ("azure", AZURE + b"2023-11-16 18:15:46.68,374\n", ":2 has 2 fields"),
    ("azure", AZURE + b"2023-11-16 18:15:46.68,374,x\n", ":2 has GeneratedTokens 'x'"),
    ("azure", AZURE + b"2023-11-16 18:15:46.68,374,0\n", ":2 has GeneratedTokens '0'"),
    ("azure", AZURE + b"2023-11-16 18:15:46.68,-3,4\n", ":2 has ContextTokens '-3'"),
    ("azure", AZURE + b"2023-11-16 18:15:46.68,1.5,4\n", ":2 has ContextTokens '1.5'"),
    ("azure", AZURE + b"2023-11-16 18:15:46.68,99999999999999999999,4\n", ":2 has ContextTokens"),
    ("azure", AZURE + b"\n2023-13-16 18:15:46.68,3,4\n", ":3 has the TIMESTAMP '2023-13-16"),
    ("azure", AZURE + b"yesterday,3,4\n", ":2 has the TIMESTAMP 'yesterday'"),
    ("azure", AZURE + b"2023-11-16 18:15:46,3,4\n2023-11-16 18:15:46Z,3,4\n", ":3 has the TIMESTAMP"),
    ("azure", AZURE + b"2023-11-16 18:15:46.68,\xff,4\n", ":2 is no UTF-8 text"),
    ("azure", (AZURE + b"2023-11-16 18:15:46.68,3,4\n").replace(b"\n", b"\r"), ":1 is no line of CSV: new-line"),
    ("azure", AZURE + b'"' + b"1" * 200_000 + b'",3,4\n', ":2 is no line of CSV: field larger"),
    ("mooncake", b"", "holds no requests"),
    ("mooncake", b"{\n", ":1 is not JSON"),
    ("mooncake", b"[1]\n", ":1 must be an object"),
    ("mooncake", b"{}\n", ":1 lacks 'timestamp'"),
    ("mooncake", MOON + b'"hash_ids": [1]}\n', ":1 has 1 hash_ids for an input_length of 600"),
    ("mooncake", MOON + b'"hash_ids": [1, 2]}\n' + MOON + b'"hash_ids": [1, "2"]}\n', ":2 must have whole numbers"),
    ("mooncake", MOON.replace(b"600", b"0") + b'"hash_ids": []}\n', ":1 has input_length 0"),
    ("mooncake", MOON.replace(b"600", b"true") + b'"hash_ids": [1]}\n', ":1 has input_length True"),
    ("mooncake", MOON.replace(b" 0,", b" -1,") + b'"hash_ids": [1, 2]}\n', ":1 has the timestamp -1"),
    ("mooncake", MOON.replace(b" 0,", b" NaN,") + b'"hash_ids": [1, 2]}\n', ":1 has the timestamp nan"),
    ("run", b"PAR0", "is no parquet file"),
]


@pytest.mark.parametrize(("kind", "content", "says"), DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_line_is_one_error_with_its_number(tmp_path: Path, kind: str, content: bytes, says: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(KvbenchError) as caught:
        read_trace(kind, path, 100)
    assert str(path) in str(caught.value) and says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["azure", "mooncake", "run"])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, kind: str) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(KvbenchError, match=rf"cannot read --dataset-path {missing}: .*(No such file|is not there)"):
        read_trace(kind, missing, 100)
    if kind == "run":
        with pytest.raises(KvbenchError, match=r"requests\.parquet is not there; name a cell's folder"):
            read_trace(kind, tmp_path, 100)
    else:
        with pytest.raises(KvbenchError, match="is no file"):
            read_trace(kind, tmp_path, 100)


DAMAGED_RUNS = [
    ({"status": None}, "lacks the column status"),
    ({"scheduled_s": [0.0, math.nan]}, "row 1 has scheduled_s nan"),
    ({"input_tokens": [2, 0]}, "row 1 has input_tokens 0"),
    ({"max_tokens": [2, None]}, "row 1 has max_tokens None"),
    ({"prompt_token_ids": [[1, 2], [1]]}, "row 1 has 1 prompt_token_ids but 2 input_tokens"),
    ({"prompt_token_ids": [[1, 2], [1, None]]}, "row 1 must have whole numbers as its prompt_token_ids"),
    ({"prompt_token_ids": [["1", "2"], ["1", "2"]]}, "row 0 must have whole numbers as its prompt_token_ids"),
    ({"prompt_token_ids": [2, 2]}, "row 0 must have whole numbers as its prompt_token_ids"),
    ({"prompt_token_ids": [[1, 2], [1, -2]]}, ": token id -2 lies outside"),
    ({"scheduled_s": [0.0, 1e300]}, "row 1 has scheduled_s 1e+300"),
    ({"scheduled_s": ["0", "1"]}, "row 0 has scheduled_s '0'"),
]


@pytest.mark.parametrize(("changed", "says"), DAMAGED_RUNS)
def test_a_damaged_run_is_one_error_with_its_row(tmp_path: Path, changed: dict[str, Any], says: str) -> None:
    rows: dict[str, Any] = {
        "request": [0, 1],
        "scheduled_s": [0.0, 1.0],
        "input_tokens": [2, 2],
        "output_tokens": [1, 1],
        "max_tokens": [1, 1],
        "status": [FINISHED, FINISHED],
    }
    rows = {name: column for name, column in (rows | changed).items() if column is not None}
    pq.write_table(pa.table(rows), tmp_path / "requests.parquet")
    with pytest.raises(KvbenchError) as caught:
        read_trace("run", tmp_path, 100)
    assert says in str(caught.value)


def test_rows_out_of_order_are_sorted_by_time_and_one_row_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(AZURE + b"2024-05-10 00:00:02.5+00:00,1,2\n2024-05-10 00:00:00.25+00:00,3,4\n")
    trace = read_trace("azure", path, 10)
    assert [(row.at_s, row.input_tokens) for row in trace.rows] == [(0.0, 3), (2.25, 1)]
    assert Trace("azure", trace.rows[:1], 10).rate_per_s is None
    with pytest.raises(KvbenchError, match="--request-rate cannot stretch a trace whose requests all come at once"):
        played(path, loads=(LoadPoint(request_rate=2.0),), arrivals="trace", prompts=1)
