"""The window a run is told by: where it settles, what belongs to it, and when it is not worth quoting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from fakes import make_pool, request, serve_on
from numpy.random import Generator, default_rng
from test_metrics_memory import step

from kvbench.engine.scheduler import Limits
from kvbench.metrics.batches import correlated, rate_interval
from kvbench.metrics.change import FALSE_ALARM, settled_from
from kvbench.metrics.points import Context, LoadPoint
from kvbench.metrics.records import ABORTED, FINISHED, REJECTED, UNFINISHED, Hold, RequestRecord, Run
from kvbench.metrics.stats import WITHIN
from kvbench.metrics.summary import TWIN, of_total, summarise
from kvbench.metrics.window import Window, steady
from kvbench.reports.groups import Group, Results, Variant
from kvbench.workloads.load import ClosedLoop

CLIENTS = LoadPoint(concurrency=2)
RATE = LoadPoint(request_rate=1.0)


def asked(id_: int, at_s: float, token_s: list[float], status: str = FINISHED, sample: int = 0) -> RequestRecord:
    """A prompt of 10 tokens, sent when it was scheduled."""
    return RequestRecord(
        *(id_, at_s, at_s, 10, 100),
        sample=sample,
        first_s=token_s[0] if token_s else None,
        last_s=token_s[-1] if token_s else None,
        token_s=token_s,
        output_tokens=len(token_s),
        status=status,
    )


def answer(at_s: float, tokens: int = 4, gap_s: float = 0.25) -> list[float]:
    return [at_s + gap_s * (1 + i) for i in range(tokens)]


def closed(rounds: int = 40) -> Run:
    """Two clients, one request a second each, a token every quarter of a second; the very first takes two seconds."""
    slow = [asked(0, 0.0, answer(0.0, 4, 0.5)), *(asked(2 * i, i + 1.0, answer(i + 1.0)) for i in range(1, rounds))]
    quick = [asked(2 * i + 1, float(i), answer(float(i))) for i in range(rounds)]
    return Run(sorted([*slow, *quick], key=lambda one: one.request), [], [], 8, rounds + 1.0)


# --- the change-point detector ---------------------------------------------------------------------------------------

NOISE: dict[str, Callable[[Generator, int], list[float]]] = {
    "normal": lambda rng, n: rng.normal(100, 5, n).tolist(),
    "counts": lambda rng, n: rng.poisson(3, n).astype(float).tolist(),
    "heavy tails": lambda rng, n: rng.standard_t(2, n).tolist(),
}


@pytest.mark.parametrize("kind", NOISE)
def test_stationary_noise_has_a_change_as_rarely_as_promised(kind: str) -> None:
    """At most 1 in 100, whatever the distribution: of 600 series 16 or more alarms have a probability below 0.1 %."""
    rng = default_rng(3)
    alarms = sum(settled_from(NOISE[kind](rng, 32)) > 0 for _ in range(600))
    assert FALSE_ALARM == 0.01 and alarms < 16


@pytest.mark.parametrize("at", [2, 5, 12, 20])
def test_a_clear_change_is_found_where_it_is(at: int) -> None:
    """Eight standard deviations, up or down: a wrong place would have to explain more than the right one."""
    rng = default_rng(at)
    for sign in (-8, 8):
        assert settled_from([sign * (i < at) + rng.normal() for i in range(32)]) == at
    assert settled_from([0.0] * at + [1.0] * (32 - at)) == at


def test_of_several_changes_the_last_counts() -> None:
    rng = default_rng(0)
    assert settled_from([level + rng.normal() for level in [0] * 4 + [20] * 6 + [10] * 22]) == 10


def test_a_ramp_is_several_changes() -> None:
    rng = default_rng(1)
    assert 6 <= settled_from([min(i, 10) + rng.normal() / 2 for i in range(32)]) <= 12


def test_what_never_settles_changes_to_its_end() -> None:
    rng = default_rng(2)
    assert settled_from([i + rng.normal() for i in range(32)]) > 16


def test_no_change_in_a_constant_or_in_next_to_nothing() -> None:
    assert settled_from([7.0] * 32) == settled_from([]) == settled_from([0.0] * 3 + [9.0] * 4) == 0


# --- where a run settles ---------------------------------------------------------------------------------------------


def test_a_closed_loop_settles_when_its_opening_requests_have_ended() -> None:
    """Both opening requests have ended after 2 s; the last request is asked at 40 s."""
    window, why = steady(closed(), CLIENTS)
    assert (window, why) == (Window("steady", 2.0, 40.0), "")


def test_an_open_loop_settles_with_its_first_whole_answer() -> None:
    run = Run([asked(i, i / 2, answer(i / 2)) for i in range(80)], [], [], 8, 41.0)
    run.requests[0] = asked(0, 0.0, [], REJECTED)
    assert steady(run, RATE) == (Window("steady", 1.5, 39.5), "")


def test_the_samples_of_an_opening_request_are_waited_for() -> None:
    run = closed()
    run.requests.append(asked(1, 0.0, answer(0.0, 10, 0.5), sample=1))
    window, _ = steady(run, CLIENTS)
    assert window is not None and window.start_s == 5.0


def test_a_rejected_or_aborted_opening_request_has_ended() -> None:
    run = closed()
    run.requests[0] = asked(0, 0.0, [0.5, 1.25], ABORTED)
    run.requests[1] = asked(1, 0.0, [], REJECTED)
    window, _ = steady(run, CLIENTS)
    assert window is not None and window.start_s == 1.25


def test_a_change_within_the_run_is_cut_off() -> None:
    """Eight tokens a second, then four from 12 s on: in parts of 59 / 32 s from 1 s, after six of them."""
    requests = [asked(i, float(i), answer(float(i), 8 if i < 12 else 4, 0.125 if i < 12 else 0.25)) for i in range(61)]
    window, _ = steady(Run(requests, [], [], 8, 61.0), LoadPoint(concurrency=1))
    assert window == Window("steady", 1 + 6 * 59 / 32, 60.0)


def test_runs_without_a_part_worth_quoting_say_why() -> None:
    run = closed()
    hung = replace(run, requests=[asked(0, 0.0, [0.5], UNFINISHED), *run.requests[1:]])
    assert steady(hung, CLIENTS) == (None, "not every opening request ended")
    assert steady(closed(2), CLIENTS) == (None, "the last request was asked before the run had settled")
    assert steady(closed(12), CLIENTS)[1].startswith("fewer than 30 requests were asked")
    rising = [asked(i, i / 4, answer(i / 4, 1 + i, 1 / (4 * (i + 1)))) for i in range(160)]
    assert steady(Run(rising, [], [], 8, 41.0), RATE) == (None, "output tokens/s never settled")
    patient = [asked(i, i / 4, [i / 4 + 0.5, i / 4 + 20]) for i in range(160)]
    patient[0] = asked(0, 0.0, [0.5])
    assert "less than 3 mean durations" in steady(Run(patient, [], [], 8, 60.0), RATE)[1]
    failing = [asked(i, i / 4, [i / 4 + 0.25], ABORTED if i else FINISHED) for i in range(160)]
    assert steady(Run(failing, [], [], 8, 60.0), RATE) == (None, "no request asked after its settling finished")
    refused = [asked(i, i / 4, [], REJECTED) for i in range(160)]
    assert steady(Run(refused, [], [], 8, 40.0), RATE) == (None, "no request finished")
    assert steady(Run([], [], [], 8, 0.0), RATE)[0] is steady(Run([], [], [], 8, 0.0), CLIENTS)[0] is None


# --- what belongs to a window ----------------------------------------------------------------------------------------


def test_a_window_counts_what_is_made_and_asked_in_it() -> None:
    """Whole seconds of a steady process give its rate: the ends count once."""
    window, whole = Window("steady", 2.0, 5.0), Window("total", 2.0, 5.0, whole=True)
    times = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert [at_s for at_s in times if window.made(at_s)] == [3.0, 4.0, 5.0]
    assert [at_s for at_s in times if window.asked(asked(0, at_s, []))] == [2.0, 3.0, 4.0]
    assert sum(map(whole.made, times)) == sum(whole.asked(asked(0, at_s, [])) for at_s in times) == 4
    assert not window.made(None)


def test_a_window_that_cuts_through_requests_by_hand() -> None:
    """From 2 to 40 s: eight tokens a second; of the request of 39.0 s, asked inside and done at its end, all counts;
    that of 40.0 s is asked after it. What ends badly is bad, wherever it ends."""
    run = closed()
    late = run.requests[-2]  # asked at 40 s
    assert late.scheduled_s == 40.0
    run.requests[10] = asked(10, 6.0, answer(6.0), ABORTED)
    run.requests[12] = asked(12, 7.0, [7.25, 7.5, 41.0], UNFINISHED)
    row = summarise(run, load=CLIENTS)
    expected = {
        "window": "steady",
        "window_reason": "",
        "window_start_s": 2.0,
        "duration_s": 38.0,
        "window_requests": 76,  # two a second, less none: 2, 3 … 39 s
        "output_tokens_per_s": (38 * 8 - 2) / 38,  # two tokens of request 12 are missing, one came too late
        "input_tokens_per_s": 20.0,
        "requests_per_s": 74 / 38,
        "attainment": 74 / 76,
        "ttft_samples": 74,
        "ttft_p50_s": 0.25,
        "achieved_rate_per_s": 75 / 37,  # from 2 to 39 s
        "requests_submitted": 80,  # counts are of the whole run
        "requests_finished": 78,
        "requests_aborted": 1,
        "requests_unfinished": 1,
        "output_tokens_total": 319,
        "output_tokens_incomplete": 7,
        f"{TWIN}duration_s": 41.0,
        f"{TWIN}window_requests": 80,
        f"{TWIN}output_tokens_per_s": 319 / 41,
        f"{TWIN}attainment": 78 / 80,
    }
    slow = summarise(run, load=CLIENTS, slos=[])
    assert {name: slow[name] for name in expected} == pytest.approx(expected)
    assert row["attainment"] == 0, "0.25 s a token is too slow for the default objective"


def test_the_numbers_of_the_total_window_are_kept() -> None:
    run = closed()
    row, whole = summarise(run, load=CLIENTS), summarise(run)
    told = of_total(row)
    assert {name: told[name] for name in whole if name != "window_reason"} == {
        name: value for name, value in whole.items() if name != "window_reason"
    }
    assert row["output_tokens_per_s"] != whole["output_tokens_per_s"]
    assert of_total(whole) is whole


def test_memory_of_a_window_is_that_of_the_steps_in_it() -> None:
    """A step that ends where the window begins is none of its steps."""
    run = closed()
    run.steps = [step(0, 0, 2, 8, 8, 8), step(1, 2, 30, 2, 4, 8), step(2, 30, 41, 6, 8, 8)]
    for record in run.steps:
        record.held_tokens = record.used_tokens
        record.free_tokens = 8 - record.used_tokens
    run.holds = [Hold(0, 0, 1, 8, 8, 8), Hold(1, 1, 2, 2, 2, 2), Hold(2, 2, 3, 6, 6, 6)]
    row = summarise(run, load=CLIENTS)
    assert row["kv_utilisation_mean"] == pytest.approx((28 * 2 + 10 * 6) / 8 / 38)
    assert row["kv_utilisation_peak"] == 6 / 8
    assert row[f"{TWIN}kv_utilisation_peak"] == 1.0


def test_the_steady_tail_leaves_the_opening_wave_out() -> None:
    """evalscope#1641: 32 at once, 320 requests. The opening wave waits for 32 prompts to be computed, no other does."""
    lengths = default_rng(0).integers(4, 32, 320).tolist()
    load = ClosedLoop([request(i, 64, tokens) for i, tokens in enumerate(lengths)], 32)
    run = serve_on(make_pool("paged-16", 32 * 128, 128), load, Limits(128, 256, 64)).run
    row = summarise(run, load=LoadPoint(concurrency=32))
    assert row["window"] == "steady"
    assert isinstance(row["window_requests"], int) and 200 < row["window_requests"] < 288
    later = [one.first_s - one.scheduled_s for one in run.requests if one.scheduled_s > 0 and one.first_s is not None]
    p99_s, whole_p99_s = row["ttft_p99_s"], row[f"{TWIN}ttft_p99_s"]
    assert isinstance(p99_s, float) and isinstance(whole_p99_s, float)
    assert p99_s <= max(later) < whole_p99_s


