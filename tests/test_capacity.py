"""`kvbench capacity`, `gpus` and `models`: counts that equal filling the real allocators, at once, and one line for
every mistake."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_help import HEAVY, ROOT, one_line, run

from kvbench.cli.fit import Asked, ways
from kvbench.cli.stack import BACKENDS, CacheConfig
from kvbench.engine.sequence import Sequence
from kvbench.engine.shapes import SHAPES
from kvbench.engine.types import Request
from kvbench.planner.catalog import catalogue

LLAMA = ("capacity", "--model", "llama-3.1-8b", "--gpu", "h100")


def told(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    """The JSON of `kvbench ARGS --format json`."""
    code, out, err = run(capsys, *args, "--format", "json")
    assert (code, err) == (0, "")
    return json.loads(out, parse_constant=pytest.fail)


def filled(config: CacheConfig, backend: str, input_tokens: int, output_tokens: int) -> int:
    """How many equal sequences the real allocator takes before it says no, each with all the rows it will ever fill."""
    allocator, count = BACKENDS[backend].make_allocator(config), 0
    while True:
        request = Request(count, (1,) * input_tokens, output_tokens, output_tokens)
        sequence = Sequence.of(request)
        rows = input_tokens + output_tokens - 1
        if input_tokens + output_tokens > config.max_model_len or not allocator.could_hold(sequence, rows):
            return count
        if not allocator.reserve(sequence, rows):
            return count
        count += 1


@given(
    way=st.sampled_from(ways()),
    pool=st.integers(0, 700),
    block=st.integers(1, 20),
    longest=st.integers(2, 300),
    lengths=st.tuples(st.integers(1, 150), st.integers(1, 150)),
)
def test_users_at_once_are_those_the_real_allocators_take(
    way: Any, pool: int, block: int, longest: int, lengths: tuple[int, int]
) -> None:
    config = CacheConfig(pool, block, longest, reserve=way.reserve)
    if sum(lengths) <= longest:
        assert way.most_at_once(config, lengths) == filled(config, way.backend.name, *lengths)


@given(way=st.sampled_from(ways()), pool=st.integers(1, 300), block=st.integers(1, 20), positions=st.integers(2, 200))
def test_the_longest_context_fits_alone_and_one_more_token_does_not(
    way: Any, pool: int, block: int, positions: int
) -> None:
    config = CacheConfig(pool, block, 2, reserve=way.reserve)
    longest = way.longest(config, positions)
    for length in range(2, positions + 1):
        fits = filled(replace(config, max_model_len=length), way.backend.name, length - 1, 1) > 0
        assert fits == (length <= longest), length


def test_the_sum_and_the_users_of_llama_on_an_h100(capsys: pytest.CaptureFixture[str]) -> None:
    facts = told(capsys, *LLAMA)
    assert facts["kv_bytes_per_token"] == 131_072
    assert facts["parameters"] == 8_030_261_248 and facts["weights_bytes"] == 2 * 8_030_261_248
    assert facts["pool_tokens"] == pytest.approx(420_905, rel=2e-4)
    assert facts["pool_bytes"] == facts["pool_tokens"] * 131_072
    users, pool = facts["max_concurrency"], facts["pool_tokens"]
    assert users["contiguous"]["8000"] == pool // 128_000 == 3
    assert users["contiguous declared"]["8000"] == pool // 131_072 * 16
    assert users["paged"]["8000"] == pool // 8000 == 52
    assert list(users["paged"]) == [str(1000 * 2**power) for power in range(8)]
    assert facts["longest_context_tokens"] == dict.fromkeys(users, 131_072)


def test_context_lengths_policies_and_blocks_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ("--input-len", "100,300", "--output-len", "100,300", "--block-size", "64", "--max-model-len", "1000")
    facts = told(capsys, *LLAMA, *lengths)
    users, pool = facts["max_concurrency"], facts["pool_tokens"]
    assert list(users["paged"]) == ["200", "100+300", "300+100", "600"]
    assert set(users["contiguous"].values()) == {pool // 1000}
    assert users["contiguous pow2"]["100+300"] == pool // 1024 * 1  # 100 + 512 rows, rounded to 1024
    assert users["contiguous oracle"]["100+300"] == pool // 1024 * 2
    assert users["paged"]["200"] == pool // 64 // 4
    assert facts["max_model_len"] == 1000


def test_several_cards_stand_beside_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = told(capsys, *LLAMA[:3], "--gpu", "h200,l4")
    assert (first["gpu"], second["gpu"]) == ("h200-sxm", "l4")
    code, out, _ = run(capsys, *LLAMA[:3], "--gpu", "h200,l4")
    assert code == 0 and "Beside each other" in out and out.count("Users at once") == 2


@pytest.mark.parametrize(("tp", "bytes_"), [(1, 131_072), (8, 16_384), (32, 4_096)])
def test_keys_and_values_of_each_of_several_cards(capsys: pytest.CaptureFixture[str], tp: int, bytes_: int) -> None:
    facts = told(capsys, *LLAMA, "--tensor-parallel-size", str(tp))
    assert facts["kv_bytes_per_token"] == max(bytes_, 16_384)
    assert facts["usd_per_hour_high"] == 5 * tp


def test_cards_that_share_unevenly_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    uneven = ("capacity", "--model", "Qwen2.5-7B", "--gpu", "h100", "--tp", "8")
    assert told(capsys, *uneven)["kv_bytes_per_token"] == 14_336
    assert "28 heads over 8 cards go unevenly" in " ".join(run(capsys, *uneven)[1].split())


def test_fp8_and_half_dtypes_as_the_card_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, *LLAMA, "--kv-dtype", "fp8_e4m3")["kv_bytes_per_token"] == 65_536
    facts = told(capsys, "capacity", "--model", "tiny", "--gpu", "t4")
    assert (facts["dtype"], facts["kv_dtype"]) == ("float16", "float16")  # a T4 has no bfloat16
    assert told(capsys, *LLAMA, "--dtype", "fp32")["kv_bytes_per_token"] == 262_144


def test_weights_in_another_scheme(capsys: pytest.CaptureFixture[str]) -> None:
    layers = 8_030_261_248 - 2 * 128256 * 4096 - 65 * 4096
    whole = 2 * (2 * 128256 * 4096 + 65 * 4096)
    assert told(capsys, *LLAMA, "--quantization", "int4")["weights_bytes"] == layers * 4.15625 / 8 + whole
    assert (
        told(capsys, *LLAMA, "--quantization", "FP8")["weights_bytes"] == round(layers * (8 + 32 / 2**14) / 8) + whole
    )
    gpt_oss = ("capacity", "--model", "gpt-oss-20b", "--gpu", "h100", "--quantization", "none")
    assert told(capsys, *gpt_oss)["weights_bytes"] == 2 * 20_914_757_184


def test_a_model_that_does_not_fit_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    facts = told(capsys, "capacity", "--model", "Llama-3.1-70B", "--gpu", "h100")
    assert facts["pool_tokens"] == 0 and facts["missing_bytes"] > 60 * 2**30
    assert facts["enough"]["tp"] == 2 and not any(facts["max_concurrency"]["paged"].values())
    _, out, _ = run(capsys, "capacity", "--model", "Llama-3.1-70B", "--gpu", "h100")
    assert out.startswith("Llama-3.1-70B in bfloat16 does not fit on one H100 SXM: ")
    assert "--tp 2 does, with " in " ".join(out.split())
    _, out, _ = run(capsys, *LLAMA, "--gpu-memory-utilization", "0.001")
    assert "no number of them that can share it holds it" in " ".join(out.split())


def test_tables_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "capacity", "--model", "gpt-oss-20b", "--gpu", "H100", "--price", "2.5")
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert text.startswith("gpt-oss-20b in bfloat16 on one H100 SXM leaves 50.3 GiB for keys and values: ")
    for words in (
        "- weights",
        "- padding of quantised experts",
        "= KV pool",
        "paged windowed",
        "$2.50 an hour (--price)",
    ):
        assert words in text
    assert "exact" in text and "estimated" in text and "catalogue" in text
    few = " ".join(run(capsys, *LLAMA, "--max-num-seqs", "1", "--gpu-memory-utilization", "0.925")[1].split())
    assert "92.5% of the card's 79.18 GiB" in few and "a layer of 8,192 tokens" in few
    experts = " ".join(run(capsys, "capacity", "--model", "gpt-oss-20b", "--gpu", "h100", "--tp", "2")[1].split())
    assert "parameters in bfloat16, experts in mxfp4 (4.25 bits), one of 2 shares" in experts
    _, markdown, _ = run(capsys, *LLAMA, "--format", "markdown")
    assert "| term | GiB |" in markdown and "### Users at once" in markdown


def test_every_row_for_a_spreadsheet(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *LLAMA, "--format", "csv")
    rows = list(csv.DictReader(out.splitlines()))
    assert code == 0 and len(rows) == 8 * 5
    facts = told(capsys, *LLAMA)
    for row in rows:
        assert int(row["max_concurrency"]) == facts["max_concurrency"][row["way"]][row["context"]]
        assert row["weights_bytes"] == "16060522496"


def test_a_users_card_and_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "cards.toml").write_text('[[card]]\nid = "mine"\nvendor_gb = 100\nbandwidth_gb_s = 1000\n')
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config |= {"num_hidden_layers": 2, "vocab_size": 100, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    own = ("--gpu-file", str(tmp_path / "cards.toml"))
    facts = told(capsys, "capacity", "--model", str(tmp_path), "--gpu", "mine", *own)
    assert (facts["gpu"], facts["kv_bytes_per_token"]) == ("mine", 2 * 2 * 64 * 2)
    assert facts["usd_per_hour_low"] is None
    assert [row["id"] for row in told(capsys, "gpus", *own)][:2] == ["mine", "t4"]


def test_contexts_end_where_the_model_does(capsys: pytest.CaptureFixture[str]) -> None:
    facts = told(capsys, "capacity", "--model", "Llama-2-7B", "--gpu", "h100")
    assert list(facts["max_concurrency"]["paged"]) == ["1000", "2000", "4000"]
    facts = told(capsys, *LLAMA, "--max-model-len", "500")
    assert facts["contexts"] == [{"context": "500", "input_tokens": 499, "output_tokens": 1}]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--gpu", "h1000"), "unknown card 'h1000'; the nearest known one is h100-sxm"),
        (("--gpu", ""), "unknown card ''"),
        (("--gpu", "h100,"), "unknown card ''"),
        (("--model", "lama"), "unknown model 'lama': no built-in shape"),
        (("--model", "/no/such/config.json"), "cannot read /no/such/config.json: No such file"),
        (("--tp", "33"), "--tp 33 does not share the 32 heads of Llama-3.1-8B; choose among 1, 2, 4, 8, 16, 32"),
        (("--tp", "0"), "--tp must be at least 1"),
        (("--dtype", "int3"), "--dtype"),
        (
            ("--kv-dtype", "fp9"),
            "--kv-dtype 'fp9' is not one of auto, float32, bfloat16, float16, fp8; did you mean fp8?",
        ),
        (("--quantization", "int8"), "--quantization 'int8' is not one of none, fp8, int4, nvfp4, mxfp4"),
        (("--gpu-memory-utilization", "0"), "--gpu-memory-utilization must be above 0 and at most 1, not 0.0"),
        (("--gpu-memory-utilization", "nan"), "--gpu-memory-utilization"),
        (("--gpu-memory-utilization", "90"), "--gpu-memory-utilization"),
        (("--max-model-len", "1"), "--max-model-len must be at least 2"),
        (("--max-model-len", "131073"), "--max-model-len 131,073 is beyond the 131,072 positions of Llama-3.1-8B"),
        (("--max-num-batched-tokens", "0"), "--max-num-batched-tokens must be at least 1"),
        (("--max-num-seqs", "-1"), "--max-num-seqs must be at least 1"),
        (("--block-size", "0"), "--block-size must be at least 1"),
        (("--graph-memory", "lots"), "--graph-memory cannot read 'lots'"),
        (("--input-len", "0"), "--input-len takes numbers from 1"),
        (("--input-len", "200000"), "a context of 266,666 tokens is beyond the 131,072 positions of Llama-3.1-8B"),
        (("--input-len", "8", "--max-model-len", "9"), "a context of 10 tokens is beyond the 9 --max-model-len"),
        (("--output-len", "8"), "--output-len needs --input-len"),
        (("--price", "free"), "--price must be US dollars per card-hour"),
        (("--price", "l4=3"), "--price l4=3 names no card that is shown: h100-sxm"),
        (("--gpu-file", "/no/such"), "cannot read --gpu-file /no/such"),
        (("--format", "yaml"), "--format 'yaml' is not one of"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], args: tuple[str, ...], says: str) -> None:
    code, out, err = run(capsys, *LLAMA, *args)
    assert (code, out) == (2, "")
    assert says in one_line(err)


def test_model_and_card_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    for args, flag in (((*LLAMA[:3],), "--gpu"), (("capacity", *LLAMA[3:]), "--model")):
        code, out, err = run(capsys, *args)
        assert (code, out) == (2, "") and flag in one_line(err)


@given(
    model=st.sampled_from([shape.name for shape in SHAPES]),
    card=st.sampled_from(catalogue()),
    share=st.floats(0.01, 1),
    block=st.integers(1, 300),
    longest=st.integers(2, 200_000) | st.none(),
)
def test_any_model_on_any_card_has_facts_that_agree(
    model: str, card: Any, share: float, block: int, longest: int | None
) -> None:
    from kvbench.cli.fit import facts
    from kvbench.engine.hf_config import load_shape
    from kvbench.reports.capacity import render

    shape = load_shape(model)
    asked = Asked(
        dtype=None,
        kv_dtype=None,
        tp=1,
        gpu_memory_utilization=share,
        max_model_len=None if longest is None else min(longest, shape.max_positions),
        max_batched_tokens=None,
        max_sequences=None,
        block_size=block,
        graph_bytes=0,
        contexts=None,
    )
    found = facts(shape, card, asked)
    users = found["max_concurrency"]
    for context in found["contexts"]:
        label = context["context"]
        assert users["contiguous oracle"][label] >= users["contiguous declared"][label]
        rows = context["input_tokens"] + context["output_tokens"] - 1
        assert users["paged"][label] * rows <= found["pool_tokens"]
    for fmt in ("table", "markdown", "csv", "json"):
        assert render([found], fmt)


@pytest.mark.parametrize(
    "args",
    [LLAMA, (*LLAMA, "--format", "csv"), ("gpus",), ("models", "--format", "json")],
    ids=["capacity", "csv", "gpus", "models"],
)
def test_nothing_heavy_is_loaded(args: tuple[str, ...]) -> None:
    """So that the answer is instant."""
    script = (
        "import sys, json\n"
        "from kvbench.cli.app import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print(json.dumps(sorted(sys.modules)), file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", script, *args]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout and not set(json.loads(done.stderr.splitlines()[-1])) & HEAVY


def test_a_pool_of_ten_million_rows_is_counted_without_filling_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for backend in BACKENDS.values():
        monkeypatch.setattr(type(backend), "make_allocator", None, raising=False)
    facts = told(capsys, "capacity", "--model", "tiny", "--gpu", "b200")
    assert facts["pool_tokens"] > 10**7
    assert facts["max_concurrency"]["paged"]["1000"] == facts["pool_tokens"] // 16 // 63


def test_the_cards_are_listed_with_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "gpus")
    assert (code, err) == (0, "") and "prices: public price lists" in " ".join(out.split())
    assert all(card.id in out for card in catalogue())
    rows = told(capsys, "gpus", "--price", "h100=1")
    assert len(rows) == len(catalogue()) and all(row["memory_source"] and row["source"] for row in rows)
    assert next(row for row in rows if row["id"] == "h100-sxm")["usd_per_hour_low"] == 1
    assert "| card | name |" in run(capsys, "gpus", "--format", "markdown")[1]
    assert run(capsys, "gpus", "--format", "csv")[1].startswith("id,name,aliases,memory_bytes,memory_source,")


def test_the_models_are_listed_with_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "models")
    assert (code, err) == (0, "") and all(shape.name in out for shape in SHAPES)
    rows = told(capsys, "models")
    assert [row["name"] for row in rows] == [shape.name for shape in SHAPES]
    assert all(row["source"] for row in rows)
    assert next(row for row in rows if row["name"] == "DeepSeek-V3")["kv_bytes_per_token"] == 70_272
    for args in (("models", "--format", "x"), ("gpus", "--format", "x"), ("gpus", "--gpu-file", "x.toml")):
        code, out, err = run(capsys, *args)
        assert (code, out) == (2, "") and one_line(err)
