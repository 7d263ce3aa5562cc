"""`sweep --resume`: what it measures, what it refuses to mix, what --force marks, and how it finds its run."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

import kvbench.cli.conduct as conduct
import kvbench.cli.job as job
import kvbench.cli.measure as measuring
import kvbench.cli.owned as owned
from kvbench.cli.app import main
from kvbench.cli.config import SweepConfig, flag
from kvbench.cli.load_config import parse_contexts, parse_loads
from kvbench.cli.parse import parse_metadata, parse_objectives
from kvbench.cli.resume import COMPARED, KEPT, differences
from kvbench.cli.sweep import sweep as sweep_command
from kvbench.engine.environment import find_device, versions
from kvbench.engine.model import BoundModel
from kvbench.metrics.points import Variant
from kvbench.metrics.store import RunFolder
from kvbench.workloads.grid import Cell

TINY = ("--model", "tiny", "--dtype", "float32", "--input-len", "6", "--output-len", "3", "--num-warmups", "0")
GRID = (*TINY, "--concurrency", "2", "--num-prompts", "2", "--repeats", "2")  # four cells
CHAT = '{"prompt": [5, 6, 7], "output_tokens": 3}\n'

pytestmark = pytest.mark.usefixtures("what_is_loaded_stays")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the cells that are measured, in order."""
    seen: list[str] = []
    real = measuring.measure

    def noted(job: Any, cell: Cell, watch: Any = None) -> Any:
        seen.append(cell.id)
        return real(job, cell, watch)

    monkeypatch.setattr(measuring, "measure", noted)
    return seen


def sweep(*args: str, code: int = 0, output: str | None = "out") -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sweep", *(("--output", output) if output else ()), *args])
    assert (ended.value.code or 0) == code


def interrupted(*args: str, after: int, output: str | None = "out") -> None:
    """A sweep with Ctrl-C pressed during the cell that comes after `after` others."""
    with pytest.MonkeyPatch.context() as patch:
        left, real = after, measuring.measure

        def pressed(*of_cell: Any) -> Any:
            nonlocal left
            if not left:
                raise KeyboardInterrupt
            left -= 1
            return real(*of_cell)

        patch.setattr(measuring, "measure", pressed)
        sweep(*args, code=130, output=output)


def snapshot(path: Path = Path("out")) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != ".lock"}


