"""`--find-max-rate` and `--find-max-concurrency` from the command line: cells, answer, words, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai_server import OpenAIServer
from test_help import one_line, run
from test_sweep import TINY, sweep

import kvbench.cli.measure as measuring
from kvbench.cli.conduct import INTERRUPTED
from kvbench.metrics.store import RunFolder
from kvbench.reports.searches import searches

FLAGS = (*TINY, "--num-warmups", "0", "--slo", "ttft:500")
LIMITS = {"contiguous": 5.0, "paged": 9.0}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The cells that are asked for; nothing runs, and what is beyond LIMITS does not meet the SLOs."""
    cells: list[Any] = []

    def measured(job: Any, cell: Any, watch: object = None) -> tuple[dict[str, object], None]:
        cells.append(cell)
        met = cell.load.size <= LIMITS[cell.variant.backend]
        row = measuring._leading(job, cell, "ok", "")
        return row | {"slo_met": met, "attainment": 1.0 if met else 0.5, "output_tokens_per_s": 9.0}, None

    monkeypatch.setattr(measuring, "measure", measured)
    return cells


def test_the_largest_number_of_users(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    folder = sweep(*FLAGS, "--find-max-concurrency", "--seed", "40")
    shown = capsys.readouterr()
    found = {one["backend"]: one for one in folder.manifest["search"]}
    assert {name: one["answer"] for name, one in found.items()} == LIMITS
    assert all(one["of"] == "concurrency" and one["low"] <= one["answer"] + 1 for one in found.values())
    assert len(folder.rows()) == len(folder.manifest["cells"]) == len(asked) == sum(o["runs"] for o in found.values())
    assert len({row["cell"] for row in folder.rows()}) == len(asked)
    of_paged = [cell for cell in asked if cell.variant.backend == "paged"]
    assert [cell.seed for cell in of_paged] == list(range(40, 40 + len(of_paged)))
    again = [cell.repeat for cell in of_paged if cell.load.concurrency == 9]
    assert again == list(range(len(again))) and len(again) >= 5
    assert "a search from 16 on, of 40 runs at most for each of 2 variants" in shown.err
    last = " ".join(shown.out.split())
    assert "Contiguous max meets ttft:0.5s up to 5 users (95 % interval of the limit" in last
    assert "Paged meets ttft:0.5s up to 9 users" in last and "5 of 5 fresh seeds passed there" in last


@pytest.mark.usefixtures("asked")
def test_the_largest_rate_from_where_it_was_told(capsys: pytest.CaptureFixture[str]) -> None:
    folder = sweep(*FLAGS, "--backend", "paged", "--find-max-rate", "--request-rate", "2", "--arrivals", "constant")
    (found,) = folder.manifest["search"]
    assert found["of"] == "request_rate" and 8.0 < found["answer"] <= 9 <= found["high"] * 1.01
    assert folder.manifest["cells"][0]["request_rate"] == 2
    assert f"Paged meets ttft:0.5s up to {found['answer']:g} requests/s" in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("asked")
def test_no_more_users_than_the_workload_keeps_busy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """8 conversations of 4 turns; 20 rows of a trace."""
    monkeypatch.setitem(LIMITS, "paged", 1000.0)
    flags = (*TINY[:4], "--num-warmups", "0", "--slo", "ttft:500", "--backend", "paged", "--find-max-concurrency")
    folder = sweep(*flags, "--concurrency", "4", "--turns", "4", "--num-prompts", "32", "--input-len", "4")
    (found,) = folder.manifest["search"]
    assert (found["answer"], found["retests_passed"], found["low"]) == (8, 5, None)
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2024-05-10 00:00:00,3,4\n" * 20)
    sweep(*flags, "--concurrency", "4", "--dataset", "azure", "--dataset-path", str(trace), "--output", "other")
    assert RunFolder.open("other").manifest["search"][0]["answer"] == 20


def test_slos_that_nobody_meets_end_a_search_before_its_runs_take_hours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = iter([2.0, 0.01, 0.01])

    def measured(job: Any, cell: Any, watch: object = None) -> tuple[dict[str, object], None]:
        return measuring._leading(job, cell, "ok", "") | {"slo_met": False, "e2e_mean_s": next(rows)}, None

    monkeypatch.setattr(measuring, "measure", measured)
    folder = sweep(*FLAGS, "--backend", "paged", "--find-max-rate", "--num-prompts", "200", "--arrivals", "constant")
    shown = capsys.readouterr()
    (found,) = folder.manifest["search"]
    assert (found["answer"], found["runs"], len(folder.rows())) == (None, 3, 3)
    assert "even 0.25 fails, where requests hardly ever meet" in " ".join(shown.out.split())
    assert (
        "1 requests/s: requests come for 3:20" in shown.err and "0.25 requests/s: requests come for 13:20" in shown.err
    )


def test_a_percentile_is_told_where_one_decides(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every request alone is in time, since nothing is asked of one alone."""

    def measured(job: Any, cell: Any, watch: object = None) -> tuple[dict[str, object], None]:
        numbers = {"slo_met": False, "attainment": 1.0, "slo_ttft_p90_s": 1.25, "slo_tpot_p99_s": None}
        return measuring._leading(job, cell, "ok", "") | numbers, None

    monkeypatch.setattr(measuring, "measure", measured)
    options = (*TINY, "--num-warmups", "0", "--backend", "paged", "--find-max-concurrency", "--concurrency", "1")
    sweep(*options, "--slo", "ttft:p90:1000", "--slo", "tpot:p99:5")
    assert "repeat 1: fails, ttft p90 1.25 s, tpot p99 unknown\n" in capsys.readouterr().err


def test_a_server_that_dies_ends_a_search_with_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses = iter(["ok", "ok", "failed", "failed"])

    def measured(job: Any, cell: Any, watch: object = None) -> tuple[dict[str, object], None]:
        status = next(statuses)
        reason = "" if status == "ok" else "no request finished; 6 of 6 like: refused: gone"
        return measuring._leading(job, cell, status, reason) | {"slo_met": status == "ok"}, None

    with OpenAIServer() as server:
        monkeypatch.setattr(measuring, "measure", measured)
        target = ("--target", server.url, "--backend", "server")
        folder = sweep(*FLAGS, *target, "--find-max-concurrency", "--concurrency", "4", "--num-prompts", "64")
    (found,) = folder.manifest["search"]
    assert (found["answer"], found["runs"]) == (None, 4)
    said = " ".join(capsys.readouterr().out.split())
    assert "2 runs in a row had no answer at all, the last since no request finished; 6 of 6 like: refused" in said


def test_the_model_here_was_not_loaded_for_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(job: Any, cell: Any, watch: object = None) -> tuple[dict[str, object], None]:
        return measuring._leading(job, cell, "ok", "") | {"slo_met": True, "attainment": 1.0}, None

    with OpenAIServer() as server:
        monkeypatch.setattr(measuring, "measure", measured)
        options = ("--target", server.url, "--backend", "paged", "--concurrency", "4", "--num-prompts", "4")
        folder = sweep(*FLAGS, *options, "--find-max-concurrency")
    known = {row["backend"]: row["model_load_s"] is not None for row in folder.rows()}
    assert known == {"paged": True, "server": False}


@pytest.mark.usefixtures("asked")
def test_a_rate_that_the_trace_is_too_short_for_ends_the_search_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2024-05-10 00:00:00,3,4\n" * 20)
    flags = (*TINY[:4], "--num-warmups", "0", "--slo", "ttft:500", "--backend", "paged", "--find-max-rate")
    asked = ("--dataset", "azure", "--dataset-path", str(trace), "--duration", "10s", "--request-rate", "1")
    assert sweep(*flags, *asked).manifest["search"][0]["answer"] is None
    assert "no load is known to meet" in capsys.readouterr().out


def test_ctrl_c_keeps_what_was_asked(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    inner = measuring.measure

    def interrupted(*args: Any) -> Any:
        if len(asked) == 3:
            raise KeyboardInterrupt
        return inner(*args)

    monkeypatch.setattr(measuring, "measure", interrupted)
    folder = sweep(*FLAGS, "--find-max-rate", code=INTERRUPTED)
    assert len(folder.rows()) == len(folder.manifest["cells"]) == 3
    assert folder.manifest["search"] == [] and folder.manifest["interrupted"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--find-max-rate", "--find-max-concurrency"), "are two searches; run one of them"),
        (("--find-max-rate", "--concurrency", "4"), "begins at one load; give it as --request-rate N"),
        (("--find-max-concurrency", "--concurrency", "4,8"), "begins at one load; give it as --concurrency N"),
        (("--find-max-rate", "--repeats", "3"), "drop --repeats and --until-ci"),
        (("--find-max-rate", "--until-ci", "5%"), "drop --repeats and --until-ci"),
        (("--find-max-rate", "--resume"), "a search cannot be resumed"),
    ],
)
def test_what_makes_no_search(flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "sweep", *TINY, *flags)
    assert code == 2 and message in one_line(err)


def test_every_outcome_has_its_words() -> None:
    one = {"backend": "paged", "of": "request_rate", "retests": 5, "runs": 40, "warnings": [], "low": 2.0, "high": 2.5}
    none = one | {"answer": None, "retests_passed": 2, "why": "its answer did not pass again"}
    edge = one | {"answer": 9.0, "low": None, "high": None, "retests_passed": 0, "why": "the largest passes"}
    odd = one | {"answer": 2.0, "retests_passed": 4, "why": "the interval is narrow", "warnings": ["not monotone"]}
    said = searches({"slos": ["ttft:1.5s", "tpot:0.05s"], "search": [none, edge, odd]})
    assert said == [
        "Paged: no load is known to meet ttft:1.5s and tpot:0.05s: its answer did not pass again (95 % interval of the "
        "limit 2 to 2.5, 40 runs).",
        "Paged meets ttft:1.5s and tpot:0.05s up to 9 requests/s, and perhaps more: the largest passes.",
        "Paged meets ttft:1.5s and tpot:0.05s up to 2 requests/s (95 % interval of the limit 2 to 2.5, 40 runs); 4 of "
        "5 fresh seeds passed there, the interval is narrow. Not monotone.",
    ]
    assert searches({}) == []
