"""Cards one need not have: a sweep on one leaves what a measured one leaves, byte for byte the same for a seed, says
everywhere that it was simulated, and refuses what cannot be."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli.app import main
from kvbench.engine.shapes import find_shape
from kvbench.metrics.records import FINISHED
from kvbench.metrics.store import RunFolder
from kvbench.planner.catalog import find_card
from kvbench.planner.memory import Serving, plan_memory
from kvbench.planner.steps import step_cost
from kvbench.planner.work import StepWork
from kvbench.reports.groups import Results
from kvbench.reports.html import render_report

CARD = ("--device", "sim:H100-SXM")
SHORT = (*CARD, "--input-len", "60", "--output-len", "20", "--repeats", "1")
GRID = (*SHORT, "--concurrency", "4,16", "--range-ratio", "0.5", "--repeats", "2")


pytestmark = pytest.mark.usefixtures("what_is_loaded_stays")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(*args: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(args))
    assert (ended.value.code or 0) == code


def sweep(*args: str, output: str = "out", code: int = 0) -> RunFolder:
    call("sweep", *args, "--output", output, code=code)
    return RunFolder.open(output)


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    call("sweep", *args, code=2)
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_seed_gives_the_same_bytes_but_for_the_time_of_day() -> None:
    first, second = (sweep(*GRID, "--preemption", "recompute,swap", output=name) for name in ("one", "two"))
    files = sorted(file.relative_to("one") for file in Path("one").rglob("*") if file.is_file())
    assert files == sorted(file.relative_to("two") for file in Path("two").rglob("*") if file.is_file())
    of_the_day = {"run.json", "report.html", ".lock"}
    same = [file for file in files if file.name not in of_the_day]
    assert len(same) == 4 * 12 + 1  # cells.csv, and of 3 variants x 2 loads x 2 repeats a row and three tables
    assert all(Path("one", file).read_bytes() == Path("two", file).read_bytes() for file in same)

    def timeless(manifest: dict[str, Any]) -> dict[str, Any]:
        times = {"created", "finished", "command"}
        (session,) = manifest["sessions"]
        session = {name: value for name, value in session.items() if name not in times}
        return {name: value for name, value in manifest.items() if name not in times} | {"sessions": [session]}

    assert timeless(first.manifest) == timeless(second.manifest)
    pages = [re.sub(r"made [-\d :]+UTC|--output \w+", "", page) for page in map(render_report, (first, second))]
    assert pages[0].replace(">one<", "><") == pages[1].replace(">two<", "><")


def test_neither_torch_nor_transformers_is_loaded() -> None:
    code = (
        "import sys; from kvbench.cli.app import main\n"
        f"try: main({['sweep', *SHORT, '--concurrency', '2', '--output', 'out']})\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "loaded = {'torch', 'transformers', 'triton'} & set(sys.modules); assert not loaded, loaded"
    )
    root = str(Path(__file__).resolve().parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": root}, check=False
    )
    assert done.returncode == 0, done.stderr


def test_rows_and_manifest_tell_what_was_simulated_and_from_what() -> None:
    folder = sweep(*SHORT, "--concurrency", "8", "--tp", "2", "--model", "LLAMA-3-8b")
    card, shape = find_card("h100-sxm"), find_shape("Llama-3-8B")
    assert shape is not None and card.usd_per_hour is not None
    memory = plan_memory(shape, card, Serving(tp=2))
    for row in folder.rows():
        assert (row["evidence"], row["device"], row["model"]) == ("simulated", "sim:h100-sxm", "Llama-3-8B")
        assert (row["tp"], row["dtype"], row["attention"], row["status"]) == (2, "bfloat16", None, "ok")
        assert row["pool_tokens"] == memory.pool_tokens and row["model_load_s"] is row["cold_first_token_s"] is None
        assert row["host_rss_bytes_peak"] is None if "host_rss_bytes_peak" in row else True
        price = sum(card.usd_per_hour) / 2 * 2 / (row["output_tokens_per_s"] * 3600) * 1e6
        assert row["usd_per_million_output_tokens"] == pytest.approx(price)
        assert row["output_tokens_per_s_per_card"] == pytest.approx(row["output_tokens_per_s"] / 2)
    device = folder.manifest["device"]
    assert device["kind"] == "sim" and device["name"] == "2 x H100 SXM (simulated)" and device["cards"] == 2
    assert device["card"]["bandwidth_bytes_per_s"] == card.bandwidth_bytes_per_s
    assert folder.manifest["price"]["low"] == card.usd_per_hour[0] and folder.manifest["price"]["source"]
    assert "peak_memory_bytes" not in folder.manifest
    with Path("out/cells.csv").open() as table:
        assert {line["evidence"] for line in csv.DictReader(table)} == {"simulated"}


def test_each_step_takes_what_the_cost_model_says() -> None:
    folder = sweep(*SHORT, "--concurrency", "4", "--backend", "paged")
    shape = find_shape("Llama-3.1-8B")
    assert shape is not None
    cost = step_cost(find_card("h100-sxm"), shape, "bfloat16", 1).cost
    run = folder.run(folder.manifest["cells"][0]["id"])
    for step in run.steps:
        work = StepWork(
            step.decode_tokens, step.prefill_tokens, step.attended_pairs, step.context_tokens, step.sampled_tokens
        )
        assert step.end_s - step.start_s == pytest.approx(cost.seconds(work), abs=1e-9)
    assert {one.status for one in run.requests} == {FINISHED}


def test_every_table_sentence_and_title_says_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    folder = sweep(*GRID)
    shown = capsys.readouterr().out
    titles = [line for line in shown.splitlines() if line.startswith(("Contiguous", "Paged", "Where the KV"))]
    assert len(titles) == 3 and all(title.endswith("(simulated)") for title in titles)
    assert shown.startswith("Simulated: Llama-3.1-8B") and "\nSimulated: At " in shown
    assert "measured" not in shown.lower()

    page = render_report(folder)
    for tag in ("title", "h1", "h2", "h3", "caption", 'p class="lead"'):
        said = re.findall(rf"<{tag}[^>]*>(.*?)</{tag.split()[0]}>", page, re.S)
        told = [
            text
            for text in said
            if not re.search(
                r"What the words mean|How this was made|KV memory that holds|Held but|Answers in the|Waiting for", text
            )
        ]
        assert told or tag == "caption"
        if tag != "caption":
            assert all("simulated" in text.lower() for text in told), (tag, told)
    results = Results.of(folder)
    assert results.label == "simulated" and {group.evidence for group in results.groups} == {"simulated"}

    call("report", "out", "--format", "json")
    assert {row["evidence"] for row in json.loads(capsys.readouterr().out)} == {"simulated"}
    call("report", "out", "--format", "markdown")
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("###")]
    assert heads and all("(simulated)" in head for head in heads)
    call("compare", "out")
    compared = capsys.readouterr()
    assert compared.out.count("(simulated)") >= 4 and "\nSimulated: out tok/s, the primary metric" in compared.err


def test_simulated_is_never_held_against_measured_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    sweep(*SHORT, "--model", "tiny", "--concurrency", "2", "--num-prompts", "4", output="simulated")
    args = ("--model", "tiny", "--dtype", "float32", "--device", "cpu", "--input-len", "60", "--output-len", "20")
    sweep(*args, "--repeats", "1", "--num-warmups", "0", "--concurrency", "2", "--num-prompts", "4", output="measured")
    capsys.readouterr()
    call("compare", "measured", "simulated", "--format", "csv")
    shown = capsys.readouterr()
    assert "NOT ALIKE: the kind of device: cpu against sim" in shown.err
    assert "Measured and simulated: out tok/s" in shown.err
    (kinds,) = {(row["base_evidence"], row["new_evidence"]) for row in csv.DictReader(shown.out.splitlines())}
    assert kinds == ("measured", "simulated")


@pytest.mark.parametrize(
    "args",
    [
        ("--request-rate", "20", "--num-prompts", "30"),
        ("--request-rate", "20", "--arrivals", "onoff:on=1s:off=2s", "--duration", "6s"),
        ("--request-rate", "50", "--num-prompts", "30", "--max-concurrency", "2"),
        ("--concurrency", "8", "--reserve", "max,declared,pow2,oracle", "--kv-memory", "32MiB"),
        ("--concurrency", "8", "--batching", "static,continuous"),
        ("--concurrency", "8", "--preemption", "recompute,swap", "--kv-memory", "32MiB", "--num-prompts", "40"),
        ("--concurrency", "4", "--prefix-len", "64", "--prefix-caching", "off,on"),
        ("--concurrency", "4", "--turns", "3", "--think-time", "1s", "--prefix-caching", "on"),
        ("--concurrency", "4", "--n", "1,3", "--temperature", "0.8"),
        ("--concurrency", "4", "--kv-dtype", "fp8", "--model", "gpt-oss-20b"),
        ("--concurrency", "4", "--until-ci", "20%", "--repeats", "8"),
        ("--concurrency", "4", "--slo", "tpot:1", "--price", "3"),
    ],
    ids=lambda args: " ".join(args[2:4]),
)
def test_what_a_real_device_can_be_asked_a_simulated_one_can(args: tuple[str, ...]) -> None:
    folder = sweep(*SHORT, *args)
    assert {row["status"] for row in folder.rows()} == {"ok"}
    if "--preemption" in args:
        assert any(row["preemptions"] for row in folder.rows()) and any(row["swaps"] for row in folder.rows())
    if "--prefix-caching" in args:
        assert any(row["cached_tokens_total"] for row in folder.rows())


@pytest.mark.parametrize("flag", ["--find-max-rate", "--find-max-concurrency"])
def test_searches_find_a_limit(flag: str) -> None:
    args = (*CARD, "--input-len", "200", "--output-len", "20", "--num-prompts", "60", "--backend", "paged")
    folder = sweep(*args, flag, "--slo", "tpot:12", "--slo", "ttft:200", "--max-num-seqs", "64")
    (found,) = folder.manifest["search"]
    assert found["answer"] > 1 and found["retests_passed"] <= found["retests"]


def test_a_list_of_support_chats_needs_no_tokenizer_and_texts_do(capsys: pytest.CaptureFixture[str]) -> None:
    sweep(*CARD, "--repeats", "1", "--dataset", "support", "--concurrency", "4")
    Path("chats.jsonl").write_text('{"prompt": "a text"}\n')
    Path("ids.jsonl").write_text('{"prompt": [1, 2, 3], "output_tokens": 4}\n')
    jsonl = (*CARD, "--repeats", "1", "--dataset", "jsonl", "--ignore-eos", "--concurrency", "2", "--dataset-path")
    sweep(*jsonl, "ids.jsonl", output="ids")
    capsys.readouterr()
    assert "this model has no tokenizer" in refused(capsys, *jsonl, "chats.jsonl")
    Path("sharegpt.json").write_text("[]")
    line = refused(capsys, *CARD, "--dataset", "sharegpt", "--dataset-path", "sharegpt.json")
    assert "this model has no tokenizer" in line


def test_a_config_is_a_model_and_a_file_has_cards(capsys: pytest.CaptureFixture[str]) -> None:
    Path("own").mkdir()
    fields = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    fields |= {"num_key_value_heads": 2, "intermediate_size": 1024, "vocab_size": 1000, "max_position_embeddings": 4096}
    Path("own/config.json").write_text(json.dumps(fields))
    Path("cards.toml").write_text(
        '[[card]]\nid = "mine"\nname = "My card"\nvendor_gb = 4\nbandwidth_gb_s = 100\nfp16_tflops = 10\n'
    )
    own = ("--repeats", "1", "--model", "own", "--input-len", "60", "--output-len", "8", "--concurrency", "2")
    folder = sweep("--device", "sim:MINE", "--gpu-file", "cards.toml", *own)
    assert {(row["model"], row["dtype"]) for row in folder.rows()} == {("own", "float16")}
    shown = capsys.readouterr().err
    assert "My card, simulated: 4.0 GiB, 0.1 TB/s, 10 TFLOP/s float16" in shown and "this card not among them" in shown
    assert {row["usd_per_million_output_tokens"] for row in folder.rows()} == {None}
    Path("cards.toml").write_text(Path("cards.toml").read_text().replace("100", "200"))
    shutil.rmtree(next(Path("out/cells").iterdir()))
    call("sweep", "--device", "sim:MINE", "--gpu-file", "cards.toml", *own, "--resume", "--output", "out", code=2)
    assert "what the card's times are reckoned from was" in capsys.readouterr().err


def test_the_rest_of_a_simulated_run_is_simulated_by_resume(capsys: pytest.CaptureFixture[str]) -> None:
    folder = sweep(*GRID)
    whole = {name: Path("out/cells", name, "result.json").read_bytes() for name in folder.stored()}
    for name in sorted(whole)[::2]:
        shutil.rmtree(folder.path / "cells" / name)
    sweep(*GRID, "--resume")
    assert {name: Path("out/cells", name, "result.json").read_bytes() for name in whole} == whole
    shutil.rmtree(folder.path / "cells" / min(whole))
    capsys.readouterr()
    other = [word.replace("H100-SXM", "h200-sxm") for word in GRID]
    line = refused(capsys, *other, "--resume", "--output", "out")
    assert "--device was sim:h100-sxm, is sim:h200-sxm" in line


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--device", "sim:h1000"), "the nearest known one is h100"),
        (("--device", "sim:"), "use cpu, cuda, cuda:N or sim:CARD"),
        (("--device", "sim:t4", "--model", "Llama-3-70B"), "leaves no room for a cache on T4"),
        (("--device", "sim:t4", "--dtype", "bf16"), "no rate for T4; use float16"),
        ((*CARD, "--dtype", "float32"), "use bfloat16 or float16"),
        ((*CARD, "--tp", "33"), "does not share the 32 heads of Llama-3.1-8B"),
        ((*CARD, "--tp", "0"), "--tp must be at least 1"),
        (("--device", "cpu", "--tp", "2"), "add --device sim:CARD or drop --tp"),
        (("--device", "cpu", "--kv-dtype", "fp8"), "--kv-dtype fp8 is for simulated cards only"),
        (("--device", "cpu", "--gpu-file", "x"), "--gpu-file describes cards to simulate"),
        ((*CARD, "--model", "tiny", "--target", "http://127.0.0.1:1"), "two kinds of evidence do not share a run"),
        ((*CARD, "--no-ignore-eos"), "no answer can end by itself; add --ignore-eos"),
        ((*CARD, "--weights", "random"), "loads no weights"),
        ((*CARD, "--model", "nosuch"), "unknown model 'nosuch'"),
        ((*CARD, "--input-len", "200000"), "beyond the 131,072 positions of Llama-3.1-8B"),
        ((*CARD, "--max-model-len", "200000"), "beyond the 131072 positions"),
        ((*CARD, "--gpu-memory-utilization", "0.1"), "leaves no room for a cache"),
        ((*CARD, "--kv-memory", "70GiB"), "beside 15.0 GiB of weights is beyond the 79.2 GiB of H100 SXM"),
        (("--device", "sim:l4", "--model", "Llama-3.1-70B", "--kv-memory", "1GiB"), "GiB of weights is beyond the 2"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_a_line(
    args: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, *args)


def test_eight_bits_of_kv_hold_twice_the_tokens_and_take_half_the_time_to_read() -> None:
    shape, card = find_shape("Llama-3.1-8B"), find_card("h100-sxm")
    assert shape is not None
    half, whole = (plan_memory(shape, card, Serving(kv_dtype=kv)).pool_tokens for kv in ("fp8", "bfloat16"))
    assert half == pytest.approx(2 * whole, abs=32)
    reads = [step_cost(card, shape, "bfloat16", 1, kv_itemsize=size).cost.context_s for size in (1, 2)]
    assert reads[1] == pytest.approx(2 * reads[0])


def test_time_on_the_card_and_time_to_compute_it_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    sweep(*SHORT, "--concurrency", "4")
    shown = capsys.readouterr().err
    assert re.search(r"about \d+:\d\d to compute\n", shown)
    assert re.search(r"out tok/s, 4 at once, \d+\.\d s simulated in \d+\.\d s", shown)
    assert "warming up" not in shown and "other programs use" not in shown
    row, run = RunFolder.open("out").rows()[0], RunFolder.open("out").run("paged-c4-i60-o20-r0")
    assert run.end_s == row["end_s"] and all(step.host_s < 1e-9 for step in run.steps)