def test_only_what_is_missing_is_measured_in_the_same_order_with_the_same_seeds(
    measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted(*GRID, "--save-tokens", after=1)
    shown = capsys.readouterr()
    assert "--resume --output out" in shown.err and "interrupted after 1 of 4 cells" in " ".join(shown.out.split())
    before = RunFolder.open("out")
    first, plan = before.rows(), [cell["id"] for cell in before.manifest["cells"]]
    assert measured == plan[:1]
    sweep(*GRID, "--save-tokens", "--resume")
    assert measured == plan
    folder = RunFolder.open("out")
    assert folder.manifest["cells"] == before.manifest["cells"]
    assert folder.rows()[0] == first[0] and len(folder.rows()) == 4
    assert {row["seed"] for row in folder.rows()} == {0, 1}
    assert [row["cell"] for row in csv.DictReader(Path("out/cells.csv").read_text().splitlines())] == sorted(plan)
    shown = capsys.readouterr()
    assert "1 cells done, 3 to go" in shown.err and "cell 4/4" in shown.err and "interrupted" not in shown.out

    manifest = folder.manifest
    assert manifest["interrupted"] is False and manifest["timings"] == before.manifest["timings"]
    opening, second = manifest["sessions"]
    assert opening == before.manifest["sessions"][0]
    assert opening["interrupted"] is True and second["interrupted"] is False
    assert (opening["cells_before"], second["cells_before"]) == (0, 1)
    assert {row["model_load_s"] for row in folder.rows()} == {opening["model_load_s"], second["model_load_s"]}
    assert all(session["finished"] and session["peak_memory_bytes"] > 0 for session in manifest["sessions"])
    assert ", in 2 sessions" in Path("out/report.html").read_text()


def test_a_finished_run_is_only_rendered_again(measured: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    sweep(*GRID)
    before = snapshot()
    Path("out/report.html").unlink()
    Path("out/cells.csv").write_text("torn")
    capsys.readouterr()
    sweep(*GRID, "--resume")
    shown = capsys.readouterr()
    assert "nothing to do: out has all its 4 cells" in shown.err and "at once" in shown.out
    assert snapshot() == before and len(measured) == 4
    sweep(*GRID[:-1], "3", "--resume", code=2)  # three repeats are another run
    assert "--repeats was 2, is 3" in capsys.readouterr().err


def test_a_run_stopped_after_its_last_cell_is_whole() -> None:
    sweep(*GRID)
    folder = RunFolder.resume("out")
    folder.update_manifest(finished=None, interrupted=True)
    folder.close()
    sweep(*GRID, "--resume")
    manifest = RunFolder.open("out").manifest
    assert manifest["interrupted"] is False and manifest["finished"]


def test_a_cell_that_failed_is_done_until_its_folder_is_deleted(measured: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvbench.paged.cache.BlockCache.begin", lambda *_: 1 / 0)
        interrupted(*GRID, after=2)
    statuses = {row["cell"]: row["status"] for row in RunFolder.open("out").rows()}
    (failed,) = (cell for cell, status in statuses.items() if status == "failed")
    sweep(*GRID, "--resume")
    assert measured.count(failed) == 1 and len(measured) == 4
    assert {row["cell"]: row["status"] for row in RunFolder.open("out").rows()}[failed] == "failed"
    shutil.rmtree(Path("out/cells", failed))
    sweep(*GRID, "--resume")
    assert measured[4:] == [failed]
    assert {row["status"] for row in RunFolder.open("out").rows()} == {"ok"}


def test_the_plan_and_the_pool_are_those_of_the_run_however_they_would_be_chosen_now(
    monkeypatch: pytest.MonkeyPatch, measured: list[str]
) -> None:
    """What depends on the moment (the number of repeats and whether they fit the patience, a pool as large as memory
    is free, the largest model that fits) is taken from run.json."""
    monkeypatch.setattr(owned.Owned, "repeats", 3)

    def at_a_whim(device: object, choices: dict[str, str]) -> str:
        choices["model"] = "a whim"
        return "tiny"

    monkeypatch.setattr(owned, "_default_model", at_a_whim)
    monkeypatch.setattr(owned.Owned, "pool_bytes", lambda *_: 4096 * 16 * 3)
    args = ("--dtype", "float32", "--input-len", "6", "--output-len", "4", "--concurrency", "2", "--backend", "paged")
    interrupted(*args, after=1)
    before = RunFolder.open("out").manifest
    monkeypatch.setattr(owned.Owned, "repeats", 9)
    monkeypatch.setattr(owned.Owned, "patience_s", 1e-9)
    monkeypatch.setattr(owned, "_default_model", lambda *_: pytest.fail("chose a model anew"))
    monkeypatch.setattr(owned.Owned, "pool_bytes", lambda *_: pytest.fail("chose a pool anew"))
    monkeypatch.setattr(owned, "_default_dtype", lambda *_: pytest.fail("chose a dtype anew"))
    sweep(*args, "--resume")
    after = RunFolder.open("out")
    assert len(measured) == 3 == len(before["cells"]) == len(after.rows())
    assert {row["pool_tokens"] for row in after.rows()} == {48}
    for section in ("cells", "kv", "model", "choices", "config"):
        assert after.manifest[section] == before[section]


def test_force_leaves_the_memory_of_a_run_as_it_was(measured: list[str]) -> None:
    args = ("--model", "tiny", "--dtype", "float32", "--input-len", "6", "--output-len", "4", "--concurrency", "2")
    interrupted(*args, "--repeats", "2", "--kv-memory", f"{4096 * 48}", after=1)
    sweep(*args, "--repeats", "2", "--kv-memory", f"{4096 * 96}", "--resume", "--force")
    folder = RunFolder.open("out")
    assert {row["pool_tokens"] for row in folder.rows()} == {48} and len(measured) == 4
    assert any("--kv-memory" in mark and "(stays)" in mark for mark in folder.manifest["forced"])


CHANGED_FLAGS = {
    "--concurrency or --request-rate": ["--concurrency", "3"],
    "--repeats": ["--repeats", "3"],
    "--input-len, --output-len, --prefix-len and --n": ["--input-len", "7"],
    "--backend, --reserve, --batching, --prefix-caching and --preemption": ["--backend", "paged"],
    "--seed": ["--seed", "1"],
    "--block-size": ["--block-size", "8"],
    "--dtype": ["--dtype", "bfloat16"],
    "--kv-memory": ["--kv-memory", "1MiB"],
    "--num-prompts": ["--num-prompts", "9"],
    "--max-num-seqs": ["--max-num-seqs", "9"],
    "--slo": ["--slo", "ttft:5"],
    "--price": ["--price", "5"],
    "--temperature": ["--temperature", "0.5"],
    "--save-tokens": ["--save-tokens"],
    "--metadata": ["--metadata", "color=red"],
    "--model": ["--model", "bench-40m"],
}


CHANGED_POINTS = {
    "was contiguous max, paged, is contiguous max, paged + prefix cache (stays); ": ["--enable-prefix-caching"],
    "was contiguous max, paged, is contiguous max, paged + swap (stays) (and 1 more); ": [
        *("--preemption", "swap", "--swap-space", "1MiB")
    ],
    "was 6 tokens in and 3 tokens out, is 6 tokens in, 3 tokens out and a shared prefix of 4 tokens (stays); ": [
        *("--prefix-len", "4")
    ],
    "was 6 tokens in and 3 tokens out, is 6 tokens in, 3 tokens out and 2 samples (stays) (and 1 more); ": [
        *("--n", "2", "--temperature", "1")
    ],
}


def test_changed_points_of_the_grid_are_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    interrupted(*GRID, after=1)
    for words, args in CHANGED_POINTS.items():
        capsys.readouterr()
        sweep(*GRID, *args, "--resume", code=2)
        assert words in capsys.readouterr().err, words


def test_changed_flags_are_refused_by_name_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(*GRID, after=1)
    before = snapshot()
    monkeypatch.setattr(job, "prepare", lambda *_: pytest.fail("loaded a model"))
    for name, args in CHANGED_FLAGS.items():
        capsys.readouterr()
        sweep(*GRID, *args, "--resume", code=2)
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith(f"kvbench: cannot resume out: {name} was ") and "--force" in line, line
        assert snapshot() == before


def test_a_changed_machine_or_version_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(*GRID, after=1)
    before = snapshot()

    def refused(name: str) -> None:
        capsys.readouterr()
        sweep(*GRID, "--resume", code=2)
        lines = capsys.readouterr().err.strip().splitlines()
        assert lines[-1].startswith(f"kvbench: cannot resume out: {name} was ") and "Traceback" not in str(lines)
        assert snapshot() == before

    for name in ("torch", "transformers", "python", "kvbench", "commit"):
        with monkeypatch.context() as patch:
            patch.setattr(conduct, "versions", lambda name=name: versions() | {name: "0.0.1"})
            refused(COMPARED["environment"][name])
    for change in ({"name": "Abacus"}, {"kind": "cuda"}, {"cores": 99}, {"memory_bytes": 2**20}):
        with monkeypatch.context() as patch:
            patch.setattr(conduct, "find_device", lambda wanted, change=change: replace(find_device(wanted), **change))
            refused(COMPARED["device"][next(iter(change))])
    monkeypatch.setattr(BoundModel, "fingerprint", property(lambda _: "other", lambda _, value: None), raising=False)
    refused("the content of the weights")


def test_a_data_set_whose_file_changed_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    chats = Path("chats.jsonl")
    chats.write_text(CHAT)
    args = (*TINY[:4], "--dataset", "jsonl", "--dataset-path", "chats.jsonl", "--concurrency", "1", "--repeats", "1")
    interrupted(*args, after=1)
    chats.write_text(CHAT * 2)
    sweep(*args, "--resume", code=2)
    assert "the content of --dataset-path was " in capsys.readouterr().err
    chats.write_text(CHAT)
    sweep(*args, "--resume")


def test_force_goes_on_with_the_runs_own_plan_and_marks_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, measured: list[str]
) -> None:
    interrupted(*GRID, after=1)
    plan = RunFolder.open("out").manifest["cells"]
    monkeypatch.setattr(conduct, "versions", lambda: versions() | {"torch": "9.9"})
    sweep(*GRID, "--repeats", "1", "--concurrency", "9", "--temperature", "0.5", "--resume", "--force")
    folder = RunFolder.open("out")
    assert folder.manifest["cells"] == plan and measured == [cell["id"] for cell in plan]
    assert {row["seed"] for row in folder.rows()} == {0, 1}
    first, second = folder.manifest["sessions"]
    assert folder.manifest["forced"] == second["forced"] and first["forced"] == []
    assert len(second["forced"]) == 4
    assert "--concurrency or --request-rate was 2 users, is 9 users (stays)" in second["forced"]
    assert "--temperature was 0.0, is 0.5" in second["forced"]
    assert any(line.startswith("the version of torch was ") and line.endswith(", is 9.9") for line in second["forced"])
    shown = capsys.readouterr()
    assert "! resumed by --force although --" in shown.out and "because of --force" in shown.err
    assert "resumed by --force although --" in Path("out/report.html").read_text()


def test_what_cells_share_stays_under_force() -> None:
    """Rows with and without a prefix cache, or after another prefix, would be means of nothing."""
    interrupted(*GRID, "--enable-prefix-caching", "--cache-salt", "a", "--prefix-len", "20", after=1)
    sweep(*GRID, "--resume", "--force")
    folder = RunFolder.open("out")
    for row in folder.rows():
        assert row["prefix_caching"] is (row["backend"] == "paged") and row["prefix_tokens"] == 20
    was = (
        "6 tokens in, 3 tokens out and a shared prefix of 20 tokens, is 6 tokens in and 3 tokens out",
        "contiguous max, paged + prefix cache, is contiguous max, paged",
        "a, is not given",
    )
    marks = zip(folder.manifest["forced"], was, strict=True)
    assert all(mark.endswith(f" was {line} (stays)") for mark, line in marks), folder.manifest["forced"]


def test_without_output_the_latest_unfinished_run_is_taken_up(capsys: pytest.CaptureFixture[str]) -> None:
    sweep(*GRID, "--resume", code=2, output=None)
    assert "runs holds no unfinished run" in capsys.readouterr().err
    interrupted(*GRID, after=1, output="runs/one")
    sweep(*GRID, output="runs/two")
    sweep(*GRID, "--resume", output=None)
    assert len(RunFolder.open("runs/one").rows()) == 4
    sweep(*GRID, "--resume", code=2, output=None)
    assert "runs holds no unfinished run" in capsys.readouterr().err


def test_where_nothing_is_yet_the_run_begins(capsys: pytest.CaptureFixture[str]) -> None:
    """So that one command line can be repeated until it ends, wherever it was killed."""
    Path("out").mkdir()
    Path("out/.run.json").write_text("half")
    sweep(*GRID, "--resume")
    assert "holds nothing yet" in capsys.readouterr().err and len(RunFolder.open("out").rows()) == 4


def test_what_cannot_be_resumed_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def refused(says: str, *args: str) -> None:
        capsys.readouterr()
        sweep(*GRID, *args, code=2)
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert says in line, line

    refused("--force says what --resume may overlook", "--force")
    Path("out").mkdir()
    Path("out/thesis.txt").write_text("mine")
    refused("out has no run.json", "--resume")
    Path("out/run.json").write_text('{"schema_version": 1, "cells": [{"id": 1}], "config": {}}')
    refused("holds no plan that this version can go on with", "--resume")
    refused("it holds a run, which --resume goes on with")
    shutil.rmtree("out")
    interrupted(*GRID, after=1)
    writer = RunFolder.resume("out")
    refused("is writing out; wait for its end", "--resume")
    writer.close()
    refused("--seed was 0, is 4", "--resume", "--seed", "4")  # and its own lock is gone again:
    sweep(*GRID, "--resume")


def test_a_dry_run_of_a_resumption_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    interrupted(*GRID, after=1)
    before = snapshot()
    writer = RunFolder.resume("out")  # nor does it wait for anybody
    sweep(*GRID, "--resume", "--dry-run")
    writer.close()
    assert "1 cells done, 3 to go" in capsys.readouterr().err and snapshot() == before


def test_ctrl_c_between_a_cell_and_the_table_leaves_both_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[[RunFolder], None] = RunFolder._write_table
    pressed: list[int] = []

    def press_once(folder: RunFolder) -> None:
        pressed.append(1)
        if len(pressed) == 2:
            raise KeyboardInterrupt
        real(folder)

    monkeypatch.setattr(RunFolder, "_write_table", press_once)
    sweep(*GRID, code=130)
    rows = RunFolder.open("out").rows()
    assert len(rows) == 2 == len(Path("out/cells.csv").read_text().splitlines()) - 1


def test_a_configuration_comes_back_from_run_json_as_it_was() -> None:
    config = SweepConfig(
        variants=(
            Variant("contiguous", "max"),
            Variant("paged", prefix_caching=True),
            Variant("paged", preemption="swap"),
        ),
        loads=parse_loads(None, "0.5,2"),
        contexts=parse_contexts("8,16", None),
        slos=parse_objectives(["ttft:p99:1500", "tpot:50"], None),
        metadata=parse_metadata(["a=1", "b=2"]),
        price_usd_per_hour=1 / 3,
        swap_bytes=2**20,
        cache_salts=("a", "b"),
    )
    plain = replace(config, contexts=parse_contexts("8", None, "0,7", "1,4"), temperature=0.5, cache_salts=("",))
    file = replace(config, contexts=None, loads=None, dataset="jsonl", dataset_path=Path("a/b.jsonl"))
    for one in (config, plain, file):
        assert SweepConfig.of(json.loads(json.dumps(one.facts()))) == one
        assert not differences({"config": json.loads(json.dumps(one.facts()))}, {"config": one.facts()})


def test_every_field_is_compared_under_flags_that_exist() -> None:
    command = typer.main.get_command(_app())
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for field in SweepConfig.__dataclass_fields__:
        assert field in COMPARED["config"]
        assert {word.strip(",") for word in flag(field).split() if word.startswith("--")} <= known, field
    assert set(KEPT) <= SweepConfig.__dataclass_fields__.keys()


def _app() -> typer.Typer:
    holder = typer.Typer()
    holder.command()(sweep_command)
    return holder
