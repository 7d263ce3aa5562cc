"""The five parts of the pool: numbers by hand, and any run against a slow split of each sequence and step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.metrics.memory import memory_summary, split
from kvbench.metrics.records import Hold, Run, StepRecord
from kvbench.metrics.window import Window


def step(number: int, start_s: float, end_s: float, used: int, held: int, pool: int) -> StepRecord:
    zeros = dict.fromkeys(
        "host_s device_s sequences prefill_tokens decode_tokens sampled_tokens attended_pairs context_tokens running "
        "waiting preemptions".split(),
        0,
    )
    return StepRecord(
        step=number,
        start_s=start_s,
        end_s=end_s,
        pool_tokens=pool,
        used_tokens=used,
        held_tokens=held,
        free_tokens=pool - held,
        logical_tokens=used,
        **zeros,
    )


def worked_run() -> Run:
    """Pool of 40. Request 0 fills 4, 5, 6 of a 16-row range of which it asked for 12; request 1 joins at step 1 with a
    block of 4 rows (asked 4), fills 3 and then 5, growing to 8 held (asked 8), and stays one idle step."""
    return Run(
        requests=[],
        steps=[step(0, 0, 1, 4, 16, 40), step(1, 1, 2, 8, 20, 40), step(2, 2, 4, 11, 24, 40), step(3, 9, 10, 5, 8, 40)],
        holds=[Hold(0, 0, 3, 16, 12, 6), Hold(1, 1, 2, 4, 4, 5), Hold(1, 2, 4, 8, 8, 5)],
        pool_tokens=40,
        end_s=10.0,
    )


def test_split_by_hand() -> None:
    parts = split(worked_run())
    assert parts.used.tolist() == [4, 8, 11, 5]
    assert parts.reserved.tolist() == [2, 2, 0, 0]  # 6 - 4; 6 - 5 and 4 - 3; nothing is left to fill
    assert parts.internal.tolist() == [6, 6, 9, 3]  # 12 - 6; the same; 6 and 8 - 5; 8 - 5
    assert parts.rounding.tolist() == [4, 4, 4, 0]  # 16 - 12
    assert parts.free.tolist() == [24, 20, 16, 32]
    assert parts.held.tolist() == [16, 20, 24, 8]
    assert parts.pool.tolist() == [40] * 4


def test_ratios_weigh_steps_by_their_time_and_leave_idle_time_out() -> None:
    assert memory_summary(worked_run(), Window("total", 0, 10)) == {
        "kv_utilisation_mean": pytest.approx((4 + 8 + 2 * 11 + 5) / 40 / 5),
        "kv_utilisation_peak": 11 / 40,
        "kv_efficiency_mean": pytest.approx((4 / 16 + 8 / 20 + 2 * 11 / 24 + 5 / 8) / 5),
        "kv_efficiency_peak": 5 / 8,
        "kv_fragmentation_mean": pytest.approx((10 / 16 + 10 / 20 + 2 * 13 / 24 + 3 / 8) / 5),
        "kv_fragmentation_peak": 10 / 16,
        "kv_sharing_mean": 0.0,
        "kv_sharing_peak": 0.0,
        "kv_reserved_mean": pytest.approx((2 + 2 + 2 * 0 + 0) / 40 / 5),
        "kv_internal_mean": pytest.approx((6 + 6 + 2 * 9 + 3) / 40 / 5),
        "kv_rounding_mean": pytest.approx((4 + 4 + 2 * 4 + 0) / 40 / 5),
        "kv_free_mean": pytest.approx((24 + 20 + 2 * 16 + 32) / 40 / 5),
        "kv_cached_mean": 0.0,
        "kv_cache_usage_mean": pytest.approx((16 + 20 + 2 * 24 + 8) / 40 / 5),
        "kv_cache_usage_peak": 24 / 40,
        "kv_blocks_saved_mean": None,
        "swapped_tokens_peak": 0,
    }


def test_cached_rows_are_a_mean_and_swapped_ones_a_peak_within_the_window() -> None:
    run = worked_run()
    for record, cached, swapped in zip(run.steps, (4, 0, 10, 32), (0, 5, 3, 9), strict=True):
        record.cached_tokens, record.swapped_tokens = cached, swapped
    summary = memory_summary(run, Window("total", 0, 10))
    assert summary["kv_cached_mean"] == pytest.approx((4 + 0 + 2 * 10 + 32) / 40 / 5)
    assert summary["swapped_tokens_peak"] == 9
    assert memory_summary(run, Window("steady", 1.5, 3.0))["swapped_tokens_peak"] == 5


def test_sharing_is_the_share_of_the_sequences_rows_that_need_no_row_of_their_own() -> None:
    run = worked_run()
    run.steps[1].logical_tokens, run.steps[2].logical_tokens = 10, 44
    summary = memory_summary(run, Window("total", 0, 10))
    assert summary["kv_sharing_mean"] == pytest.approx((0 + (1 - 8 / 10) + 2 * (1 - 11 / 44) + 0) / 5)
    assert summary["kv_sharing_peak"] == 1 - 11 / 44
    assert summary["kv_utilisation_peak"] == 11 / 40


def test_a_window_cuts_the_weight_of_the_step_it_cuts() -> None:
    summary = memory_summary(worked_run(), Window("steady", 1.5, 3.0))
    assert summary["kv_utilisation_mean"] == pytest.approx((0.5 * 8 + 1.0 * 11) / 40 / 1.5)
    assert summary["kv_utilisation_peak"] == 11 / 40
    assert summary["kv_efficiency_peak"] == 11 / 24


def test_nothing_held_and_no_step_at_all_are_undefined() -> None:
    idle = Run(requests=[], steps=[step(0, 0, 1, 0, 0, 8)], holds=[], pool_tokens=8, end_s=1)
    window = Window("total", 0, 1)
    summary = memory_summary(idle, window)
    assert summary["kv_utilisation_mean"] == summary["kv_utilisation_peak"] == 0
    assert summary["kv_efficiency_mean"] is summary["kv_fragmentation_mean"] is summary["kv_fragmentation_peak"] is None
    assert summary["kv_sharing_mean"] is summary["kv_sharing_peak"] is None
    assert set(memory_summary(replace(idle, steps=[]), window).values()) == {None}


def test_steps_without_duration_have_a_peak_but_no_mean() -> None:
    run = Run([], [step(0, 1, 1, 2, 4, 8)], [Hold(0, 0, 1, 4, 4, 2)], 8, 1)
    summary = memory_summary(run, Window("total", 0, 1))
    assert summary["kv_utilisation_mean"] is None
    assert summary["kv_utilisation_peak"] == 0.25


@pytest.mark.parametrize(
    ("number", "field", "value", "message"),
    [
        (0, "held_tokens", 15, "step 0: the holds are not what the allocator held"),
        (2, "free_tokens", 17, "step 2: the parts are not the pool"),
        (2, "used_tokens", 12, "step 2: more rows are in use than will be filled"),
        (1, "used_tokens", -1, "step 1: rows in use are negative"),
        (1, "cached_tokens", 21, "step 1: more rows are cached than free"),
    ],
)
def test_impossible_state_names_its_step(number: int, field: str, value: int, message: str) -> None:
    run = worked_run()
    setattr(run.steps[number], field, value)
    with pytest.raises(AssertionError, match=message):
        split(run)


def test_hold_that_lasts_too_long_is_found() -> None:
    run = worked_run()
    run.holds[0] = replace(run.holds[0], end_step=4)
    with pytest.raises(AssertionError, match="step 3"):
        split(run)


@dataclass
class Stay:
    """A stay of one sequence in memory: at step `first + i` it holds `held[i]` rows, asked for `asked[i]` and has
    filled `filled[i]`."""

    first: int
    held: list[int]
    asked: list[int]
    filled: list[int]


@st.composite
def stays(draw: st.DrawFn) -> Stay:
    length = draw(st.integers(1, 6))
    held = sorted(draw(st.lists(st.integers(1, 40), min_size=length, max_size=length)))
    asked = [draw(st.integers(1, 50)) for _ in held]
    filled: list[int] = []
    for rows in held:
        least = filled[-1] if filled else 0
        filled.append(draw(st.integers(least, rows)))
    return Stay(draw(st.integers(0, 8)), held, asked, filled)


PARTS = ("utilisation", "reserved", "internal", "rounding", "free")


@given(st.lists(stays(), min_size=1, max_size=6), st.lists(st.floats(0.01, 10), min_size=15), st.integers(1, 50))
def test_the_means_of_the_five_parts_add_up_to_one(many: list[Stay], seconds: list[float], spare: int) -> None:
    run, _ = run_of(many, spare, 0)
    now_s = 0.0
    for record, lasts_s in zip(run.steps, seconds, strict=False):
        record.start_s, record.end_s = now_s, now_s + lasts_s
        now_s += lasts_s + 1.0
    for end_s in (now_s, now_s / 2):
        summary = memory_summary(run, Window("any", 0.0, end_s))
        means = [summary[f"kv_{part}_mean"] or 0.0 for part in PARTS]
        assert sum(means) == pytest.approx(1)
        assert all(0 <= mean <= 1 for mean in means)
        wasted = summary["kv_fragmentation_mean"]
        assert wasted is None or (wasted > 0) == (means[2] + means[3] > 0)


@given(st.lists(stays(), max_size=6), st.integers(0, 50), st.integers(0, 1000))
def test_split_agrees_with_every_sequence_at_every_step(many: list[Stay], spare: int, offset: int) -> None:
    run, expected = run_of(many, spare, offset)

    parts = split(run)

    rows = zip(parts.used, parts.reserved, parts.internal, parts.rounding, parts.held, strict=True)
    assert [tuple(map(int, row)) for row in rows] == expected
    assert run.pool_tokens is not None
    assert parts.free.tolist() == [run.pool_tokens - row[4] for row in expected]


def run_of(many: list[Stay], spare: int, offset: int) -> tuple[Run, list[tuple[int, ...]]]:
    """A run of these stays, its steps numbered from `offset` and a second long, and what is used, reserved, internal,
    rounding and held at each, counted sequence by sequence. `spare` rows of the pool are never held."""
    steps = 1 + max((stay.first + len(stay.held) for stay in many), default=0)
    expected: list[tuple[int, ...]] = []
    for now in range(steps):
        used = reserved = internal = rounding = held_by_all = 0
        for stay in many:
            age = now - stay.first
            if not 0 <= age < len(stay.held):
                continue
            held, asked, filled, final = stay.held[age], stay.asked[age], stay.filled[age], stay.filled[-1]
            will_fill = max(0, min(final, held) - filled)
            round_up = held - max(min(asked, held), min(final, held))
            used, reserved, rounding = used + filled, reserved + will_fill, rounding + round_up
            internal += held - filled - will_fill - round_up
            held_by_all += held
        expected.append((used, reserved, internal, rounding, held_by_all))
    pool = max(row[4] for row in expected) + spare
    holds = [
        Hold(i, offset + stay.first + age, offset + stay.first + age + 1, held, stay.asked[age], stay.filled[-1])
        for i, stay in enumerate(many)
        for age, held in enumerate(stay.held)
    ]
    records = [step(offset + now, now, now + 1, row[0], row[4], pool) for now, row in enumerate(expected)]
    return Run([], records, holds, pool, float(steps)), expected
