"""Loads from the command line to the report: conversations, traces, caps and what two equal cells have in common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli.app import main
from kvbench.metrics.records import RequestRecord
from kvbench.metrics.store import RunFolder

SMALL = ("--model", "tiny", "--dtype", "float32", "--repeats", "1", "--num-warmups", "1", "--save-tokens")
LENGTHS = ("--input-len", "12", "--output-len", "8")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def sweep(*args: str, output: str = "out", code: int = 0) -> RunFolder:
    with pytest.raises(SystemExit) as ended:
        main(["sweep", *SMALL, "--output", output, *args])
    assert (ended.value.code or 0) == code
    return RunFolder.open(output)


def requests(folder: RunFolder) -> dict[str, list[RequestRecord]]:
    return {row["backend"]: folder.run(row["cell"]).requests for row in folder.rows()}


def test_later_turns_carry_the_answers_given_and_hit_the_prefix_cache(capsys: pytest.CaptureFixture[str]) -> None:
    folder = sweep(
        *(*LENGTHS, "--range-ratio", "0.5", "--turns", "3", "--think-time", "20ms", "--concurrency", "2"),
        *("--num-prompts", "12", "--prefix-caching", "off,on", "--backend", "paged", "--kv-memory", "4MiB"),
    )
    rows = {row["prefix_caching"]: row for row in folder.rows()}
    assert {row["status"] for row in rows.values()} == {"ok"}
    answers = []
    for cached, row in rows.items():
        run = folder.run(row["cell"])
        assert [one.turn for one in run.requests] == [0, 1, 2] * 4 and row["turns_not_asked"] == 0
        for before, after in zip(run.requests, run.requests[1:], strict=False):
            if after.turn:
                known = [*(before.prompt_token_ids or []), *(before.output_token_ids or [])]
                assert after.prompt_token_ids is not None and after.prompt_token_ids[: len(known)] == known
                assert before.last_s is not None
                assert after.scheduled_s == pytest.approx(before.last_s + 0.02)
                assert after.cached_tokens == (len(known) - 1) // 16 * 16 * cached
        answers.append([one.output_token_ids for one in run.requests])
    assert answers[0] == answers[1] and rows[True]["prefix_hit_rate"] > 0.25 > rows[False]["prefix_hit_rate"] == 0
    assert "conversations of 3 turns, 0.02 s of thought" in capsys.readouterr().err


def test_a_turn_too_long_ends_its_conversation_and_the_rest_is_counted() -> None:
    folder = sweep(*LENGTHS, "--turns", "3", "--concurrency", "1", "--num-prompts", "6", "--max-model-len", "45")
    for row in folder.rows():
        assert (row["requests_finished"], row["requests_rejected"], row["turns_not_asked"]) == (2 * 1 + 2, 2, 0)


def test_a_recorded_trace_is_replayed_and_our_own_run_once_more(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:15:4{at}.5000000,{10 + at},{3 + at}" for at in (0, 2, 3, 3, 5)]
    Path("trace.csv").write_text("\n".join(lines))
    folder = sweep("--dataset", "azure", "--dataset-path", "trace.csv", "--trace-scale", "20")
    for records in requests(folder).values():
        assert [one.scheduled_s for one in records] == pytest.approx([0.0, 0.1, 0.15, 0.15, 0.25])
        assert [(one.input_tokens, one.output_tokens) for one in records] == [
            (10, 3),
            (12, 5),
            (13, 6),
            (13, 6),
            (15, 8),
        ]
    shown = capsys.readouterr()
    assert "as recorded, 20 times as fast" in shown.err and "load" in shown.out
    assert "<h1" in Path("out/report.html").read_text()
    assert folder.manifest["dataset"]["sha256"] and folder.manifest["config"]["trace_scale"] == 20

    cell = next(row["cell"] for row in folder.rows() if row["backend"] == "paged")
    again = sweep("--dataset", "run", "--dataset-path", f"out/cells/{cell}", "--duration", "200ms", output="again")
    first = requests(folder)["paged"][:4]
    for records in requests(again).values():
        assert [one.prompt_token_ids for one in records] == [one.prompt_token_ids for one in first]
        assert [one.output_token_ids for one in records] == [one.output_token_ids for one in first]
        assert [one.scheduled_s for one in records] == pytest.approx([0.0, 0.1, 0.15, 0.15])


def test_mooncakes_shared_blocks_are_found_in_the_cache() -> None:
    rows = [(0, 600, [1, 2]), (200, 1000, [1, 3]), (400, 520, [1, 4])]
    Path("trace.jsonl").write_text(
        "\n".join(
            json.dumps({"timestamp": at, "input_length": tokens, "output_length": 2, "hash_ids": ids})
            for at, tokens, ids in rows
        )
    )
    args = ("--dataset", "mooncake", "--dataset-path", "trace.jsonl", "--prefix-caching", "on", "--kv-memory", "16MiB")
    records = requests(sweep(*args))["paged"]
    assert [one.cached_tokens for one in records] == [0, 512, 512]
    assert len({tuple((one.prompt_token_ids or [])[:512]) for one in records}) == 1


def test_a_cap_that_binds_is_said(capsys: pytest.CaptureFixture[str]) -> None:  # vllm#45502
    folder = sweep(*LENGTHS, "--request-rate", "500", "--num-prompts", "40", "--max-concurrency", "2")
    for row in folder.rows():
        records = folder.run(row["cell"]).requests
        assert row["rate_held"] is False and row["peak_running"] <= 2
        assert row["achieved_rate_per_s"] < 0.98 * row["drawn_rate_per_s"] and row["largest_rate_1s_per_s"] >= 1
        assert any(one.sent_s > one.scheduled_s for one in records)
        waits = [one.sent_s - one.scheduled_s for one in records]
        assert row["ttft_p99_s"] > sorted(waits)[-2], "the wait for a slot is in TTFT"
    shown = capsys.readouterr()
    assert "at most 2 in flight" in shown.err
    assert "rate not held" in shown.out and "at most in a second" in " ".join(shown.out.split())
    page = Path("out/report.html").read_text()
    assert "rate not held" in page and "drawn schedule, (N − 1)" in page


def test_a_rate_that_is_held_is_not_complained_of(capsys: pytest.CaptureFixture[str]) -> None:
    folder = sweep(*LENGTHS, "--request-rate", "20", "--arrivals", "onoff:on=100ms:off=100ms", "--duration", "500ms")
    assert all(row["rate_held"] for row in folder.rows()) and "rate not held" not in capsys.readouterr().out
    closed = sweep(*LENGTHS, "--concurrency", "2", output="closed")
    assert "drawn schedule" not in Path("closed/report.html").read_text()
    assert all(row["rate_held"] is row["drawn_rate_per_s"] is None for row in closed.rows())


def test_two_equal_cells_ask_the_same_and_find_nothing_of_each_other() -> None:  # vllm#54227
    """A prefix cache that outlived its cell would answer the second one's prompts."""
    common = (*LENGTHS, "--concurrency", "2,2", "--backend", "paged", "--kv-memory", "4MiB")
    folder = sweep(*common)
    first, second = folder.rows()
    assert second["cell"] == f"{first['cell']}.2"
    told: list[Any] = []
    for row in (first, second):
        assert row["prefix_hit_rate"] == row["cached_tokens_total"] == 0
        run = folder.run(row["cell"])
        told.append([(one.prompt_token_ids, one.output_token_ids, one.cached_tokens) for one in run.requests])
    assert told[0] == told[1]
    cached = sweep(*common, "--prefix-caching", "on", "--prefix-len", "32", output="cached")
    hits = [[one.cached_tokens for one in cached.run(row["cell"]).requests] for row in cached.rows()]
    assert hits[0] == hits[1] and hits[0][:2] == [0, 0] and max(hits[0]) == 32


