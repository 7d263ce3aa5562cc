"""`kvbench compare`: pairs, verdicts and their error rates, what cannot be paired, and what is not alike."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from power import Cell, comparison, detected, different, made_up, primary, until
from test_help import one_line, run
from test_reports_runs import add, both, make, refused, serve

from kvbench.errors import KvbenchError
from kvbench.metrics.precision import FEWEST_REPEATS, wide
from kvbench.metrics.stats import BETTER, UNPROVEN, WORSE, Interval, holm_levels, paired_difference, paired_ratio
from kvbench.metrics.store import RunFolder
from kvbench.metrics.summary import TWIN
from kvbench.reports.comparison import METRICS, Side, compare_runs, compare_variants, find_metric
from kvbench.reports.contests import PRIMARY, contests, pairs
from kvbench.reports.groups import Results

PRIMARY_METRIC = find_metric(PRIMARY)

# --- one statistics --------------------------------------------------------------------------------------------------


def test_a_difference_by_hand() -> None:
    """1, 2, 3 more: mean 2, s 1, t(2) = 4.302653; p of t = 2 · sqrt 3 = 3.4641 with 2 degrees of freedom is 0.0742."""
    found = paired_difference([0.0, 5.0, 1.0], [1.0, 7.0, 4.0], higher_is_better=True)
    assert found.effect.value == 2
    assert found.effect.high == pytest.approx(2 + 4.302652729911275 / 3**0.5)
    assert found.p == pytest.approx(1 - 3.4641016 / (2 + 12) ** 0.5, abs=1e-6)
    assert found.verdict == UNPROVEN
    assert paired_difference([0.0, 0.0], [0.0, 0.0], higher_is_better=True).p == 1.0
    assert paired_difference([None, 1.0], [1.0, 2.0], higher_is_better=True).effect == Interval(1.0, None, None, 1, 1)


@pytest.mark.parametrize(("n", "p", "verdict"), [(2, 0.5, UNPROVEN), (5, 0.0625, UNPROVEN), (6, 0.03125, BETTER)])
def test_counts_that_differ_all_alike_are_judged_by_their_signs(n: int, p: float, verdict: str) -> None:
    """One request of 20 more in time in every pair: 0.95 - 0.9 and 0.9 - 0.85 differ in their last digits only."""
    before = [0.85 + 0.05 * (at % 3) for at in range(n)]
    found = paired_difference(before, [share + 0.05 for share in before], higher_is_better=True)
    assert (found.p, found.verdict) == (p, verdict) and found.effect.value == pytest.approx(0.05)
    assert (found.effect.low is None) == (verdict == UNPROVEN)
    worse = paired_difference([0.0] * n, [3.0] * n, higher_is_better=False, level=1 - p)
    assert worse.verdict == WORSE and worse.effect.low == worse.effect.high == 3
    assert paired_difference([0.0] * n, [3.0] * n, higher_is_better=False, level=1 - p / 1.01).verdict == UNPROVEN


def test_counts_that_do_not_differ_are_seldom_told_apart() -> None:
    """Whole differences around 0 of every spread, 4,000 times each: 5 % at most, and then 6.5 % or more in 1 of 100,000
    cases. (By Student's t alone two pairs differ in up to 12 %.)"""
    from numpy.random import default_rng

    rng = default_rng(4)
    for n, spread in ((2, 0.7), (2, 1.0), (2, 2.0), (3, 1.0), (4, 1.0), (6, 0.5)):
        steps = rng.normal(0, spread, (4000, n)).round()
        told = sum(
            paired_difference([0.0] * n, row.tolist(), higher_is_better=True).verdict != UNPROVEN for row in steps
        )
        assert told <= 0.065 * 4000, (n, spread, told)


def test_the_p_value_and_the_interval_say_the_same() -> None:
    a, b = [10.0, 100.0, 31.0, 7.0], [10.6, 108.0, 31.9, 7.3]
    p = paired_ratio(a, b, higher_is_better=True).p
    assert p is not None and 0.001 < p < 0.05
    for level, verdict in ((1 - p - 1e-6, BETTER), (1 - p + 1e-6, UNPROVEN)):
        assert paired_ratio(a, b, higher_is_better=True, level=level).verdict == verdict


def test_holm_by_hand() -> None:
    """0.01 < 0.05 / 4 and 0.015 < 0.05 / 3 are rejected, 0.03 is not below 0.05 / 2, so 0.04 has no chance either."""
    levels = holm_levels([0.04, 0.01, None, 0.03, 0.015])
    assert levels == pytest.approx([1 - 0.05 / 2, 1 - 0.05 / 4, 0.95, 1 - 0.05 / 2, 1 - 0.05 / 3])
    assert holm_levels([]) == []
    assert holm_levels([0.2]) == pytest.approx([0.95])


def test_two_hundred_comparisons_of_equals() -> None:
    """Each differs with a probability of 5 %: of 200 22 or more do in 0.05 % of all cases. Holm promises the same of
    any of the others."""
    assert [n <= 21 for n in different(0, 200, 10)] == [True, True]


def test_a_planted_slowdown_is_found() -> None:
    """ln 0.9 is 4.71 standard errors of ten pairs of 5 % noise: found in 99 of 100."""
    assert detected(1000, 100, 10, 0.1, PRIMARY_METRIC) >= 95
    assert detected(1000, 100, 10, 0.1, find_metric("ttft_p99_s")) >= 60, "among twelve it takes more"


def test_rows_are_paired_by_seed_whatever_their_order() -> None:
    """Seeds differ by half among themselves; paired they differ by little."""
    effect = primary(comparison(7, 10, 0.1)).comparison.effect
    assert effect.low is not None and effect.high is not None and effect.value is not None
    assert effect.high / effect.low < 1.25
    assert effect.value == pytest.approx(0.9, rel=0.1)


def test_waiting_for_a_narrow_interval_costs_little() -> None:
    """95 % is promised of a fixed number; of those waited for 93 % hold. Of 1,000, 905 or fewer are below 0.2 %."""
    held, took = until(50_000, 1000, FEWEST_REPEATS, 0.05, 0.1)
    assert held > 0.905 and 10 < took < 25


def test_wide() -> None:
    assert wide(Interval(100.0, 94.9, 105.1, 6, 0), 0.05)
    assert not wide(Interval(100.0, 95.0, 105.0, 6, 0), 0.05)
    assert wide(Interval(100.0, None, None, 1, 0), 0.05) and wide(Interval(None, None, None, 0, 6), 0.05)
    assert not wide(Interval(0.0, 0.0, 0.0, 6, 0), 0.05)


# --- of one run ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("faster", [1.02, 1.3, 0.8])
def test_compare_and_report_say_the_same(faster: float, tmp_path: Path) -> None:
    """Effects, intervals and proofs of all pairs at all loads of the middle context are those of the contests."""
    folder = both(tmp_path / "run", loads=(3, 5, 10), faster=faster)
    for repeat in range(3):
        for users in (3, 5, 10):
            run_ = serve("paged", users, 20, 0.09 * (1 + repeat / 50))
            add(folder, "paged", users, repeat, run_, cell=f"c{users}r{repeat}", prefix_caching=True)
            add(folder, "paged", users, repeat, run_, cell=f"long{users}r{repeat}", input_tokens=9)
    results = Results.of(folder)
    judged = {
        (one.match.base_name, one.match.new_name, one.match.load): one
        for one in compare_variants(results, "run", PRIMARY_METRIC).judged
        if one.primary and one.match.context == results.middle
    }
    told = 0
    for pair in pairs(results):
        for contest in contests(results, *pair):
            names = {results.name(variant) for variant in pair}
            (one,) = (one for key, one in judged.items() if {key[0], key[1]} == names and key[2] == contest.load)
            assert (one.comparison.verdict != UNPROVEN) == contest.proven
            effect, inverse = one.comparison.effect, one.match.new_name == results.name(contest.loser)
            assert effect.value is not None and effect.low is not None and contest.effect.high is not None
            assert contest.effect.value == pytest.approx(1 / effect.value if inverse else effect.value)
            assert contest.effect.high == pytest.approx(1 / effect.low if inverse else effect.high)
            told += 1
    assert told == len(judged) == 6


def test_paged_is_held_against_contiguous_and_what_is_added_against_what_it_is_added_to(tmp_path: Path) -> None:
    folder = both(tmp_path / "run", loads=[5])
    for repeat in range(3):
        add(folder, "paged", 5, repeat, serve("paged", 5, 20, 0.05), cell=f"paged-z{repeat}", prefix_caching=True)
    outcome = compare_variants(Results.of(folder), "run", PRIMARY_METRIC)
    matches = [(one.match.new_name, one.match.base_name) for one in outcome.judged if one.primary]
    assert matches == [("paged", "contiguous"), ("paged + prefix cache", "paged")]


# --- of two runs -----------------------------------------------------------------------------------------------------


def two(path: Path, faster: float = 1.0, **manifest: Any) -> tuple[RunFolder, RunFolder]:
    """`a`, and `b` whose paged cells are `faster`; four repeats that differ."""
    a, b = (make(path / name, **facts) for name, facts in (("a", {}), ("b", manifest)))
    for folder, speed in ((a, 1.0), (b, faster)):
        for repeat in range(4):
            wobble = 1 + 0.002 * (repeat % 2 if folder is a else repeat // 2)
            add(folder, "paged", 5, repeat, serve("paged", 5, 20, 0.1 * (1 + repeat / 10) * wobble / speed))
    return a, b


def test_a_slower_run_ends_with_3_where_that_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two(tmp_path, faster=0.9)
    names = [str(tmp_path / name) for name in "ab"]
    code, out, err = run(capsys, "compare", *names, "--format", "json")
    rows = json.loads(out)
    assert code == 0
    first = rows[0]
    assert (first["metric"], first["primary"], first["verdict"], first["pairs"]) == (PRIMARY, True, "worse", 4)
    assert first["value"] == pytest.approx(0.9, rel=0.01) and first["low"] < first["value"] < first["high"] < 1
    assert {row["metric"] for row in rows} == {metric.key for metric in METRICS}
    assert "regression" not in err
    code, _, err = run(capsys, "compare", *names, "--fail-on-regression")
    assert code == 3
    assert f"kvbench: regression in {PRIMARY}" in err
    assert run(capsys, "compare", *reversed(names), "--fail-on-regression")[0] == 0, "faster is no regression"


def test_the_formats_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two(tmp_path, faster=1.2)
    texts = {
        fmt: run(capsys, "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--format", fmt)[1]
        for fmt in ("table", "markdown", "csv", "json")
    }
    (first, *_), (line, *_) = json.loads(texts["json"]), csv.DictReader(io.StringIO(texts["csv"]))
    assert float(line["value"]) == first["value"] == pytest.approx(1.2, rel=0.01)
    assert texts["table"].startswith(
        "paged of b against paged of a, at 5 users, 4 tokens in and 4 tokens out (4 pairs,"
    )
    assert "out tok/s (primary)" in texts["table"] and "better" in texts["table"]
    assert "| out tok/s (primary) |" in texts["markdown"]


def test_the_metric_that_is_judged_alone_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two(tmp_path)
    names = [str(tmp_path / name) for name in "ab"]
    rows = json.loads(run(capsys, "compare", *names, "--metric", "TTFT_p99_s", "--format", "json")[1])
    assert [row["metric"] for row in rows if row["primary"]] == ["ttft_p99_s"]
    assert len(rows) == len(METRICS)
    code, _, err = run(capsys, "compare", *names, "--metric", "ttft_p98_s")
    assert (code == 2 and "did you mean ttft_p99_s?" in one_line(err)) or "did you mean ttft" in err


def test_what_is_not_alike_is_said_loudly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = {"name": "64 CPU cores", "kind": "cpu", "cores": 64, "memory_bytes": 8 << 30}
    environment = {"python": "3.11.2", "torch": "2.14.0", "transformers": "5.24.0"}
    two(tmp_path, device=device, environment=environment, config={"max_sequences": 8, "seed": 4, "kv_bytes": 9})
    manifest = json.loads((tmp_path / "a" / "run.json").read_text())
    manifest["config"] = {"max_sequences": 256, "seed": 0, "kv_bytes": None}
    (tmp_path / "a" / "run.json").write_text(json.dumps(manifest))
    _, out, err = run(capsys, "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--format", "json")
    differs = json.loads(out)[0]["differs"].split("; ")
    assert differs == [
        "--max-num-seqs: 256 against 8",
        "the version of torch: 2.13.0 against 2.14.0",
        "the device: 2 CPU cores against 64 CPU cores",
        "the device's number of cores: 2 against 64",
    ]
    assert all(f"! NOT ALIKE: {line}" in err for line in differs)


def test_runs_that_are_alike_have_no_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two(tmp_path)
    _, out, err = run(capsys, "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--format", "json")
    assert json.loads(out)[0]["differs"] == "" and "!" not in err


def test_what_takes_no_part_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = two(tmp_path)
    add(a, "paged", 9, 0, serve("paged", 9, 20, 0.1))
    add(b, "paged", 5, 7, serve("paged", 5, 20, 0.1))
    add(b, "paged", 5, 8, refused(3), status="rejected")
    _, _, err = run(capsys, "compare", str(a.path), str(b.path))
    assert "! 1 point of a without a counterpart: not compared" in err
    assert "! 1 of 6 cells of b did not run to their end: not compared" in err
    assert "! 1 repeat without one of the same seed on the other side: not compared" in err


def rows(*seeds: int, **columns: object) -> list[Cell]:
    point: Cell = {"backend": "paged", "concurrency": 4, "status": "ok", PRIMARY: 9.0}
    return [{**point, "seed": seed, "repeat": i, **columns} for i, seed in enumerate(seeds)]


@pytest.mark.parametrize(
    ("base", "new", "message"),
    [
        (rows(1, 2), rows(3), r"no seed in common \(1, 2 against 3\); measure both with the same --seed"),
        (rows(1), rows(1, backend="contiguous"), "the variants are paged against contiguous"),
        (rows(1), rows(1, concurrency=8), "the loads are 4 users against 8 users"),
        (rows(1), rows(1, input_tokens=8), "the contexts are its own lengths against 8 tokens in"),
        (rows(1), rows(1, status="oom"), "b has no cell that ran"),
        ([], rows(1), "a has no cell that ran"),
    ],
)
def test_what_cannot_be_paired_is_one_clear_line(base: list[Cell], new: list[Cell], message: str) -> None:
    with pytest.raises(KvbenchError, match=message) as caught:
        compare_runs(Side("a", base), Side("b", new), PRIMARY_METRIC)
    assert "\n" not in str(caught.value)


def test_one_run_needs_two_variants_and_two_runs_are_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, _ = two(tmp_path)
    code, _, err = run(capsys, "compare", str(a.path))
    assert (code, one_line(err)) == (2, "kvbench: a has 1 variant (paged); name a second run to compare\n")
    code, _, err = run(capsys, "compare", str(a.path), str(a.path))
    assert code == 2 and "are the same run" in one_line(err)


def test_one_repeat_proves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both(tmp_path / "run", loads=[5], repeats=1, faster=3.0)
    code, out, _ = run(capsys, "compare", str(tmp_path / "run"), "--fail-on-regression")
    assert code == 0
    assert "3.00 ×" in out and "needs two repeats" in out and "better" not in out


def test_two_identical_cells_of_one_sweep_are_equal(tmp_path: Path) -> None:
    """vllm#54227."""
    folder = both(tmp_path / "run", loads=[5])
    for repeat in range(3):
        add(folder, "paged", 5, repeat, serve("paged", 5, 20, 0.1 * (1 + repeat / 100)), cell=f"paged-5-{repeat}.2")
    outcome = compare_variants(Results.of(folder), "run", PRIMARY_METRIC)
    copies = [one for one in outcome.judged if one.match.new_name == "paged (2)"]
    assert copies and all(one.comparison.verdict == UNPROVEN for one in copies)


def test_a_steady_window_is_never_held_against_a_total_one() -> None:
    steady: Cell = {"window": "steady", f"{TWIN}{PRIMARY}": 6.0}
    a = Side("a", rows(1, 2, **steady))
    found = primary(compare_runs(a, Side("b", rows(1, 2, window="total")), PRIMARY_METRIC))
    assert (found.base, found.new, found.match.window) == (6.0, 9.0, "total")
    found = primary(compare_runs(a, Side("b", rows(1, 2, **steady)), PRIMARY_METRIC))
    assert (found.base, found.match.window) == (9.0, "steady")


def test_made_up_runs_differ_in_what_they_should() -> None:
    from numpy.random import default_rng

    seeds = dict.fromkeys(range(400), 1.0)
    base, new = made_up("a", seeds, default_rng(1)), made_up("b", seeds, default_rng(2), 0.1, "ttft_p99_s")
    for metric in METRICS:
        means = [sum(float(str(row[metric.key])) for row in side.rows) / 400 for side in (base, new)]
        assert means[1] / means[0] == pytest.approx(1 / 0.9 if metric.key == "ttft_p99_s" else 1, rel=0.02)
