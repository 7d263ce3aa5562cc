"""Beyond the largest steps that step times were fitted to there is a range instead of one number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fakes import request
from test_simulator import Toy, run_on
from test_virtual import sweep

from kvbench.planner.intervals import find_range, shipped_ranges
from kvbench.planner.published import read_rows
from kvbench.planner.reach import Reach, reach_of
from kvbench.planner.score import look_at, usable
from kvbench.planner.shipped import shipped


def test_a_run_is_held_against_the_reach() -> None:
    run = run_on(Toy(0.1), [request(number, 10, 5) for number in range(6)], users=6)
    most = Reach(
        max(step.sequences for step in run.steps),
        max(step.context_tokens for step in run.steps),
        max(step.prefill_tokens for step in run.steps),
    )
    assert most.beyond(run.steps) == [] and most.sequences == 6
    assert most.beyond([]) == []
    assert replace(most, sequences=5).beyond(run.steps) == ["6 sequences at once in a step (fitted up to 5)"]
    assert len(Reach(0, 0, 0).beyond(run.steps)) == 3


def test_the_shipped_reach_is_that_of_the_runs_it_was_fitted_to(shared_data: Path) -> None:
    looked = look_at(read_rows(shared_data / "measured_points.csv"))
    assert reach_of(usable(looked.cases, dict(shipped().effects))) == shipped().reach


def test_a_sweep_beyond_the_fit_gives_a_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # inference-sim#1123
    monkeypatch.chdir(tmp_path)
    most = shipped().reach["vllm-v1-late"].sequences
    assert most < 1024
    flags = ["--concurrency", "16,1024", "--max-num-seqs", "1024", "--num-prompts", "1024", "--input-len", "16"]
    folder = sweep("--device", "sim:h100-sxm", *flags, "--output-len", "16", "--repeats", "1", "--backend", "paged")
    within, beyond = folder.rows()
    assert (within["beyond_fit"], within["evidence_class"]) == ("", "transferred")
    assert within["prediction_class"] == "new model"
    assert f"1,024 sequences at once in a step (fitted up to {most:,})" in beyond["beyond_fit"]
    assert (beyond["evidence_class"], beyond["prediction_class"]) == ("transferred", "new card")
    shipped_ones = [find_range(shipped_ranges(), kind, "output_tput") for kind in ("new model", "new card")]
    known = [one for one in shipped_ones if one is not None]
    for row, low, high in (
        (within, known[0].low, known[0].high),
        (beyond, min(one.low for one in known), max(one.high for one in known)),
    ):
        rate = row["output_tokens_per_s"]
        assert (row["output_tokens_per_s_low"], row["output_tokens_per_s_high"]) == (rate * low, rate * high)
        assert low < 1 < high
        assert row["tpot_mean_s_low"] < row["tpot_mean_s"] < row["tpot_mean_s_high"]
    said = " ".join(capsys.readouterr().out.split())
    assert "transferred predictions: 9 of 10 measurements" in said
    assert "! beyond what step times were fitted to: paged at 1,024 users" in said and "rather than one number" in said
