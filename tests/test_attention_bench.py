"""`kvbench attention`: what is counted, what cannot run says why, and the result in every format."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
import torch

from kvbench.cli.app import main
from kvbench.engine import ceilings, environment
from kvbench.engine.attention.bench import DECODE, PREFILL, Heads, Measured, Problem, measure
from kvbench.engine.attention.drawn import draw_layout
from kvbench.engine.attention.torch_path import TorchPath
from kvbench.engine.ceilings import Ceilings, Timing, timed

CPU = torch.device("cpu")
HEADS = Heads(heads=6, kv_heads=2, dim=64)
QUICK = ("--model", "tiny", "--dtype", "float32", "--input-len", "16", "--batch", "1,2", "--repeats", "1")


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ceilings.BUFFER_BYTES, "cpu", 2**20)
    monkeypatch.setitem(ceilings.SIDE, "cpu", 64)


def test_bytes_and_products_are_those_of_one_layer() -> None:
    decode, prompt = Problem(DECODE, 4, 100), Problem(PREFILL, 1, 3)
    assert decode.kv_bytes(HEADS, 2) == 2 * 4 * 100 * 2 * 64 * 2
    assert decode.flops(HEADS) == 4 * 4 * 100 * 6 * 64
    assert prompt.flops(HEADS) == 4 * (1 + 2 + 3) * 6 * 64
    assert (decode.queries, prompt.queries) == (1, 3)


def test_a_share_is_of_reads_when_decoding_and_of_products_in_a_prompt() -> None:
    limits = Ceilings(read_bytes_per_s=1e9, copy_bytes_per_s=1.0, flops_per_s=1e9, timings={})
    decode, prompt = Problem(DECODE, 4, 100), Problem(PREFILL, 1, 3)
    half = Timing((decode.kv_bytes(HEADS, 4) / 5e8,))
    assert Measured(decode, "paged", 16, half).share(HEADS, 4, limits) == pytest.approx(0.5)
    assert Measured(prompt, "paged", 16, Timing((prompt.flops(HEADS) / 1e9,))).share(HEADS, 4, limits) == pytest.approx(
        1
    )
    assert Measured(prompt, "paged", 16, None, "why").share(HEADS, 4, limits) is None


def test_medians_and_the_spread_of_the_middle_half() -> None:
    found = Timing((5.0, 1.0, 2.0, 3.0, 100.0))
    assert (found.median_s, found.spread) == (3.0, (5.0 - 2.0) / 3.0)
    assert Timing((2.0,)).spread == 0


def test_what_comes_before_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    ran: list[str] = []
    found = timed(lambda: ran.append("work"), CPU, repeats=3, before=lambda: ran.append("flush"))
    assert found.each_s == (1.0, 1.0, 1.0)
    assert ran == ["work", "work", *["flush", "work"] * 3]


@pytest.mark.parametrize("block_size", [None, 1, 4, 7])
def test_a_drawn_layout_gives_every_token_a_row_of_its_own(block_size: int | None) -> None:
    keys, queries = (5, 1, 12), (2, 1, 12)
    drawn = draw_layout(CPU, keys, queries, block_size)
    layout, places = drawn.layout, drawn.places.tolist()
    assert len(set(places)) == sum(keys) and min(places) >= 0 and max(places) < drawn.rows
    assert layout.starts.tolist() == [0, 2, 3, 15] and layout.ends.tolist() == list(keys)
    assert layout.writes.tolist() == [*places[3:5], places[5], *places[6:18]]
    token = 0
    for number, length in enumerate(keys):
        for position in range(length):
            if layout.tables is None:
                assert layout.bases is not None
                row = int(layout.bases[number]) + position
            else:
                size = layout.block_size
                row = int(layout.tables[number, position // size]) * size + position % size
            assert places[token] == row
            token += 1


def test_ways_that_fail_or_do_not_fit_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(TorchPath):
        def attend(self, *_: object, **__: object) -> torch.Tensor:
            raise RuntimeError("no\nkernel")

    found = list(measure(Problem(DECODE, 2, 16), HEADS, torch.float32, CPU, Broken, [4, 8], 1))
    assert [(one.way, one.block_size) for one in found] == [
        ("contiguous", None),
        ("paged", 4),
        ("paged", 8),
        ("torch sdpa", None),
    ]
    assert [one.reason for one in found] == ["RuntimeError: no kernel"] * 3 + [""]
    assert found[-1].timing is not None
    monkeypatch.setattr(environment, "available_bytes", lambda _: 10_000)
    (first, *_) = measure(Problem(DECODE, 2, 16), HEADS, torch.float32, CPU, TorchPath, [4], 1)
    assert first.timing is None and first.reason == "65,536 bytes, and 3,000 of memory may be used"


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["attention", *QUICK, *args])
    said = capsys.readouterr()
    return end.value.code, said.out, said.err


def test_the_command_in_every_format(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, text, _ = run(capsys, "--block-size", "4,16", "--output", str(tmp_path / "new"))
    assert not code and text.startswith("Decoding 2 x 16 tokens, ")
    assert text.count("paged, blocks of 4 ") == 4 and "torch sdpa" in text  # 2 + 1 problems, and the first line
    rows = list(csv.DictReader(io.StringIO((tmp_path / "new" / "attention.csv").read_text())))
    assert len(rows) == 3 * 4 and {row["kind"] for row in rows} == {DECODE, PREFILL}
    assert all(float(row["median_s"]) > 0 and float(row["flops_per_s"]) > 0 for row in rows)
    assert (tmp_path / "new" / "attention.svg").read_text().count("torch sdpa") == 1
    found = json.loads(run(capsys, "--format", "json")[1])
    assert found["head_dim"] == 32 and len(found["rows"]) == 3 * 3
    assert run(capsys, "--format", "markdown")[1].count("\n| ") == 3 * 3 + 2
    assert len(list(csv.DictReader(io.StringIO(run(capsys, "--format", "csv")[1])))) == 3 * 3


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--batch", "0"), "--batch"),
        (("--input-len", "x"), "--input-len"),
        (("--block-size", "-4"), "--block-size"),
        (("--model", "deepseek-v3"), "MLA"),
        (("--model", "lama"), "lama"),
        (("--dtype", "int8"), "--dtype"),
        (("--attention", "varlen"), "--attention"),
        (("--device", "tpu"), "--device"),
        (("--repeats", "0"), "--repeats"),
        (("--output", "/dev/null/x"), "--output"),
    ],
)
def test_bad_input_is_one_clear_line(args: tuple[str, str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, *args)
    assert code == 2 and said in error and len(error.strip().splitlines()) == 1


def test_measured_rows_are_of_the_path_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(run(capsys, "--attention", "torch", "--format", "json")[1])["attention"] == "torch"
