"""The main job from the command line: what it leaves behind, what it refuses, and how it ends when things go wrong."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvbench.cli.stack as stack
from kvbench.cli.app import main
from kvbench.engine.arena import Arena
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
    effective = folder.manifest["effective"]
    assert effective["lengths"][0]["range_ratio"] == 0.5 and effective["lengths"][0]["longest_input"] == 18
    assert set(effective["prompts"].values()) == {6, 15} and effective["repeats"] == 2
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


def test_sampled_answers_are_the_same_on_both_backends_and_not_greedy() -> None:
    asked = ("--temperature", "0.9", "--top-p", "0.95", "--repetition-penalty", "1.1")
    answers = []
    for more in (("--output", "out", *asked), ("--output", "greedy")):
        sweep(*QUICK, "--save-tokens", *more)
        folder = RunFolder.open(more[1])
        contiguous, paged = (folder.run(row["cell"]).requests for row in folder.rows())
        assert [one.output_token_ids for one in contiguous] == [one.output_token_ids for one in paged]
        answers.append([one.output_token_ids for one in paged])
    assert answers[0] != answers[1]


def test_an_open_loop_and_every_reservation_policy_run_side_by_side() -> None:
    folder = sweep(*TINY, "--request-rate", "200", "--num-prompts", "12", "--repeats", "1",
                   "--reserve", "max,declared,pow2,oracle", "--arrivals", "gamma", "--burstiness", "0.5")  # fmt: skip
    rows = {(row["backend"], row["reserve"]): row for row in folder.rows()}
    assert len(rows) == 5 and all(row["status"] == "ok" for row in rows.values())
    assert all(row["request_rate"] == 200 and row["concurrency"] is None for row in rows.values())


def test_static_batches_stand_beside_the_others_hold_more_for_nothing_and_answer_the_same() -> None:
    folder = sweep(
        *(*TINY[:-1], "16", "--range-ratio", "0.9", "--concurrency", "8", "--num-prompts", "24", "--repeats", "1"),
        *("--save-tokens", "--batching", "static,continuous"),
    )
    rows = {(row["backend"], row["batching"]): row for row in folder.rows()}
    static, continuous = rows["contiguous", "static"], rows["contiguous", "continuous"]
    assert set(rows) == {("contiguous", "static"), ("contiguous", "continuous"), ("paged", "continuous")}
    assert len({str([one.output_token_ids for one in folder.run(row["cell"]).requests]) for row in rows.values()}) == 1
    assert all((split(folder.run(row["cell"])).pool == row["pool_tokens"]).all() for row in rows.values())
    assert static["cell"].startswith("contiguous-max-static-") and static["steps"] > continuous["steps"]
    assert static["kv_fragmentation_mean"] > continuous["kv_fragmentation_mean"]
    assert "ontiguous + static" in (folder.path / "report.html").read_text()


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


def test_a_prefix_cache_off_and_on_are_two_rows_of_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    folder = sweep(*QUICK, *PREFIX[2:], "--prefix-caching", "off,on", "--prefix-len", "0,37", "--kv-memory", "2MiB")
    rows = {(row["backend"], row["prefix_caching"], row["prefix_tokens"]): row for row in folder.rows()}
    assert set(rows) == {
        (backend, cached, prefix)
        for backend, cached in (("contiguous", False), ("paged", False), ("paged", True))
        for prefix in (0, 37)
    }
    assert rows["paged", True, 37]["cell"] == "paged-prefix-c3-i12-o8-p37-r0"
    assert rows["paged", False, 0]["cell"] == "paged-c3-i12-o8-r0"
    assert [key for key, row in rows.items() if row["prefix_hit_rate"]] == [("paged", True, 37)]
    assert {(row["preemption"], row["samples"]) for row in rows.values()} == {("recompute", 1)}
    header = (folder.path / "cells.csv").read_text().splitlines()[0].split(",")[len(LEADING_COLUMNS) :]
    assert header[:6] == ["order", "batching", "prefix_caching", "preemption", "prefix_tokens", "samples"]
    answers = {str([one.output_token_ids for one in folder.run(rows[*key, 37]["cell"]).requests])
               for key in (("contiguous", False), ("paged", False), ("paged", True))}  # fmt: skip
    assert len(answers) == 1
    shown = capsys.readouterr()
    assert "compared  contiguous max, paged, paged + prefix cache" in shown.err
    assert "Paged + prefix cache" in shown.out
    assert {("3", "0"), ("3", "37")} <= {tuple(line.split()[:2]) for line in shown.out.splitlines()}
    assert "Paged + prefix cache" in (folder.path / "report.html").read_text()


def test_samples_swaps_and_prefixes_change_memory_and_no_token(capsys: pytest.CaptureFixture[str]) -> None:
    """Four samples a prompt in a pool for a few of them: every variant gives every sample the same tokens."""
    folder = sweep(
        *("--model", "tiny", "--dtype", "float32", "--input-len", "19", "--output-len", "24", "--prefix-len", "16"),
        *("--n", "4", "--temperature", "1", "--concurrency", "4", "--repeats", "1", "--kv-memory", "800KiB"),
        *("--num-prompts", "8", "--num-warmups", "1"),
        *("--prefix-caching", "off,on", "--preemption", "recompute,swap", "--swap-space", "1MiB", "--save-tokens"),
    )
    rows = {(row["backend"], row["prefix_caching"], row["preemption"]): row for row in folder.rows()}
    assert len(rows) == 5 and all(row["status"] == "ok" for row in rows.values())
    answers = set()
    for (backend, caching, preemption), row in rows.items():
        run = folder.run(row["cell"])
        assert [(one.request, one.sample) for one in run.requests] == [(n, k) for n in range(8) for k in range(4)]
        assert len({tuple(one.output_token_ids or ()) for one in run.requests}) == 32
        answers.add(str([one.output_token_ids for one in run.requests]))
        assert (row["samples"], row["requests_submitted"], row["requests_finished"]) == (4, 8, 8)
        assert (row["kv_blocks_saved_mean"] > 0.05) == (backend == "paged")
        assert (row["swapped_tokens_peak"] > 0) == (row["swaps"] > 0) == (preemption == "swap")
        assert (row["prefix_hit_rate"] > 0) == caching
        assert backend == "contiguous" or row["preemptions"] > 0
    assert len(answers) == 1
    page, words = (folder.path / "report.html").read_text(), capsys.readouterr().out
    assert "blocks saved" in page and "swapped" in page and "4 answers to each prompt" in page
    assert "blocks" in words and "swap" in words


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
    "an empty answer": (["--output-len", "0"], "--output-len"),  # evalchemy#152
    "no answer declared": (["--max-tokens", "0"], "--max-tokens"),  # evalchemy#152
    "less declared than asked": (["--output-len", "8", "--max-tokens", "4"], "--max-tokens 4"),
    "zero repeats": (["--repeats", "0"], "--repeats"),
    "endless repeats": (["--repeats", "99999999999999999999"], "--repeats"),
    "endless requests": (["--num-prompts", "99999999999999999999"], "--num-prompts"),
    "an endless rate": (["--request-rate", "1e300"], "--request-rate"),
    "an empty list of users": (["--concurrency", ""], "--concurrency"),
    "an empty length": (["--input-len", ""], "--input-len"),
    "an empty model": (["--model", ""], "unknown model"),
    "NaN burstiness": (["--burstiness", "nan", "--request-rate", "1", "--arrivals", "gamma"], "--burstiness"),
    "burstiness of users": (["--burstiness", "0.5"], "--request-rate"),
    "burstiness of poisson": (["--burstiness", "0.5", "--request-rate", "1"], "--arrivals gamma"),
    "arrivals of users": (["--arrivals", "constant"], "--request-rate"),
    "a policy of blocks": (["--backend", "paged", "--reserve", "oracle"], "--reserve"),
    "an endless price": (["--price", "1e308"], "--price"),
    "metadata twice": (["--metadata", "a=1", "--metadata", "a=2"], "--metadata a"),
    "an endless name": (["--output", "x" * 300], "--output"),
    "longer than the model": (["--input-len", "40000"], "--input-len"),
    "no file but a device": (["--dataset", "jsonl", "--dataset-path", "/dev/null"], "/dev/null"),
    "zero block": (["--block-size", "0"], "--block-size"),
    "negative seed": (["--seed", "-1"], "--seed"),
    "NaN temperature": (["--temperature", "nan"], "--temperature"),
    "top-p of nothing": (["--top-p", "0"], "--top-p"),
    "top-p beyond all": (["--top-p", "1.5"], "--top-p"),
    "no penalty at all": (["--repetition-penalty", "0"], "--repetition-penalty"),
    "a timeout without a unit": (["--request-timeout", "30"], "--request-timeout"),
    "a timeout of nothing": (["--request-timeout", "0s"], "--request-timeout"),
    "a timeout in a strange unit": (["--cell-timeout", "3 fortnights"], "--cell-timeout"),
    "a timeout beyond all numbers": (["--cell-timeout", "9" * 400 + "h"], "--cell-timeout"),
    "static batches of blocks": (["--backend", "paged", "--batching", "static"], "--batching"),
    "an unknown way to batch": (["--batching", "dynamic"], "--batching"),
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
    "a salt without a cache": (["--cache-salt", "a"], "--prefix-caching on"),
    "a salt where the cache is off": (["--cache-salt", "a", "--prefix-caching", "off"], "--prefix-caching on"),
    "an empty salt": (["--cache-salt", "", "--prefix-caching", "on"], "--cache-salt has an empty salt"),
    "an empty salt in a list": (["--cache-salt", "a,,b", "--prefix-caching", "on"], "--cache-salt has an empty salt"),
    "a prefix cache that nothing has": (["--enable-prefix-caching", "--backend", "contiguous"], "add paged"),
    "a prefix cache on and off": (["--enable-prefix-caching", "--prefix-caching", "off,on"], "give one of them"),
    "a prefix cache off and on": (["--no-enable-prefix-caching", "--prefix-caching", "on"], "give one of them"),
    "a prefix cache of neither": (["--prefix-caching", "of"], "did you mean off?"),
    "an unknown preemption": (["--preemption", "swop"], "did you mean swap?"),
    "a preemption that nothing has": (["--preemption", "swap", "--backend", "contiguous"], "add paged"),
    "swap space for nobody": (["--swap-space", "1GiB"], "--preemption swap"),
    "swap space for recomputation": (["--swap-space", "1GiB", "--preemption", "recompute"], "--preemption swap"),
    "no size of swap space": (["--swap-space", "much", "--preemption", "swap"], "--swap-space"),
    "swap space of less than a block": (["--swap-space", "100", "--preemption", "swap"], "--swap-space 100 holds no"),
    "zero samples": (["--n", "0", "--temperature", "1"], "--n"),
    "half a sample": (["--n", "1.5", "--temperature", "1"], "--n"),
    "an empty list of samples": (["--n", "", "--temperature", "1"], "--n"),
    "greedy samples": (["--n", "1,4"], "--n 4 at --temperature 0"),
    "samples that never run together": (
        ["--n", "4", "--max-num-seqs", "3", "--temperature", "1"],
        "--max-num-seqs to 4",
    ),
    "a prefix of no number": (["--prefix-len", "0,many"], "--prefix-len"),
    "a prefix beyond the model": (["--prefix-len", "40000"], "lower --prefix-len, --input-len or --output-len"),
    "a prefix beyond all numbers": (["--prefix-len", "9" * 12], "--prefix-len"),
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
    assert not any("output_tokens_per_s" in row for row in rows), "a number that was never measured"
    assert "out of memory" in capsys.readouterr().out.lower()


@pytest.mark.parametrize("error", [RuntimeError("kernel exploded\nat line 3"), CellOutOfMemory("64 bytes")])
def test_a_cell_that_raises_leaves_a_row_and_the_sweep_goes_on(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> Any:
        raise error

    paged = stack.BACKENDS["paged"]
    monkeypatch.setitem(stack.BACKENDS, "paged", replace(paged, make_cache=broken))
    folder = sweep(*QUICK)
    rows = {row["backend"]: row for row in folder.rows()}
    assert rows["contiguous"]["status"] == "ok"
    assert rows["paged"]["status"] == ("oom" if isinstance(error, CellOutOfMemory) else "failed")
    assert str(error).splitlines()[0] in rows["paged"]["reason"]
    assert not folder.has_run(rows["paged"]["cell"])
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("broken", [False, True])
def test_a_cell_returns_its_memory_before_the_next_begins(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[Arena] = weakref.WeakSet()
    made = []

    class Watched(Arena):
        def __init__(self, *args: Any, **options: Any) -> None:
            assert not alive, "the last cell's memory is still held"
            super().__init__(*args, **options)
            alive.add(self)
            made.append(self.nbytes)

        def write(self, *args: Any) -> None:
            if broken and len(made) % 2:
                raise RuntimeError("the device fell off")
            super().write(*args)

    monkeypatch.setattr("kvbench.engine.arena.Arena", Watched)
    folder = sweep(*TINY, "--attention", "torch", "--concurrency", "3", "--repeats", "2", "--num-warmups", "0")
    assert len(made) >= 4 and not alive
    assert [row["status"] for row in folder.rows()].count("failed") == (2 if broken else 0)


def test_when_every_request_is_rejected_the_run_ends_with_1_and_a_report() -> None:  # pytorch#172616
    folder = sweep(*QUICK, "--max-model-len", "10", code=1)
    assert {row["status"] for row in folder.rows()} == {"rejected"}
    assert all("max_model_len 10" in row["reason"] and row["ttft_p50_s"] is None for row in folder.rows())
    assert (folder.path / "report.html").is_file()


def test_a_request_that_takes_too_long_is_aborted_and_counted() -> None:
    folder = sweep(*QUICK, "--num-prompts", "6", "--request-timeout", "0.001ms", code=1)
    for row in folder.rows():
        assert (row["status"], row["requests_aborted"], row["requests_submitted"]) == ("failed", 6, 6)
        assert row["reason"] == "no request finished; 6 of 6 like: not finished 1e-06 s after it was scheduled"
        assert row["ttft_p50_s"] is None and row["ttft_samples"] == row["goodput_per_s"] == row["attainment"] == 0
    assert folder.manifest["timings"]["cold_first_token_s"] > 0, "the warm-up is no client that loses patience"
    assert (folder.path / "report.html").is_file()


def test_a_cell_that_takes_too_long_is_ended_and_keeps_what_it_measured() -> None:  # guidellm#588
    folder = sweep(*TINY[:-1], "400", *QUICK[len(TINY) :], "--cell-timeout", "200ms", code=1)
    for row in folder.rows():
        run = folder.run(row["cell"])
        assert row["status"] == "timeout"
        assert row["reason"] == "ended by --cell-timeout 0.2s: 3 unfinished, 6 never asked"
        assert (row["requests_submitted"], row["requests_unfinished"], row["attainment"]) == (3, 3, 0)
        assert run.steps[-1].start_s < 0.2 <= run.end_s and row["output_tokens_per_s"] > 0
        split(run)
    assert "--cell-timeout" in (folder.path / "report.html").read_text()


def test_timeouts_that_nothing_reaches_change_nothing() -> None:
    folder = sweep(*QUICK, "--request-timeout", "5m", "--cell-timeout", "1.5h")
    assert all((row["status"], row["requests_aborted"]) == ("ok", 0) for row in folder.rows())
    assert (folder.manifest["config"]["request_timeout_s"], folder.manifest["config"]["cell_timeout_s"]) == (300, 5400)


def test_truncated_prompts_are_served_and_counted() -> None:
    folder = sweep(*QUICK, "--max-model-len", "16", "--overflow", "truncate")
    assert all(row["requests_truncated"] == 9 and row["status"] == "ok" for row in folder.rows())


def test_a_dry_run_says_what_would_happen_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """guidellm#588."""
    with pytest.raises(SystemExit) as ended:
        main(["sweep", "--dry-run", *QUICK])
    assert (ended.value.code or 0) == 0
    assert "2 cells" in capsys.readouterr().err and not list(Path().iterdir())


