"""Calibration on steps whose truth is known: found again, named where it cannot be, judged where it was not fitted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvbench.errors import KvbenchError
from kvbench.metrics.records import StepRecord
from kvbench.planner.calibrate import PARAMETERS, Observed, calibrate, measure_rates, observe, predict

TRUTH = (8e-3, 2e-4, 1e-5, 3e-7, 4e-9, 5e-4)
STEP = StepRecord(0, 0.0, 0.1, 0.0, 0.1, 4, 0, 4, 4, 400, 400, 4, 0, 0, 9999, 400, 400, 9599)


def steps_of(users: int, context: int, noise: float = 0.0, seed: int = 0) -> Observed:
    """Forty decodes of some users and a few prompts beside them."""
    rng = np.random.default_rng(seed)
    works = []
    for i in range(40):
        held = users * (context + i)
        works.append((users, 0, held, held, users))
        if i % 10 == 0:
            works.append((users - 1, context, held + context * (context + 1) // 2, held + context, users))
    array = np.array(works, dtype=float).T
    seconds = predict(TRUTH, array) * np.exp(noise * rng.standard_normal(array.shape[1]))
    return Observed(f"c{users}-i{context}", array, seconds)


MANY = [(1, 64), (1, 2048), (4, 512), (16, 64), (16, 1024), (64, 256)]


def test_what_made_the_steps_is_found_again() -> None:
    found = calibrate([steps_of(users, context) for users, context in MANY])
    values = {one.name: one.value for one in found.coefficients}
    for (name, _), truth in zip(PARAMETERS, TRUTH, strict=True):
        if name != "sampled_s":  # as many are drawn as decode, but for a few
            assert values[name] == pytest.approx(truth, rel=0.1), name
    assert max(abs(total) for _, _, total, _, _ in found.held_out) < 0.05  # some loads alone tell a coefficient
    assert found.condition >= 1 and found.steps == sum(44 for _ in MANY)


def test_noise_widens_the_errors_and_held_out_ones_stay_honest() -> None:
    found = calibrate([steps_of(users, context, 0.1, i) for i, (users, context) in enumerate(MANY)])
    assert len(found.held_out) == len(MANY)
    assert all(0.03 < mape < 0.2 and abs(total) < 0.15 for _, _, total, mape, _ in found.held_out)
    by_name = {one.name: one for one in found.coefficients}
    assert by_name["step_s"].identified and (by_name["step_s"].error or 0) > 0


def test_what_one_load_cannot_tell_is_not_identified() -> None:
    """One user decoding alone: a step and a sequence are the same thing, and no prompt is long."""
    alone = steps_of(1, 64)
    only = Observed("alone", alone.works[:, alone.works[1] == 0], alone.seconds[alone.works[1] == 0])
    found = calibrate([only])
    by_name = {one.name: one for one in found.coefficients}
    assert not by_name["token_s"].identified and not by_name["pair_s"].identified
    assert sum(one.identified for one in found.coefficients) < 3 and not found.held_out


def test_steps_that_moved_rows_are_left_out_and_impossible_ones_refused() -> None:
    kept = observe(
        "x", [STEP, replace(STEP, copied_tokens=3), replace(STEP, swapped_in_tokens=1), replace(STEP, sequences=0)]
    )
    assert kept.works.T.tolist() == [[4, 0, 400, 400, 4]] and kept.seconds.tolist() == [0.1]
    with pytest.raises(KvbenchError, match="took no time"):
        observe("x", [replace(STEP, end_s=0.0)])
    with pytest.raises(KvbenchError, match="1 steps are too few"):
        calibrate([kept])


def test_the_machines_rates_are_measured() -> None:
    rates = measure_rates("cpu", "float32")
    assert 1e8 < rates.copy_bytes_per_s < 1e13 and 1e8 < rates.matmul_flops_per_s < 1e15


def test_the_command(tmp_path: Path) -> None:
    kvbench = [sys.executable, "-m", "kvbench"]
    sweep = [*kvbench, "sweep", "--model", "tiny", "--backend", "paged", "--concurrency", "1,4", "--input-len", "16,64"]
    run = tmp_path / "run"
    limits = ["--output-len", "24", "--num-prompts", "8", "--repeats", "1", "--output", str(run)]
    subprocess.run([*sweep, *limits], check=True, capture_output=True)
    done = subprocess.run(
        [*kvbench, "calibrate", str(run), "--no-microbenchmark", "--format", "json"], check=True, capture_output=True
    )
    [found] = json.loads(done.stdout)
    assert found["backend"] == "paged" and found["model"] == "tiny" and found["machine"] is None
    assert [c["name"] for c in found["coefficients"]] == [name for name, _ in PARAMETERS]
    assert {line["configuration"] for line in found["held_out"]} == {
        f"paged-c{users}-i{length}-o24" for users in (1, 4) for length in (16, 64)
    }
    shown = subprocess.run([*kvbench, "calibrate", str(run)], check=True, capture_output=True, text=True).stdout
    assert "condition number" in shown and "GB/s" in shown
    again = tmp_path / "again"
    shutil.copytree(run, again)
    runs = [str(run), str(again), str(run)]
    done = subprocess.run(
        [*kvbench, "calibrate", *runs, "--no-microbenchmark", "--format", "json"], check=True, capture_output=True
    )
    [both] = json.loads(done.stdout)  # a configuration is never predicted from its like in another run
    assert both["steps"] == 2 * found["steps"] and len(both["held_out"]) == len(found["held_out"])
    damaged = next(again.glob("cells/*/steps.parquet"))
    damaged.write_bytes(b"x")
    none = subprocess.run([*kvbench, "calibrate", str(again)], capture_output=True, text=True, check=False)
    assert none.returncode == 2 and none.stderr.count("\n") == 1 and f"{damaged} is damaged or gone" in none.stderr
    none = subprocess.run([*kvbench, "calibrate", str(tmp_path / "none")], capture_output=True, text=True, check=False)
    assert none.returncode == 2 and none.stderr.count("\n") == 1
