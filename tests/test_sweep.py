"""The main job from the command line: what it leaves behind, what it refuses, and how it ends when things go wrong."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import kvbench.cli.stack as stack
from kvbench.cli.app import main
from kvbench.errors import CellOutOfMemory
from kvbench.metrics.memory import split
from kvbench.metrics.store import LEADING_COLUMNS, RunFolder

TINY = ("--model", "tiny", "--dtype", "float32", "--input-len", "12", "--output-len", "8")
QUICK = (*TINY, "--concurrency", "3", "--repeats", "1", "--num-warmups", "1")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def sweep(*args: str, code: int = 0) -> RunFolder:
    """Run a sweep into the folder `out` and open it."""
    with pytest.raises(SystemExit) as ended:
        main(["sweep", "--output", "out", *args])
    assert (ended.value.code or 0) == code
    return RunFolder.open("out")


def test_a_sweep_leaves_a_readable_folder_tables_and_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    folder = sweep(*TINY, "--concurrency", "2,5", "--repeats", "2", "--range-ratio", "0.5", "--price", "1.5")
    shown = capsys.readouterr()
    rows = list(csv.DictReader((folder.path / "cells.csv").read_text().splitlines()))
    assert tuple(rows[0])[: len(LEADING_COLUMNS)] == LEADING_COLUMNS
    assert len(rows) == 2 * 2 * 2 and {row["status"] for row in rows} == {"ok"}
    assert all(float(row["usd_per_million_output_tokens"]) > 0 for row in rows)
    assert all(float(row["model_load_s"]) > 0 and float(row["cold_first_token_s"]) > 0 for row in rows)
    assert "<h1" in (folder.path / "report.html").read_text()
    assert "at once" in shown.out and "paged" in shown.out and "report.html" in shown.out
    assert "cell 8/8" in shown.err and "Traceback" not in shown.err
    for row in folder.rows():
        run = folder.run(row["cell"])
        parts = split(run)
        assert (parts.pool == row["pool_tokens"]).all()
        assert len(run.requests) == row["requests_finished"] == 3 * row["concurrency"]
        assert all(request.sent_s == request.scheduled_s for request in run.requests)


def test_the_backends_of_a_repeat_serve_the_same_requests_in_alternating_order() -> None:
    folder = sweep(*QUICK[:-4], "--repeats", "2", "--num-warmups", "0", "--range-ratio", "0.6", "--save-tokens")
    order = [cell["backend"] for cell in folder.manifest["cells"]]
    assert order == ["contiguous", "paged", "paged", "contiguous"]

    def tokens(row: dict[str, Any]) -> list[tuple[Any, Any]]:
        return [(request.prompt_token_ids, request.output_token_ids) for request in folder.run(row["cell"]).requests]

    first, second = ({row["backend"]: tokens(row) for row in folder.rows() if row["repeat"] == r} for r in (0, 1))
    assert first["paged"] == first["contiguous"] and second["paged"] == second["contiguous"]
    assert first["paged"] != second["paged"]


def test_an_open_loop_and_every_reservation_policy_run_side_by_side() -> None:
    folder = sweep(*TINY, "--request-rate", "200", "--num-prompts", "12", "--repeats", "1",
                   "--reserve", "max,declared,pow2,oracle", "--arrivals", "gamma", "--burstiness", "0.5")  # fmt: skip
    rows = {(row["backend"], row["reserve"]): row for row in folder.rows()}
    assert len(rows) == 5 and all(row["status"] == "ok" for row in rows.values())
    assert all(row["request_rate"] == 200 and row["concurrency"] is None for row in rows.values())


def test_at_equal_bytes_only_equal_slots_are_bound_by_the_longest_request() -> None:
    """On the support desk's chats, with room for six requests of 300 tokens (1.2 x the longest): `max` admits exactly
    six at once, the others more, and all answer with the same tokens."""
    folder = sweep(
        *("--dataset", "support", "--model", "tiny", "--dtype", "float32", "--reserve", "max,declared"),
        *("--max-model-len", "300", "--kv-memory", f"{4096 * 300 * 6}", "--concurrency", "32", "--repeats", "1"),
        *("--num-prompts", "40", "--save-tokens", "--num-warmups", "0"),
    )
    peak, answers = {}, []
    for row in folder.rows():
        peak[row["backend"], row["reserve"]] = row["peak_running"]
        answers.append([request.output_token_ids for request in folder.run(row["cell"]).requests])
        assert row["requests_finished"] == 40
    slots = folder.manifest["kv"]["pool_tokens"] // 300
    assert peak["contiguous", "max"] == slots < min(peak["contiguous", "declared"], peak["paged", None])
    assert answers[0] == answers[1] == answers[2]


PREFIX = ("--prefix-len", "37", "--num-prompts", "12", "--save-tokens", "--num-warmups", "0")


def test_a_shared_prefix_is_found_only_by_the_paged_backend_and_only_where_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = sweep(*QUICK, *PREFIX, "--enable-prefix-caching", "--repeats", "2", "--kv-memory", f"{4096 * 400}")
    answers = {}
    for row in folder.rows():
        run = folder.run(row["cell"])
        prompts = [request.prompt_token_ids or [] for request in run.requests]
        assert len({tuple(prompt[:37]) for prompt in prompts}) == 1 and len({*map(tuple, prompts)}) == 12
        assert all(len(prompt) == 37 + 12 for prompt in prompts) and row["prefix_tokens"] == 37
        assert all(request.cached_tokens in (0, 32) for request in run.requests)
        assert row["cached_tokens_total"] == sum(request.cached_tokens for request in run.requests)
        assert row["prefix_hit_rate"] == row["cached_tokens_total"] / (12 * 49)
        assert all(request.cached_tokens == 0 for request in run.requests[:3]), "something of another cell was found"
        paged = row["backend"] == "paged"
        assert row["prefix_caching"] is paged is (row["prefix_hit_rate"] >= 0.4) is (row["kv_sharing_peak"] > 0.3)
        answers[row["backend"], row["repeat"]] = prompts, [request.output_token_ids for request in run.requests]
    assert all(answers["paged", repeat] == answers["contiguous", repeat] for repeat in (0, 1))
    assert answers["paged", 0] != answers["paged", 1]
    shown = capsys.readouterr()
    assert "that all share" in shown.err and "hits" in shown.out and "shared" in shown.out
    assert "KV shared" in (folder.path / "report.html").read_text()


def test_two_equal_cells_find_nothing_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:  # vllm#54227
    folder = sweep(*QUICK, *PREFIX, "--backend", "paged", "--concurrency", "3,3")
    first, second = folder.rows()
    for row in (first, second):
        assert row["prefix_caching"] is False and row["prefix_hit_rate"] == row["kv_sharing_peak"] == 0
    for name in ("kv_utilisation_peak", "peak_running", "steps", "output_tokens_total"):
        assert first[name] == second[name]
    assert "hits" not in capsys.readouterr().out and "KV shared" not in (folder.path / "report.html").read_text()


def test_requests_of_different_salts_share_nothing() -> None:  # vllm#44701
    flags = (
        "--enable-prefix-caching",
        "--backend",
        "paged",
        "--concurrency",
        "1",
        "--repeats",
        "1",
        "--kv-memory",
        "1MiB",
    )
    (row,) = sweep(*TINY, *PREFIX, *flags, "--cache-salt", "a,b").rows()
    cached = [request.cached_tokens for request in RunFolder.open("out").run(row["cell"]).requests]
    assert cached == [0, 0] + [32] * 10


BAD = {
    "an unknown backend": (["--backend", "pagd"], "did you mean paged?"),
    "an unknown policy": (["--reserve", "maxx"], "did you mean max?"),
    "an unknown dataset": (["--dataset", "sharegtp"], "--dataset"),
    "an unknown model": (["--model", "smolm2-135m"], "SmolLM2-135M"),
    "a family that cannot be measured": (["--model", "DeepSeek-V3"], "MLA"),
    "an unknown dtype": (["--dtype", "bf8"], "--dtype"),
    "an unknown device": (["--device", "tpu"], "--device"),
    "an unknown flag": (["--concurency", "3"], "--concurrency"),
    "both loads": (["--concurrency", "2", "--request-rate", "1"], "--request-rate"),
    "zero users": (["--concurrency", "0"], "--concurrency"),
    "negative users": (["--concurrency", "4,-2"], "--concurrency"),
    "no number of users": (["--concurrency", "nan"], "--concurrency"),
    "an infinite rate": (["--request-rate", "inf"], "--request-rate"),
    "zero length": (["--input-len", "0"], "--input-len"),
    "zero repeats": (["--repeats", "0"], "--repeats"),
    "zero block": (["--block-size", "0"], "--block-size"),
    "negative seed": (["--seed", "-1"], "--seed"),
    "NaN temperature": (["--temperature", "nan"], "--temperature"),
    "negative price": (["--price", "-1"], "--price"),
    "NaN ratio": (["--range-ratio", "nan"], "--range-ratio"),
    "too few requests": (["--concurrency", "8", "--num-prompts", "4"], "--num-prompts"),
    "no size": (["--kv-memory", "lots"], "--kv-memory"),
    "zero memory": (["--kv-memory", "0GiB"], "--kv-memory"),
    "less than a block": (["--kv-memory", "100"], "--kv-memory"),
    "beyond the model": (["--max-model-len", "99999999"], "--max-model-len"),
    "an unknown objective": (["--slo", "tttf:100"], "ttft"),
    "no objective": (["--slo", "ttft:soon"], "ttft:soon"),
    "no file": (["--dataset", "jsonl", "--dataset-path", "none.jsonl"], "none.jsonl"),
    "jsonl without file": (["--dataset", "jsonl"], "--dataset-path"),
    "no metadata": (["--metadata", "color"], "--metadata"),
    "an unknown format": (["--format", "xml"], "--format"),
    "no model folder": (["--model", "./nothing"], "./nothing"),
    "output under a file": (["--output", "file/run"], "file"),
    "a prefix of negative length": (["--prefix-len", "-1"], "--prefix-len"),
    "a prefix where prompts are given": (["--dataset", "support", "--prefix-len", "8"], "--prefix-len"),
    "a salt without a cache": (["--cache-salt", "a"], "--enable-prefix-caching"),
    "a prefix cache that nothing has": (["--enable-prefix-caching", "--backend", "contiguous"], "add paged"),
    "pow2 without lengths": (["--reserve", "pow2", "--no-ignore-eos"], "--ignore-eos"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line_and_leaves_nothing(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    args, named = BAD[case]
    Path("file").write_text("not a folder")
    with pytest.raises(SystemExit) as ended:
        main(["sweep", *(() if "--model" in args else ("--model", "tiny")), *args])
    lines = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2
    assert len(lines) == 1 and lines[0].startswith("kvbench: ") and named in lines[0], lines
    assert [path.name for path in Path().iterdir()] == ["file"]


def test_an_output_folder_that_is_not_empty_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    Path("out/thesis.txt").write_text("precious")
    with pytest.raises(SystemExit) as ended:
        main(["sweep", "--output", "out", *QUICK])
    assert ended.value.code == 2 and "--output" in capsys.readouterr().err
    assert [path.name for path in Path("out").iterdir()] == ["thesis.txt"]


def test_a_cell_without_memory_leaves_a_row_with_its_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    folder = sweep(*QUICK, "--kv-memory", "512TiB", code=1)
    rows = folder.rows()
    assert len(rows) == 2 and {row["status"] for row in rows} == {"oom"}
    assert all("bytes free" in row["reason"] and f"{2**49:,}"[:6] in row["reason"] for row in rows)
    assert all(row["output_tokens_per_s"] is None for row in rows if "output_tokens_per_s" in row)
    assert "out of memory" in capsys.readouterr().out.lower()


@pytest.mark.parametrize("error", [RuntimeError("kernel exploded\nat line 3"), CellOutOfMemory("64 bytes")])
def test_a_cell_that_raises_leaves_a_row_and_the_sweep_goes_on(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> Any:
        raise error

    paged = stack.BACKENDS["paged"]
    monkeypatch.setitem(stack.BACKENDS, "paged", stack.Backend("paged", paged.make_allocator, broken))
    folder = sweep(*QUICK)
    rows = {row["backend"]: row for row in folder.rows()}
    assert rows["contiguous"]["status"] == "ok"
    assert rows["paged"]["status"] == ("oom" if isinstance(error, CellOutOfMemory) else "failed")
    assert str(error).splitlines()[0] in rows["paged"]["reason"]
    assert not folder.has_run(rows["paged"]["cell"])
    assert "Traceback" not in capsys.readouterr().err


def test_when_every_request_is_rejected_the_run_ends_with_1_and_a_report() -> None:
    folder = sweep(*QUICK, "--max-model-len", "10", code=1)
    assert {row["status"] for row in folder.rows()} == {"rejected"}
    assert all("max_model_len 10" in row["reason"] and row["ttft_p50_s"] is None for row in folder.rows())
    assert (folder.path / "report.html").is_file()


def test_truncated_prompts_are_served_and_counted() -> None:
    folder = sweep(*QUICK, "--max-model-len", "16", "--overflow", "truncate")
    assert all(row["requests_truncated"] == 9 and row["status"] == "ok" for row in folder.rows())


def test_a_dry_run_says_what_would_happen_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sweep", "--dry-run", *QUICK])
    assert (ended.value.code or 0) == 0
    assert "2 cells" in capsys.readouterr().err and not list(Path().iterdir())


@pytest.mark.parametrize("name", ["markdown", "csv", "json"])
def test_other_formats_have_the_result_alone_on_standard_output(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    sweep(*QUICK, "--format", name)
    out = capsys.readouterr().out
    if name == "json":
        assert len(json.loads(out)) == 2
    elif name == "csv":
        assert len(list(csv.DictReader(out.splitlines()))) == 2
    else:
        assert out.count("| ---") >= 2 or out.count("|") > 20


def test_ctrl_c_leaves_a_valid_folder_and_a_partial_report() -> None:
    command = [sys.executable, "-m", "kvbench", "sweep", "--output", "out", *TINY[:-1], "64"]
    command += ["--concurrency", "4", "--repeats", "50", "--num-warmups", "0"]
    root = str(Path(stack.__file__).resolve().parent.parent)
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": root}
    )
    while running.poll() is None and not Path("out/cells.csv").exists():
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=120)
    assert running.returncode == 130, err
    assert err.strip().splitlines()[-1] == "kvbench: interrupted" and "Traceback" not in err
    folder = RunFolder.open("out")
    assert folder.manifest["interrupted"] is True and 1 <= len(folder.rows()) < 100
    assert all(folder.has_run(row["cell"]) for row in folder.rows())
    assert (folder.path / "report.html").is_file() and "interrupted" in out.lower()


def test_a_stored_run_is_rendered_again_without_torch() -> None:
    sweep(*QUICK)
    Path("out/report.html").unlink()
    code = (
        "import sys\nfrom kvbench.cli.app import main\n"
        "try:\n    main(['report', 'out'])\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    root = str(Path(stack.__file__).resolve().parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": root}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert Path("out/report.html").is_file() and "at once" in done.stdout