@pytest.mark.parametrize("name", ["markdown", "csv", "json"])
def test_other_formats_have_the_result_alone_on_standard_output(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    sweep(*QUICK, "--format", name)
    out, err = capsys.readouterr()
    last = err[err.index("! ") :]
    assert "! one repeat: no speed is proven" in last and " at once" in " ".join(last.split())
    assert last.endswith("Report: out/report.html\n") and "! " not in out and "Report" not in out
    if name == "json":
        assert len(json.loads(out)) == 2
    elif name == "csv":
        assert len(list(csv.DictReader(out.splitlines()))) == 2
    else:
        assert [line for line in out.splitlines() if "paged" in line.lower() or "contiguous" in line.lower()]
        assert out.count("---") >= 2


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


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"cell": "other", "status": "ok"}', '{"x": NaN}'])
def test_a_damaged_row_is_a_failed_cell_with_its_name(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (broken, *_) = sorted(Path(sweep(*QUICK).path, "cells").glob("paged*"))
    (broken / "result.json").write_text(text)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["report", "out"])
    assert not ended.value.code
    shown = " ".join(capsys.readouterr().out.split())
    assert f"! paged at 3 users, 1 cell: cells/{broken.name}/result.json is damaged" in shown
    assert "1 of 2 cells failed" in shown and "None" not in shown and "delete that folder" in shown
    rows = {row["cell"]: row for row in csv.DictReader(Path("out/cells.csv").read_text().splitlines())}
    assert rows[broken.name]["backend"] == "paged" and rows[broken.name]["status"] == "failed"


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