def test_a_load_without_a_name_is_told_by_its_total_window() -> None:
    row = summarise(closed())
    assert (row["window"], row["duration_s"]) == ("total", 41.0)
    assert not any(name.startswith(TWIN) for name in row)


def test_a_p99_of_few_samples_is_flagged() -> None:
    for requests, flagged in ((298, True), (299, False)):
        row = summarise(Run([asked(i, 0.0, [1.0]) for i in range(requests)], [], [], 8, 1.0))
        assert row["ttft_p99_flagged"] is flagged
        assert row["tpot_p99_flagged"] is None


def test_all_cells_of_a_point_speak_of_one_window() -> None:
    """One repeat of contiguous never settled: at that load everybody is told by the total window."""

    def cell(backend: str, users: int, repeat: int, window: str) -> dict[str, object]:
        twins = {f"{TWIN}output_tokens_per_s": 5.0} if window == "steady" else {}
        speed = {"output_tokens_per_s": 8.0 if window == "steady" else 5.0}
        point = {"backend": backend, "concurrency": users, "repeat": repeat, "seed": repeat, "status": "ok"}
        return {**point, "window": window, **speed, **twins}

    rows = [
        cell(backend, users, r, "steady") for backend in ("contiguous", "paged") for users in (4, 8) for r in (0, 1)
    ]
    rows[0] = cell("contiguous", 4, 0, "total")
    rows.append({**cell("paged", 8, 2, "total"), "status": "failed", "output_tokens_per_s": None})
    results = Results.of_rows(rows)
    for variant in results.variants:
        of_variant = {group.load.concurrency: group for group in results.of_variant(variant)}
        assert of_variant[4].values("output_tokens_per_s") == [5.0, 5.0]
        assert of_variant[8].values("output_tokens_per_s") == [8.0, 8.0], "a failed cell has no say"


