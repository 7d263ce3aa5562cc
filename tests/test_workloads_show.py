"""`kvbench workloads show`: numbers worked out by hand, the same requests as a sweep asks, and no torch."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli.app import main
from kvbench.workloads.datasets import Outline
from kvbench.workloads.facts import dispersion, facts, hit_rate, variation

ROOT = Path(__file__).resolve().parent.parent


def run(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> tuple[str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["workloads", "show", *args])
    assert (ended.value.code or 0) == code
    shown = capsys.readouterr()
    return shown.out, shown.err


def rows(capsys: pytest.CaptureFixture[str], *args: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run(capsys, *args, "--format", "json")[0])
    return found


def test_facts_by_hand() -> None:
    outlines = [
        Outline(4, 2, (("a", 4),)),
        Outline(6, 4, (("a", 4), ("b", 2))),
        Outline(8, 6, (("a", 4), ("b", 4))),
        Outline(2, 8, (("c", 2),)),
    ]
    told = facts(outlines, [0.5, 1.0, 1.5, 4.5], block_size=2)
    assert told["requests"] == told["conversations"] == 4
    assert (told["input_mean_tokens"], told["input_p50_tokens"], told["input_longest_tokens"]) == (5.0, 5.0, 8)
    assert told["input_cv"] == pytest.approx((20 / 3) ** 0.5 / 5)  # deviations -1, 1, 3, -3
    assert told["input_p90_tokens"] == pytest.approx(7.4)  # 6 + 0.7 x 2
    assert (told["total_input_tokens"], told["total_output_tokens"], told["longest_request_tokens"]) == (20, 20, 14)
    assert told["infinite_cache_hit_rate"] == (0 + 4 + 6 + 0) / 20
    assert (told["duration_s"], told["rate_per_s"]) == (4.5, 0.75)
    assert told["interarrival_cv"] == pytest.approx((((5 / 6) ** 2 * 2 + (5 / 3) ** 2) / 2) ** 0.5 / (4 / 3))
    assert told["dispersion_1s"] == pytest.approx(2.75 / 3 / 0.75)  # 1, 2, 0 and 0 in the whole seconds
    assert told["dispersion_10s"] is told["dispersion_60s"] is None
    closed = facts(outlines[:1], None, block_size=2)
    assert closed["rate_per_s"] is closed["duration_s"] is closed["dispersion_1s"] is closed["input_cv"] is None
    assert (variation([3.0]), variation([0.0, 0.0]), dispersion([0.5], 1.0)) == (None, None, None)
    gap = [0.5, 3e11]  # ten thousand years, of which one second has a request: variance 1 / n, mean 1 / n
    assert dispersion(gap, 1) == pytest.approx(1) and facts(outlines, gap, 4)["dispersion_60s"] == pytest.approx(1)


def test_what_a_cache_without_limits_finds() -> None:
    same = (("a", 5),)
    assert hit_rate([Outline(5, 1, same), Outline(5, 1, same)], 1) == 4 / 10, "a prompt's last token is always computed"
    assert hit_rate([Outline(5, 1, same), Outline(5, 1, same)], 4) == 4 / 10
    assert hit_rate([Outline(5, 1, (("a", 3), ("b", 2))), Outline(5, 1, (("b", 2), ("a", 3)))], 1) == 0
    turns = [Outline(4, 3, (("u", 4),), "x"), Outline(9, 1, (("u", 4), ("x", 3), ("v", 2)), turn=1)]
    assert hit_rate(turns, 1) == 6 / 13, "an answer's last token is never stored"
    assert hit_rate([], 4) is None


def test_a_table_for_people_and_rows_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--input-len", "100", "--output-len", "20,40", "--input-dist", "lognormal:cv=1", "--request-rate", "2")
    out, _ = run(capsys, *asked)
    assert "random 100/20, poisson 2/s" in out and "mean that it draws from, clipping included" in out
    assert "index of dispersion" in out
    markdown, _ = run(capsys, *asked, "--format", "markdown")
    assert markdown.splitlines()[1] == "| :--- | ---: | ---: |"
    table = list(csv.DictReader(io.StringIO(run(capsys, *asked, "--format", "csv")[0])))
    found = rows(capsys, *asked)
    assert [float(row["input_mean_tokens"]) for row in table] == [row["input_mean_tokens"] for row in found]
    for row in found:
        assert row["requests"] == 60 and row["arrivals"] == "poisson" and row["input_tokens"] == 100
        assert row["input_dist_mean_tokens"] == pytest.approx(99.7, abs=0.1)
        assert row["input_longest_tokens"] <= row["input_dist_longest_tokens"] == 926


@pytest.mark.parametrize("length", ["1", "2", "8192"])
def test_lengths_are_exact(capsys: pytest.CaptureFixture[str], length: str) -> None:  # vllm#24591
    (row,) = rows(capsys, "--input-len", length, "--output-len", length, "--concurrency", "1")
    assert row["input_mean_tokens"] == row["input_longest_tokens"] == row["output_p50_tokens"] == int(length)
    assert row["input_cv"] == 0 and row["rate_per_s"] is None


def test_inference_perfs_rates(capsys: pytest.CaptureFixture[str]) -> None:  # inference-perf (source)
    asked = ("--request-rate", "0.5", "--num-prompts", "5000", "--input-len", "4", "--output-len", "4")
    (poisson,) = rows(capsys, *asked)
    (constant,) = rows(capsys, *asked, "--arrivals", "constant")
    assert abs(poisson["interarrival_cv"] - 1) < 5 / 5000**0.5 and constant["interarrival_cv"] == 0
    assert constant["rate_per_s"] == 0.5 and abs(poisson["rate_per_s"] - 0.5) < 5 * 0.5 / 5000**0.5
    assert abs(poisson["dispersion_60s"] - 1) < 5 * (2 / (5000 / 30 - 1)) ** 0.5 and constant["dispersion_60s"] < 0.001


def test_prefixes_and_turns_are_foretold(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--input-len", "16", "--output-len", "17", "--concurrency", "2", "--num-prompts", "30")
    (shared,) = rows(capsys, *common, "--prefix-len", "64", "--prefix-groups", "2")
    assert shared["infinite_cache_hit_rate"] == 28 * 64 / (30 * 80), "all but the first of each group"
    (turns,) = rows(capsys, *common, "--turns", "3", "--prefix-len", "64")
    assert (turns["conversations"], turns["requests"]) == (10, 30)
    assert turns["input_longest_tokens"] == 64 + 3 * 16 + 2 * 17
    first, second, third = 64, 80 + 16, 80 + 33 + 15  # in full blocks of 16; an answer's last token is not stored
    assert turns["infinite_cache_hit_rate"] == (9 * first + 10 * second + 10 * third) / (10 * (80 + 113 + 146))


def test_it_says_what_it_chose_and_needs_no_torch() -> None:
    script = (
        "import sys, json\n"
        "from kvbench.cli.app import main\n"
        "try: main(['workloads', 'show'])\n"
        "finally: print(json.dumps([m for m in ('torch', 'transformers') if m in sys.modules]), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "random 64/40, 4 users" in done.stdout and "random 64/40, 16 users" in done.stdout
    assert "spread 20% to 180%" in done.stderr and "as a sweep on a CPU has it" in done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


RATE = ("--request-rate", "2")
BAD: list[tuple[tuple[str, ...], str]] = [
    (("--concurrency", "2", *RATE), "give one of them"),
    (("--input-dist", "normal"), "--input-dist normal needs exactly one number"),
    (("--output-dist", "zipf:alpha=2.5"), "--output-dist zipf:alpha=2.5"),
    (("--input-dist", "normal:cv=1", "--range-ratio", "0.5"), "--range-ratio and --input-dist"),
    (("--dataset", "support", "--input-dist", "normal:cv=1"), "--dataset support has lengths of its own"),
    (("--dataset", "azur"), "did you mean azure"),
    (("--dataset", "azure"), "--dataset azure reads a file; add --dataset-path"),
    (("--dataset-path", "x"), "--dataset-path is for --dataset jsonl, sharegpt"),
    (("--dataset", "azure", "--dataset-path", "nowhere"), "cannot read --dataset-path nowhere"),
    (("--dataset", "azure", "--dataset-path", "x", "--output-len", "3"), "has lengths of its own"),
    (("--dataset", "azure", "--dataset-path", "x", "--prefix-len", "3"), "has prompts of its own"),
    (("--dataset", "azure", "--dataset-path", "x", "--turns", "2"), "--turns 2 makes conversations of"),
    (("--prefix-groups", "2"), "add --prefix-len"),
    (("--prefix-groups", "0", "--prefix-len", "4"), "--prefix-groups"),
    (("--prefix-groups", "2,3", "--prefix-len", "4"), "--prefix-groups takes one number"),
    (("--prefix-groups", "two", "--prefix-len", "4"), "--prefix-groups cannot read 'two'"),
    (("--prefix-groups", "2:alpah=1", "--prefix-len", "4"), "did you mean alpha"),
    (("--prefix-groups", "2:alpha=-1", "--prefix-len", "4"), "above 0"),
    (("--turns", "0"), "--turns must be at least 1"),
    (("--think-time", "2s"), "add --turns"),
    (("--turns", "2", "--think-time", "2"), "--think-time cannot read '2'"),
    (("--turns", "2", "--concurrency", "8", "--num-prompts", "10"), "5 conversations never reach concurrency 8; raise"),
    (("--concurrency", "64", "--num-prompts", "10"), "10 requests never reach concurrency 64"),
    (("--arrivals", "poison", *RATE), "did you mean poisson"),
    (("--arrivals", "poisson"), "--arrivals belongs to an open loop"),
    (("--arrivals", "trace"), "--arrivals trace needs a data set that has times"),
    (("--arrivals", "ramp:to=x", *RATE), "must be a number"),
    (("--arrivals", "step:to=1e-300", *RATE), "step:to must be a number above 0, from 0.000001"),
    (("--input-dist", "lognormal:cv=1e-300"), "lognormal:cv must be a number above 0, from 0.000001"),
    (("--burstiness", "1e-300", "--arrivals", "gamma", *RATE), "--burstiness must be a number above 0, from"),
    (("--dataset", "azure", "--dataset-path", "x", "--trace-scale", "1e-300"), "--trace-scale must be a number above"),
    (("--burstiness", "2", *RATE), "add --arrivals gamma"),
    (("--burstiness", "0", "--arrivals", "gamma", *RATE), "--burstiness must be a number above 0"),
    (("--max-concurrency", "2"), "--max-concurrency belongs to an open loop"),
    (("--max-concurrency", "0", *RATE), "--max-concurrency must be at least 1"),
    (("--duration", "5s", "--concurrency", "2"), "--duration belongs to an open loop"),
    (("--duration", "5", *RATE), "--duration cannot read '5'"),
    (("--duration", "0s", *RATE), "--duration must be a time above 0"),
    (("--duration", "1ms", *RATE), "no request arrives within --duration"),
    (("--trace-scale", "2", *RATE), "it needs --arrivals trace"),
    (("--dataset", "azure", "--dataset-path", "x", "--trace-scale", "0"), "--trace-scale must be a number above 0"),
    (("--dataset", "azure", "--dataset-path", "x", "--trace-scale", "nan"), "--trace-scale must be a number above 0"),
    (("--dataset", "azure", "--dataset-path", "x", "--arrivals", "trace", "--trace-scale", "2", *RATE), "give one"),
    (("--dataset", "sharegpt", "--dataset-path", "x"), "--dataset sharegpt holds texts"),
    (("--seed", "-1"), "--seed must be at least 0"),
    (("--num-prompts", "0"), "--num-prompts must be at least 1"),
    (("--format", "jsn"), "did you mean json"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "says"), BAD, ids=[" ".join(args) for args, _ in BAD])
def test_what_cannot_be_is_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    out, err = run(capsys, *args, code=2)
    assert out == "" and says in err
    assert err.startswith("kvbench: ") and err.count("\n") == 1


def test_only_show_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["workloads", "shwo"])
    assert "did you mean show" in capsys.readouterr().err
