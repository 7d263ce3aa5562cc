"""The order of a sweep's cells, their names, and the lists a user types."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import KvbenchError
from kvbench.metrics.points import Context, LoadPoint, Variant
from kvbench.workloads.grid import Cell, cells, parse_floats, parse_ints

A, B = Variant("left"), Variant("right", "declared")
LOADS = [LoadPoint(concurrency=1), LoadPoint(concurrency=8)]
CONTEXTS = [Context(128, 64)]


def test_variants_are_interleaved_and_every_other_repeat_is_turned_round() -> None:
    plan = cells([A, B], LOADS, CONTEXTS, repeats=2, seed=10)
    assert [cell.id for cell in plan] == [
        "left-c1-i128-o64-r0",
        "right-declared-c1-i128-o64-r0",
        "left-c8-i128-o64-r0",
        "right-declared-c8-i128-o64-r0",
        "right-declared-c1-i128-o64-r1",
        "left-c1-i128-o64-r1",
        "right-declared-c8-i128-o64-r1",
        "left-c8-i128-o64-r1",
    ]
    assert [cell.order for cell in plan] == list(range(8))
    assert [cell.seed for cell in plan] == [10] * 4 + [11] * 4
    last = plan[-1]
    assert (last.variant, last.load, last.context, last.repeat) == (A, LOADS[1], CONTEXTS[0], 1)


def test_abba_balances_a_steady_drift() -> None:
    """Over two repeats both variants have the same mean place at every point."""
    plan = cells([A, B], LOADS, CONTEXTS, repeats=2, seed=0)
    for load in LOADS:
        places = {
            variant: sum(cell.order for cell in plan if (cell.variant, cell.load) == (variant, load))
            for variant in (A, B)
        }
        assert places[A] == places[B]


def test_three_variants_turn_round_too() -> None:
    variants = [Variant("x", reserve) for reserve in ("max", "declared", "oracle")]
    plan = cells(variants, LOADS[:1], CONTEXTS, repeats=3, seed=0)
    assert [cell.variant.reserve for cell in plan] == [
        *("max", "declared", "oracle"),
        *("oracle", "declared", "max"),
        *("max", "declared", "oracle"),
    ]


def test_ids_leave_out_what_is_not_set() -> None:
    rates = [LoadPoint(request_rate=rate) for rate in (0.5, 2.0, 1e-5)]
    ids = [cell.id for cell in cells([A], rates, [Context()], repeats=1, seed=0)]
    assert ids == ["left-q0.5-r0", "left-q2-r0", "left-q1e-05-r0"]


def test_ids_name_what_is_not_as_it_is_by_default() -> None:
    variants = [
        Variant("left", "max", "static"),
        Variant("right", prefix_caching=True),
        Variant("right", preemption="swap"),
        Variant("right", prefix_caching=True, preemption="swap"),
    ]
    contexts = [Context(8, 4, 80, 4), Context(prefix_tokens=80), Context(samples=2)]
    plan = cells(variants, LOADS[:1], contexts, repeats=1, seed=0)
    assert [cell.id for cell in plan[:4]] == [
        "left-max-static-c1-i8-o4-p80-n4-r0",
        "right-prefix-c1-i8-o4-p80-n4-r0",
        "right-swap-c1-i8-o4-p80-n4-r0",
        "right-prefix-swap-c1-i8-o4-p80-n4-r0",
    ]
    assert [cell.id for cell in plan[5::4]] == ["right-prefix-c1-p80-r0", "right-prefix-c1-n2-r0"]
    assert [str(variant) for variant in variants] == [
        *("left max + static", "right + prefix cache", "right + swap", "right + prefix cache + swap")
    ]


def test_a_cell_comes_back_from_its_flat_facts_which_are_columns() -> None:
    for cell in cells([A, Variant("right", prefix_caching=True)], LOADS, [Context(8, 4, 80, 4)], repeats=2, seed=3):
        assert Cell.of(cell.facts()) == cell
        assert not [value for value in cell.facts().values() if isinstance(value, dict)]
    assert (cell.facts()["prefix_caching"], cell.facts()["samples"], cell.facts()["prefix_tokens"]) == (False, 4, 80)


def test_a_context_in_words() -> None:
    assert str(Context(8, 4)) == "8 tokens in and 4 tokens out"
    assert str(Context(None, 4, 80)) == "4 tokens out and a shared prefix of 80 tokens"
    assert Context(8, 4, 0, 1).told({"prefix_tokens", "samples"}) == (
        "8 tokens in, 4 tokens out, no prefix and 1 sample"
    )
    assert str(Context(samples=6)) == "6 samples" and str(Context()) == "its own lengths"
    assert Context(8, 4, 80, 6).single == Context(8, 4, 80)


def test_the_same_cell_twice_runs_twice() -> None:  # vllm#54227
    twice = cells([A, A], LOADS[:1], CONTEXTS, repeats=2, seed=0)
    assert [cell.id for cell in twice] == [
        "left-c1-i128-o64-r0",
        "left-c1-i128-o64-r0.2",
        "left-c1-i128-o64-r1.2",
        "left-c1-i128-o64-r1",
    ]
    again = cells([A, B], [*LOADS, *LOADS], CONTEXTS * 2, repeats=3, seed=0)
    assert len({cell.id for cell in again}) == len(again) == 48


def test_impossible_grids_are_refused() -> None:
    with pytest.raises(KvbenchError, match="--repeats"):
        cells([A], LOADS, CONTEXTS, repeats=0, seed=0)
    with pytest.raises(KvbenchError, match="--concurrency and --request-rate are two different loads"):
        LoadPoint(concurrency=1, request_rate=1.0)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,8,64", [1, 8, 64]),
        ("7", [7]),
        (" 1 , 2 ", [1, 2]),
        ("1-64*2", [1, 2, 4, 8, 16, 32, 64]),
        ("1-100*4", [1, 4, 16, 64]),
        ("64-256+64", [64, 128, 192, 256]),
        ("5-5+1", [5]),
        ("1,4-8+2,16-64*2", [1, 4, 6, 8, 16, 32, 64]),
        ("8,8", [8, 8]),
    ],
)
def test_lists_of_whole_numbers(text: str, values: list[int]) -> None:
    assert parse_ints(text, "--concurrency") == values


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0.5,2", [0.5, 2.0]),
        ("0.1-0.3+0.1", [0.1, 0.2, 0.3]),
        ("0.5-4*2", [0.5, 1.0, 2.0, 4.0]),
        ("1-2.25*1.5", [1.0, 1.5, 2.25]),
        ("1e-3", [0.001]),
    ],
)
def test_lists_of_fractions(text: str, values: list[float]) -> None:
    assert parse_floats(text, "--request-rate") == values


def test_nothing_is_a_number_only_where_it_is_said() -> None:
    assert parse_ints("0,80-320*2", "--prefix-len", least=0) == [0, 80, 160, 320]
    assert parse_ints("0-4+2", "--prefix-len", least=0) == [0, 2, 4]
    for text in ("-1", "0.5", "0-8*2", "0-8+0", "nan", ""):
        with pytest.raises(KvbenchError, match="--prefix-len"):
            parse_ints(text, "--prefix-len", least=0)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=20))
def test_a_list_reads_back(values: list[int]) -> None:
    assert parse_ints(",".join(map(str, values)), "--concurrency") == values


@given(st.lists(st.floats(min_value=1e-6, max_value=1e6), min_size=1, max_size=20))
def test_a_list_of_fractions_reads_back(values: list[float]) -> None:
    assert parse_floats(",".join(map(str, values)), "--request-rate") == values


BAD_LISTS = [
    *("0", "-1", "nan", "inf", "-inf", "NaN", "sNaN", "1e999", "1e-999"),
    *("", ",", "1,", "eight", "1 2", "1;2", "0x10", "1.2.3"),
    *("1-8", "8-1*2", "256-64+64", "0-8*2", "0-8+2", "1-8*1", "1-8*0", "1-8+0", "1-8*0.5", "1--8*2", "-1-8*2"),
    *("1-8*nan", "1-8/2", "1-100000000+1", "9" * 5000 + "-1*2"),
]


@pytest.mark.parametrize("text", BAD_LISTS, ids=range(len(BAD_LISTS)))
@pytest.mark.parametrize("parse", [parse_ints, parse_floats])
def test_bad_lists_are_refused_by_flag(parse: object, text: str) -> None:
    assert callable(parse)
    with pytest.raises(KvbenchError) as caught:
        parse(text, "--some-flag")
    assert str(caught.value).startswith("--some-flag ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["1.5", "1-8*1.5", "1-3+0.5", "1e-3", "9" * 5000])
def test_fractions_are_refused_where_whole_numbers_are_asked(text: str) -> None:
    with pytest.raises(KvbenchError, match="--concurrency"):
        parse_ints(text, "--concurrency")
