"""Runs measured by the wall clock, replayed from their folder: the same batches, token times and memory to the last
digit, for both backends, with preemptions, hits, swaps and aborts; and another duration changes what follows."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from kvbench.cli.app import main
from kvbench.cli.config import SweepConfig
from kvbench.cli.replay import recording
from kvbench.engine.runner import ModelRunner
from kvbench.engine.types import Batch, Ticket
from kvbench.errors import KvbenchError
from kvbench.metrics.points import Variant
from kvbench.metrics.records import ABORTED, FINISHED, REJECTED, RequestRecord, Run
from kvbench.metrics.store import RunFolder
from kvbench.planner.replay import Tape, first_difference, recorded_requests

Chunks = tuple[tuple[int, int, int, bool], ...]
TINY = ("--model", "tiny", "--dtype", "float32", "--device", "cpu", "--repeats", "1", "--num-warmups", "0")
LENGTHS = ("--input-len", "24", "--output-len", "24", "--range-ratio", "0.9", "--kv-memory", f"{4096 * 192}")
BOTH = ("--reserve", "max,declared", "--preemption", "recompute,swap", "--prefix-caching", "off,on")
CLOSED = (*LENGTHS, *BOTH, "--concurrency", "10", "--num-prompts", "40", "--prefix-len", "20")


pytestmark = pytest.mark.usefixtures("what_is_loaded_stays")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def chunks(batch: Batch) -> Chunks:
    return tuple((one.sequence.id, one.start, one.end, one.samples) for one in batch.chunks)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Chunks]:
    """What each step of the real device computed, in order, warm-ups included."""
    seen: list[Chunks] = []
    real = ModelRunner.launch

    def noted(runner: ModelRunner, batch: Batch, now_s: float) -> Ticket:
        seen.append(chunks(batch))
        return real(runner, batch, now_s)

    monkeypatch.setattr(ModelRunner, "launch", noted)
    return seen


class Watched(Tape):
    """A tape that notes what it was given."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.seen: list[Chunks] = []

    def launch(self, batch: Batch, now_s: float) -> Ticket:
        self.seen.append(chunks(batch))
        return super().launch(batch, now_s)


def call(*args: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(args))
    assert (ended.value.code or 0) == code


def sweep(*args: str, output: str = "out", code: int = 0) -> RunFolder:
    call("sweep", *TINY, *args, "--save-tokens", "--output", output, code=code)
    return RunFolder.open(output)


def played(folder: RunFolder, name: str, run: Run | None = None) -> tuple[Run, Run, list[Chunks]]:
    """A cell as recorded and as replayed on the steps of `run` (its own where none is given), with the batches."""
    recorded = folder.run(name)
    row = next(row for row in folder.rows() if row["cell"] == name)
    config = SweepConfig.of(folder.manifest["config"])
    stack, load = recording(folder, config, row, run or recorded)
    tape = Watched(run or recorded)
    stack = replace(stack, machine=replace(stack.machine, tape=tape))  # type: ignore[type-var]
    return recorded, stack.run(Variant.of(row), load, timeout_s=config.cell_timeout_s or float("inf")), tape.seen


def check(folder: RunFolder, launched: list[Chunks]) -> dict[str, Run]:
    """Every cell of a run; `launched` ends with the batches of its cells, in the order in which they ran."""
    runs = {}
    left = launched[-sum(row["steps"] for row in folder.rows()) :]
    for cell in folder.manifest["cells"]:
        recorded, replayed, batches = played(folder, cell["id"])
        assert first_difference(recorded, replayed) == ""
        assert replayed == recorded, cell["id"]
        assert batches == left[: len(recorded.steps)], cell["id"]
        left = left[len(recorded.steps) :]
        runs[cell["id"]] = recorded
    assert not left
    return runs


def test_a_closed_loop_with_preemptions_hits_swaps_and_aborts(launched: list[Chunks]) -> None:
    runs = check(sweep(*CLOSED), launched)
    requests = [one for run in runs.values() for one in run.requests]
    assert all(one.status == FINISHED for one in requests) and len(runs) == 6
    assert any(one.swaps for one in requests) and any(one.preemptions > one.swaps for one in requests)
    assert any(one.cached_tokens for one in requests)
    patience_s = statistics.median((one.last_s or 0.0) - one.scheduled_s for one in requests)

    folder = sweep(*CLOSED, "--request-timeout", f"{patience_s:.9f}s", output="impatient")
    ends = {one.status for run in check(folder, launched).values() for one in run.requests}
    assert ends == {FINISHED, ABORTED}, "half of the answers took longer"


@pytest.mark.parametrize(
    "args",
    [
        ("--request-rate", "5", "--num-prompts", "10"),
        ("--request-rate", "200", "--num-prompts", "40", "--max-concurrency", "3"),
        ("--concurrency", "3", "--num-prompts", "24", "--turns", "3", "--think-time", "20ms"),
        ("--concurrency", "4", "--num-prompts", "16", "--n", "1,3", "--temperature", "0.9"),
        ("--concurrency", "6", "--num-prompts", "18", "--max-model-len", "60", "--overflow", "truncate"),
        ("--concurrency", "6", "--num-prompts", "18", "--max-model-len", "60"),
    ],
    ids=["open", "gated", "conversations", "samples", "truncated", "rejected"],
)
def test_every_kind_of_load(launched: list[Chunks], args: tuple[str, ...]) -> None:
    folder = sweep(*LENGTHS, "--batching", "continuous,static", "--prefix-caching", "off,on", *args)
    runs = check(folder, launched)
    requests = [one for run in runs.values() for one in run.requests]
    if "--max-model-len" in args:
        cut, refused = any(one.truncated_tokens for one in requests), any(one.status == REJECTED for one in requests)
        assert (cut, refused) == ("truncate" in args, "truncate" not in args)
    if args[1] == "5":
        idle = [b.start_s > a.end_s for run in runs.values() for a, b in pairwise(run.steps)]
        assert any(idle), "nobody ever waited"


