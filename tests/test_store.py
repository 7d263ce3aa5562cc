"""The run folder: what goes in comes out, nothing is half written, and what is wrong with one is said in a line."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from kvbench.errors import KvbenchError
from kvbench.metrics.records import Hold, RequestRecord, Run, SampleRecord, StepRecord
from kvbench.metrics.store import LEADING_COLUMNS, SCHEMA_VERSION, RunFolder, latest

ROOT = Path(__file__).resolve().parent.parent
THIRD = 1 / 3


def a_run() -> Run:
    requests = [
        RequestRecord(0, 0.0, 0.0, 3, 9, 0, 0.1, THIRD, 0.5, [THIRD, 0.5], 2, status="finished", reason="length"),
        RequestRecord(1, 0.1, 0.1, 4, 9, status="rejected", reason='too long, "by far"', truncated_tokens=2),
    ]
    steps = [
        StepRecord(0, 0.0, THIRD, 0.1, 0.2, 1, 3, 0, 1, 6, 3, 1, 0, 0, 16, 3, 8, 8),
        StepRecord(1, THIRD, 0.5, 0.1, 0.2, 1, 0, 1, 1, 4, 4, 1, 0, 0, 16, 4, 8, 8),
    ]
    return Run(requests, steps, [Hold(0, 0, 2, 8, 6, 4)], 16, 0.75, 5)


def names(folder: Path) -> list[str]:
    """All that lies in a folder, but for the file that a writer locks."""
    return sorted(entry.name for entry in folder.iterdir() if entry.name != ".lock")


def test_round_trip_is_exact(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "deep" / "run", {"seed": 7, "model": "tiny é"})
    row: dict[str, object] = {"backend": "paged", "status": "ok", "ttft_p50_s": THIRD, "tpot_p50_s": None, "seed": 3}
    folder.write_cell("paged-c1", row, a_run())

    again = RunFolder.open(folder.path)
    assert again.manifest == {"schema_version": SCHEMA_VERSION, "seed": 7, "model": "tiny é"}
    assert again.run("paged-c1") == a_run()
    numbers = {"pool_tokens": 16, "end_s": 0.75, "external_fragmentation_events": 5}
    assert again.rows() == [{"cell": "paged-c1", **row, **numbers}]
    assert names(folder.path) == ["cells", "cells.csv", "run.json"]


def test_saved_tokens_come_back(tmp_path: Path) -> None:
    run = a_run()
    run.requests[0].prompt_token_ids, run.requests[0].output_token_ids = [5, 6, 7], []
    folder = RunFolder.create(tmp_path / "run", {})
    folder.write_cell("a", {}, run)
    assert folder.run("a") == run


def test_an_empty_run_comes_back(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    folder.write_cell("a", {}, Run([], [], [], 16, 0.0))
    assert folder.run("a") == Run([], [], [], 16, 0.0)


def test_columns_keep_their_names_and_types(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    folder.write_cell("a", {}, a_run())
    cell = folder.path / "cells" / "a"
    requests, steps = pq.read_schema(cell / "requests.parquet"), pq.read_table(cell / "steps.parquet")
    assert requests.names == [
        *("request", "sample", "scheduled_s", "sent_s", "admitted_s", "first_s", "last_s", "token_s", "input_tokens"),
        *("output_tokens", "cached_tokens", "preemptions", "status", "reason", "max_tokens", "truncated_tokens"),
        *("swaps", "turn"),
    ]
    assert str(requests.field("first_s").type) == "double"
    expected = (
        "step, start_s, end_s, host_s, device_s, sequences, prefill_tokens, decode_tokens, sampled_tokens, "
        "attended_pairs, context_tokens, running, waiting, preemptions, pool_tokens, used_tokens, reserved_tokens, "
        "internal_tokens, rounding_tokens, free_tokens, cached_tokens, swapped_tokens, logical_tokens, "
        "logical_held_tokens, copied_tokens, swapped_out_tokens, swapped_in_tokens"
    ).split(", ")
    assert [name for name in steps.column_names if name != "held_tokens"] == expected
    parts = steps.select(["used_tokens", "reserved_tokens", "internal_tokens", "rounding_tokens", "free_tokens"])
    assert [tuple(row.values()) for row in parts.to_pylist()] == [(3, 1, 2, 2, 8), (4, 0, 2, 2, 8)]


def test_cells_csv_has_a_row_for_each_cell_at_full_precision(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    folder.write_cell("c16", {"status": "oom", "reason": "needs 9 bytes,\nhas 8", "backend": "contiguous"})
    folder.write_cell("c8", {"status": "ok", "ttft_p50_s": THIRD, "tpot_p50_s": None}, a_run())
    with (folder.path / "cells.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0])[: len(LEADING_COLUMNS)] == LEADING_COLUMNS
    assert [row["cell"] for row in rows] == ["c8", "c16"]  # natural order
    assert float(rows[0]["ttft_p50_s"]) == THIRD
    assert rows[0]["tpot_p50_s"] == rows[1]["ttft_p50_s"] == ""
    assert rows[1]["reason"] == "needs 9 bytes,\nhas 8"
    table = folder.cells()
    assert list(table.columns) == list(rows[0])
    assert table["ttft_p50_s"][0] == THIRD


def test_a_cell_that_could_not_run_has_only_its_row(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    folder.write_cell("a", {"status": "failed", "reason": "no logits"})
    assert names(folder.path / "cells" / "a") == ["result.json"]
    assert not folder.has_run("a")
    with pytest.raises(KvbenchError, match="no records"):
        folder.run("a")


def test_facts_known_later(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {"seed": 1})
    folder.update_manifest(interrupted=True, model_load_s=THIRD)
    expected = {"schema_version": SCHEMA_VERSION, "seed": 1, "interrupted": True, "model_load_s": THIRD}
    assert RunFolder.open(folder.path).manifest == folder.manifest == expected


def test_a_writer_killed_in_the_middle_leaves_no_cell(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    folder.write_cell("a", {"status": "ok"})
    killed = (
        "import os, sys; from pathlib import Path; from kvbench.metrics.store import RunFolder;"
        "Path.rename = lambda *_: os._exit(9);"
        "RunFolder.resume(sys.argv[1]).write_cell('b', {'status': 'ok'})"
    )
    folder.close()
    assert subprocess.run([sys.executable, "-c", killed, str(folder.path)], cwd=ROOT, check=False).returncode == 9
    cells = folder.path / "cells"
    assert names(cells) == [".b", "a"]  # the leftover
    again = RunFolder.open(folder.path)
    assert [row["cell"] for row in again.rows()] == ["a"]
    again = RunFolder.resume(folder.path)
    assert names(cells) == ["a"]
    again.write_cell("b", {"status": "ok"})
    assert names(cells) == ["a", "b"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    folder = RunFolder.create(tmp_path / "run", {})

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises((KeyboardInterrupt, KvbenchError)):
            folder.write_cell("a", {"status": "ok"}, a_run())
    assert names(folder.path / "cells") == []
    folder.write_cell("a", {"status": "ok"}, a_run())


def test_a_run_whose_memory_does_not_add_up_is_not_stored(tmp_path: Path) -> None:
    folder, run = RunFolder.create(tmp_path / "run", {}), a_run()
    run.steps[1].held_tokens = 7
    with pytest.raises(AssertionError, match="step 1"):
        folder.write_cell("a", {}, run)
    assert names(folder.path / "cells") == []


def test_json_is_strict(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    with pytest.raises(ValueError, match="JSON compliant"):
        folder.write_cell("a", {"ttft_p50_s": float("nan")})
    assert folder.rows() == []
    (folder.path / "run.json").write_text('{"schema_version": 1, "x": NaN}')
    with pytest.raises(KvbenchError, match="malformed"):
        RunFolder.open(folder.path)
    with pytest.raises(ValueError, match="JSON compliant"):
        RunFolder.create(tmp_path / "other", {"rate": float("inf")})
    assert not (tmp_path / "other").exists()


def test_create_refuses_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    for name in ("full", "file"):
        with pytest.raises(KvbenchError, match="not an empty folder; choose another --output"):
            RunFolder.create(tmp_path / name, {})
    with pytest.raises(KvbenchError, match=r"cannot write .*file/run: Not a directory"):
        RunFolder.create(tmp_path / "file" / "run", {})
    RunFolder.create(tmp_path / "empty", {})
    assert names(tmp_path / "full") == ["thesis.txt"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no run.json"),
        ("{", "malformed"),
        ("[]", "holds no object"),
        ("{}", "schema_version is None"),
        ('{"schema_version": "1"}', "schema_version is '1'"),
        ('{"schema_version": 99}', "newer kvbench .schema 99, this one reads 1.; upgrade"),
    ],
)
def test_open_says_what_is_wrong(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(KvbenchError, match=message) as caught:
        RunFolder.open(tmp_path)
    assert "\n" not in str(caught.value)


def test_open_without_a_folder(tmp_path: Path) -> None:
    with pytest.raises(KvbenchError, match="is no folder"):
        RunFolder.open(tmp_path / "gone")


@pytest.mark.parametrize("cell_id", ["", ".a", "a/b", "..", "a b", "a\n", "x" * 201])
def test_ids_that_cannot_be_folders_are_impossible(tmp_path: Path, cell_id: str) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    with pytest.raises(AssertionError, match="folder's name"):
        folder.write_cell(cell_id, {})


def test_a_cell_is_written_once(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    folder.write_cell("a", {"status": "ok"})
    with pytest.raises(AssertionError, match="stored already"):
        folder.write_cell("a", {"status": "failed"})


def test_latest_is_the_one_written_last(tmp_path: Path) -> None:
    with pytest.raises(KvbenchError, match="kvbench sweep"):
        latest(tmp_path / "runs")
    for age, name in enumerate(("z", "a", "m")):
        folder = RunFolder.create(tmp_path / "runs" / name, {})
        os.utime(folder.path / "run.json", (1000 - age, 1000 - age))
    (tmp_path / "runs" / "notes").mkdir()
    assert latest(tmp_path / "runs") == tmp_path / "runs" / "z"


def test_latest_unfinished_lacks_cells_of_its_plan(tmp_path: Path) -> None:
    for age, (name, cells) in enumerate((("done", ["a"]), ("old", ["a", "b"]), ("older", ["a", "b", "c"]))):
        folder = RunFolder.create(tmp_path / name, {"cells": [{"id": cell} for cell in cells]})
        folder.write_cell("a", {"status": "failed"})
        os.utime(folder.path / "run.json", (1000 - age, 1000 - age))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    assert latest(tmp_path, unfinished=True) == tmp_path / "old"
    for name in ("old", "older"):
        (tmp_path / name / "run.json").unlink()
    with pytest.raises(KvbenchError, match="no unfinished run; name the one to resume with --output DIR"):
        latest(tmp_path, unfinished=True)


def test_one_writer_at_a_time_and_any_number_of_readers(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    command = [sys.executable, "-c", "import sys; from kvbench.cli.app import main; main()", "report", str(folder.path)]
    resume = "import sys; from kvbench.metrics.store import RunFolder; RunFolder.resume(sys.argv[1])"
    with pytest.raises(KvbenchError, match=rf"process {os.getpid()} on .* is writing .*; wait for its end or choose"):
        RunFolder.resume(folder.path)
    refused = subprocess.run(
        [sys.executable, "-c", resume, str(folder.path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert f"process {os.getpid()} on" in refused.stderr
    assert subprocess.run(command, cwd=ROOT, check=False, capture_output=True).returncode == 0
    folder.close()
    with pytest.raises(AssertionError, match="opened to be read"):
        folder.write_cell("a", {})
    RunFolder.resume(folder.path).write_cell("a", {})
    RunFolder.resume(folder.path).write_cell("b", {})  # the one before is gone, and its lock with it
    assert [row["cell"] for row in folder.rows()] == ["a", "b"]


def test_a_killed_writer_blocks_nobody(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", {}).close()
    holds = "import sys, time; from kvbench.metrics.store import RunFolder; f = RunFolder.resume(sys.argv[1]);"
    holds += "print('locked', flush=True); time.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-c", holds, str(tmp_path / "run")], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout and holder.stdout.readline() == "locked\n"
        with pytest.raises(KvbenchError, match=f"process {holder.pid} on"):
            RunFolder.resume(tmp_path / "run")
        holder.kill()
    RunFolder.resume(tmp_path / "run").write_cell("a", {})


def test_the_table_is_brought_up_to_date_by_whoever_opens_the_run_next(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    table = folder.path / "cells.csv"
    folder.write_cell("a", {"status": "ok"})
    behind = table.read_text()
    folder.write_cell("b", {"status": "ok"})
    whole = table.read_text()
    table.write_text(behind)
    RunFolder.open(folder.path).catch_up()
    assert table.read_text() == behind  # a writer is at work; it is its table
    folder.close()
    RunFolder.open(folder.path).catch_up()
    assert table.read_text() == whole
    table.unlink()
    again = RunFolder.resume(folder.path)
    assert table.read_text() == whole
    again.write_cell("c", {"status": "oom", "reason": "full"})
    assert [row["cell"] for row in csv.DictReader(table.read_text().splitlines())] == ["a", "b", "c"]


def test_a_writer_reads_no_finished_cell_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    folder.write_cell("a", {"seed": (1, 2)})
    folder.close()
    folder = RunFolder.resume(folder.path)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: pytest.fail("read a cell"))
    folder.write_cell("b", {"seed": (1, 2)})
    monkeypatch.undo()
    first, second = csv.DictReader((folder.path / "cells.csv").read_text().splitlines())
    assert first["seed"] == second["seed"] == "[1, 2]"


def test_a_start_that_was_killed_is_no_run_and_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for leftover in (".lock", ".run.json"):
        (tmp_path / "run" / leftover).write_text("half")
    RunFolder.create(tmp_path / "run", {}).close()
    with pytest.raises(KvbenchError, match="it holds a run, which --resume goes on with; choose another --output"):
        RunFolder.create(tmp_path / "run", {})


def test_a_run_against_a_server_comes_back_with_nulls_for_what_nobody_knows(tmp_path: Path) -> None:
    """Its samples are its steps."""
    import pyarrow.parquet as pq

    request = RequestRecord(
        request=0,
        scheduled_s=0.0,
        sent_s=0.1,
        input_tokens=4,
        max_tokens=2,
        first_s=0.2,
        last_s=0.2,
        token_s=[0.2, 0.2],
        output_tokens=2,
        status="finished",
        asked_tokens=3,
        told_tokens=2,
        chunks=1,
        empty_chunks=0,
    )
    samples = [SampleRecord(0, 0.0, 0.1, running=1, kv_cache_usage=THIRD), SampleRecord(1, 0.5, 0.6, preemptions=2)]
    run = Run([request], [], [], None, 0.7, None, 7, None, samples)
    folder = RunFolder.create(tmp_path / "run", {})
    folder.write_cell("server", {"preemptions": None}, run)
    assert folder.run("server") == run
    requests, steps = (
        pq.read_table(folder.path / "cells" / "server" / f"{name}.parquet") for name in ("requests", "steps")
    )
    unknown = ("cached_tokens", "preemptions", "swaps")
    assert [requests[name].to_pylist() for name in unknown] == [[None]] * 3
    known = {"step", "start_s", "end_s", "running", "preemptions", "kv_cache_usage"}
    assert {name for name in steps.column_names if steps[name].null_count < len(steps)} == known
    assert {"used_tokens", "reserved_tokens", "internal_tokens", "rounding_tokens", "free_tokens"} <= set(
        steps.column_names
    )
    assert folder.rows()[0] == {"cell": "server", "preemptions": None, "end_s": 0.7, "server_input_tokens": 7}


def holding(folder: Path, pid: int, seconds: float) -> subprocess.Popen[bytes]:
    """A process that holds the lock of a writer with that number, as one does that a killed writer had just started."""
    code = (
        "import fcntl, os, platform, sys, time\n"
        "file = open(sys.argv[1], 'w')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "file.write(f'process {sys.argv[2]} on {platform.node()}'); file.flush()\n"
        "print('held', flush=True); time.sleep(float(sys.argv[3]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder / ".lock"), str(pid), str(seconds)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    return process


def test_a_killed_writers_lock_is_waited_for_and_a_living_ones_is_not(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    folder.close()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with holding(folder.path, gone.pid, 0.5):
        RunFolder.resume(folder.path).close()
    with (
        holding(folder.path, os.getpid(), 0.5),
        pytest.raises(KvbenchError, match=f"process {os.getpid()} on .* is writing"),
    ):
        RunFolder.resume(folder.path)