# --- within one run --------------------------------------------------------------------------------------------------


def test_batch_means_by_hand() -> None:
    """Thirty batches of a second with 2, 0, 2, 0 … events: mean 1, s = sqrt(30 / 29), t(29) = 2.04523."""
    at_s = [second + part for second in range(0, 30, 2) for part in (0.25, 0.75)]
    found = rate_interval(at_s, 0.0, 30.0)
    assert found is not None and found.n == 30
    assert found.value == pytest.approx(1.0)
    assert found.high == pytest.approx(1 + 2.045229642132703 * (30 / 29) ** 0.5 / 30**0.5)


def test_batches_that_hang_together_are_made_longer_or_given_up() -> None:
    """Von Neumann's C of 1 … 10 is 1 - 9 / (2 · 82.5) = 0.945 > 1.2816 · sqrt(8 / 99). Waves of 12 s are high three
    times in 2 s batches, then low: C is about 1 / 3; high twice and low twice in 3 s batches: about 0."""
    assert correlated([float(i) for i in range(1, 11)])
    assert not correlated([1.0, 2.0] * 5) and not correlated([3.0] * 10)
    slow = [second + k / (20 + second) for second in range(30) for k in range(20 + second)]
    assert rate_interval(slow, 0.0, 30.0) is None
    waves = [second + k / 8 for second in range(60) for k in range(7 if second % 12 < 6 else 1)]
    found = rate_interval(waves, 0.0, 60.0)
    assert found is not None and found.n == 20
    assert rate_interval([], 0.0, 1.0) is rate_interval([1.0], 1.0, 1.0) is None


def test_batch_means_cover_the_rate_of_independent_events() -> None:
    """95 of 100 in theory: of 300 intervals 271 or fewer have a probability below 0.1 %."""
    rng = default_rng(5)
    covered = 0
    for _ in range(300):
        found = rate_interval(rng.uniform(0, 100, rng.poisson(500)).tolist(), 0.0, 100.0)
        covered += found is None or (found.low or 0) <= 5.0 <= (found.high or 0)
    assert covered > 271


def test_one_repeat_has_the_interval_within_it() -> None:
    row = {"status": "ok", "output_tokens_per_s": 8.0, "batches": 30}
    within = {"output_tokens_per_s_within_low": 7.0, "output_tokens_per_s_within_high": 9.0}

    def group(*rows: dict[str, object]) -> Group:
        return Group(Variant("paged"), CLIENTS, Context(), rows)

    found = group(row | within).mean("output_tokens_per_s")
    assert (found.low, found.high, found.n, found.over) == (7.0, 9.0, 30, WITHIN)
    assert group(row).mean("output_tokens_per_s").low is None
    two = group(row | within, row | within).mean("output_tokens_per_s")
    assert (two.low, two.high, two.n) == (8.0, 8.0, 2)