@pytest.mark.parametrize("length", ["1", "2", "8192"])
def test_lengths_are_exact_from_the_command_line(length: str) -> None:  # vllm#24591
    folder = sweep("--input-len", length, "--output-len", "2", "--concurrency", "1", "--num-prompts", "1",
                   "--backend", "paged", "--max-num-batched-tokens", "8192")  # fmt: skip
    (record,) = requests(folder)["paged"]
    assert record.input_tokens == len(record.prompt_token_ids or []) == int(length) and record.output_tokens == 2


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--turns", "2", "--n", "2", "--temperature", "0.5"), "goes on from one answer"),
        (("--turns", "9000", *LENGTHS), "all turns included, are beyond the 32,768 positions of tiny; lower --turns"),
        (("--input-dist", "lognormal:cv=2:max=40000", *LENGTHS), "clip them: --input-dist …:max="),
        (("--dataset", "run", "--dataset-path", "nowhere"), "cannot read --dataset-path nowhere"),
        (("--concurrency", "64", "--num-prompts", "10"), "10 requests never reach concurrency 64"),  # sglang#39398
    ],
)
def test_what_a_sweep_cannot_ask_is_one_line(
    capsys: pytest.CaptureFixture[str], args: tuple[str, ...], says: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sweep", *SMALL, *args])
    err = capsys.readouterr().err
    assert ended.value.code == 2 and says in err and err.splitlines()[-1].startswith("kvbench: ")