def test_answers_that_ended_by_themselves_and_a_cell_that_was_ended(launched: list[Chunks]) -> None:
    lines = [json.dumps({"prompt": [7 + n, 8, 9 + n % 3], "output_tokens": 30}) for n in range(12)]
    Path("chats.jsonl").write_text("\n".join(lines))
    args = ("--dataset", "jsonl", "--dataset-path", "chats.jsonl", "--temperature", "2", "--concurrency", "4")
    runs = check(sweep(*args, "--num-prompts", "60"), launched)
    assert {one.reason for run in runs.values() for one in run.requests} <= {"length", "stop"}
    took_s = min(run.end_s for run in runs.values()) / 2
    ended = sweep(*args, "--num-prompts", "4000", "--cell-timeout", f"{took_s:.9f}s", output="ended", code=1)
    assert {row["status"] for row in ended.rows()} == {"timeout"}
    check(ended, launched)


def test_the_token_at_which_an_answer_ended_ends_it_again() -> None:
    def record(number: int, reason: str, output: list[int]) -> RequestRecord:
        return RequestRecord(
            number, 0.0, 0.0, 2, 9, output_tokens=len(output), status=FINISHED, reason=reason,
            prompt_token_ids=[1, 2], output_token_ids=output,
        )  # fmt: skip

    first, second = recorded_requests([record(0, "stop", [5, 3]), record(1, "length", [4] * 9)], ends_by_length=False)
    assert first.stop_ids == second.stop_ids == {3}
    assert first.output_tokens is None and second.max_tokens == 9


def test_one_longer_step_changes_what_follows_and_nothing_before() -> None:
    folder = sweep(*LENGTHS, "--request-rate", "5", "--num-prompts", "12", "--backend", "paged")
    (cell,) = folder.manifest["cells"]
    recorded, same, batches = played(folder, cell["id"])
    assert same == recorded
    at = len(recorded.steps) // 3
    old = recorded.steps[at]
    longer = replace(old, end_s=old.end_s + 2.0)  # ten more come meanwhile
    changed = replace(recorded, steps=[*recorded.steps[:at], longer, *recorded.steps[at + 1 :]])
    _, other, others = played(folder, cell["id"], changed)
    assert other.steps[:at] == recorded.steps[:at] and others[: at + 1] == batches[: at + 1]
    assert others[at + 1 :] != batches[at + 1 :], "those who came meanwhile are in the next batch"
    assert other.steps[at].end_s == longer.end_s and other.steps[at + 1].start_s >= longer.end_s
    for before, after in zip(recorded.requests, other.requests, strict=True):
        assert before.output_token_ids == after.output_token_ids and before.scheduled_s == after.scheduled_s
        then = [at_s for at_s in before.token_s if at_s <= old.start_s]
        assert after.token_s[: len(then)] == then, "a token from before the change moved"
    assert "end_s was" in first_difference(recorded, other)


def test_replay_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    folder = sweep(*LENGTHS, "--concurrency", "4", "--num-prompts", "8")
    call("replay", "out", "--format", "json")
    shown = capsys.readouterr()
    found = json.loads(shown.out[shown.out.rindex("\n[") :] if "\n[" in shown.out else shown.out)
    assert {one["outcome"] for one in found} == {"identical"} and len(found) == 2
    assert "2 cells came out as they were recorded, to the last digit" in shown.err

    name = folder.manifest["cells"][0]["id"]
    result = folder.path / "cells" / name / "result.json"
    result.write_text(result.read_text().replace('"end_s"', '"end_s": 1e9, "once"'))
    call("replay", "out", "--cell", name, code=1)
    shown = capsys.readouterr()
    assert "end_s was 1000000000.0" in shown.out and "1 of 1 cells are not as they were recorded" in shown.err
    call("replay", "out", "--cell", "nosuch", code=2)
    assert "no records of cell 'nosuch'" in capsys.readouterr().err


def test_what_cannot_be_replayed_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    call("sweep", *TINY, *LENGTHS, "--concurrency", "2", "--num-prompts", "2", "--output", "unsaved")
    call("replay", "unsaved", code=2)
    assert "record it with --save-tokens" in capsys.readouterr().err
    few = ("--concurrency", "4", "--num-prompts", "8")
    sweep(*LENGTHS, *few, "--reserve", "oracle", "--request-timeout", "0.001ms", code=1)
    call("replay", "out", code=1)
    assert "oracle went by the lengths of 8 answers that were never whole" in capsys.readouterr().out
    steps = next(Path("out/cells").glob("*/steps.parquet"))
    for damage in (b"", b"PAR1", steps.with_name("holds.parquet").read_bytes(), None):
        if damage is None:
            steps.unlink()
        else:
            steps.write_bytes(damage)
        call("replay", "out", code=2)
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{steps} is damaged or gone (" in line
    Path("out/run.json").write_text('{"schema_version": 1, "config": {}, "effective": {}}')
    call("replay", "out", code=2)
    assert "is malformed: it lacks kv; name another run" in capsys.readouterr().err


def test_a_tape_that_is_over_says_so() -> None:
    with pytest.raises(KvbenchError, match="the recording ends after 0 steps"):
        Tape(Run([], [], [], 64, 0.0)).launch(Batch(0, ()), 0.0)
