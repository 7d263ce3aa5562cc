"""Ranges hold what they say, of data that they were not taken from, and are what the package ships."""

from __future__ import annotations

import math
import random
import tomllib
from pathlib import Path

import pytest
from test_score import text_of

from kvbench.cli.app import main
from kvbench.planner.intervals import (
    EVIDENCE,
    FEWEST,
    KINDS,
    NEW_CARD,
    NEW_MODEL,
    NEW_RATE,
    Nested,
    Residual,
    columns_of,
    find_range,
    range_of,
    ranges_of,
    shipped_ranges,
    write,
)


@pytest.mark.parametrize("n", [FEWEST, 18, 19, 40, 200])
def test_a_range_holds_nine_of_ten_next_values(n: int) -> None:
    """Over many draws; of fewer than 19 it can hold no more than (n - 1) / (n + 1)."""
    random.seed(n)
    held = 0
    for _ in range(2000):
        *seen, following = (random.gauss(0, 1) for _ in range(n + 1))
        found = range_of(seen)
        assert found is not None and found.n == n
        held += found.low <= math.exp(following) <= found.high
    promised = (n - 1) / (n + 1) if n < 19 else 0.9
    assert promised - 0.03 < held / 2000 < max(promised, 0.9) + 0.035


def test_too_few_residuals_give_no_range() -> None:
    assert range_of([0.1] * (FEWEST - 1)) is None
    assert find_range({}, NEW_RATE, "output_tput") is None


def test_a_fold_is_not_held_by_its_own_range() -> None:
    wide = [Residual(NEW_CARD, "tpot", "a", value) for value in (-2.0, 2.0)]
    near = [Residual(NEW_CARD, "tpot", f"b{i % 3}", 0.01 * i) for i in range(12)]
    nested, whole = Nested([*wide, *near]), ranges_of([*wide, *near])
    held = nested.find(NEW_CARD, "tpot_mean_ms", "a")
    assert held is not None and held.n == 12 and held.high == pytest.approx(math.exp(0.11))
    assert whole[NEW_CARD, "tpot"].high == pytest.approx(math.exp(2.0))


def test_a_range_needs_folds_and_not_rows_alone() -> None:
    few = [Residual(NEW_CARD, "tpot", f"b{i % 2}", 0.01 * i) for i in range(40)]
    assert ranges_of(few) == {}
    assert (NEW_CARD, "tpot") in ranges_of([*few, Residual(NEW_CARD, "tpot", "c", 0.0)])


def test_a_range_holds_the_prediction_where_most_were_off_to_one_side() -> None:
    found = range_of([0.2 + 0.01 * i for i in range(40)])
    assert found is not None and found.low == 1.0 and found.high > math.exp(0.5)


def test_what_goes_beyond_is_held_as_a_new_card() -> None:
    ranges = ranges_of(
        Residual(kind, "throughput", f"{i % 3}", width * (i / 10 - 1) + (2.0 if kind == NEW_MODEL else 0.0))
        for kind, width in ((NEW_RATE, 0.1), (NEW_MODEL, 0.1), (NEW_CARD, 1.0))
        for i in range(21)
    )
    near = columns_of(NEW_RATE, False, {"output_tokens_per_s": 100.0}, ranges)
    far = columns_of(NEW_RATE, True, {"output_tokens_per_s": 100.0}, ranges)
    assert (near["evidence_class"], far["evidence_class"]) == ("interpolated", "transferred")
    assert near["output_tokens_per_s_low"] == pytest.approx(100 * math.exp(-0.1))
    assert far["output_tokens_per_s_low"] == pytest.approx(100 * math.exp(-1.0))
    assert far["output_tokens_per_s_high"] == pytest.approx(100 * math.exp(2.1)), "that of a nearer class is wider"
    assert near["ttft_mean_s_low"] is near["tpot_mean_s_high"] is None
    assert set(EVIDENCE) == set(KINDS)


def test_shipped_ranges_are_wider_for_what_is_farther() -> None:
    found = shipped_ranges()
    for family in ("throughput", "tpot", "ttft"):
        width = [math.log(found[kind, family].high / found[kind, family].low) for kind in (NEW_RATE, NEW_CARD)]
        assert 0 < width[0] < width[1]
    again = tomllib.loads(write(found, "x.csv", "2026-11-30"))["range"]
    assert sum(map(len, again.values())) == len(found)


def test_ranges_need_what_was_held_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(text_of({}))
    with pytest.raises(SystemExit) as ended:
        main(["score", str(file), "--intervals", str(file.with_name("out.toml"))])
    assert ended.value.code == 2 and "add --cross-validate" in capsys.readouterr().err
