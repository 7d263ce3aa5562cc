"""Each number of a cell against its definition, worked out by hand, with the cases other benchmarks got wrong."""

from __future__ import annotations

import json

import pytest

from kvbench.metrics.latency import gaps_s, latencies, tpot_s
from kvbench.metrics.records import ABORTED, FAILED, REJECTED, UNFINISHED, RequestRecord, Run, StepRecord
from kvbench.metrics.slo import Slo
from kvbench.metrics.summary import summarise, usd_per_million_output_tokens


def answered(token_s: list[float], *, scheduled_s: float = 0.0, input_tokens: int = 10) -> RequestRecord:
    return RequestRecord(
        request=0,
        scheduled_s=scheduled_s,
        sent_s=scheduled_s,
        admitted_s=scheduled_s + 0.25,
        first_s=token_s[0],
        last_s=token_s[-1],
        token_s=token_s,
        input_tokens=input_tokens,
        output_tokens=len(token_s),
        max_tokens=100,
        status="finished",
        reason="length",
    )


def refused(status: str, *, scheduled_s: float = 0.0, token_s: tuple[float, ...] = ()) -> RequestRecord:
    return RequestRecord(
        request=0,
        scheduled_s=scheduled_s,
        sent_s=scheduled_s,
        first_s=token_s[0] if token_s else None,
        last_s=token_s[-1] if token_s else None,
        token_s=list(token_s),
        input_tokens=10,
        output_tokens=len(token_s),
        max_tokens=100,
        status=status,
        reason="it says why",
    )


def idle_step(number: int, end_s: float, running: int) -> StepRecord:
    return StepRecord(number, end_s - 1, end_s, 0.5, 0.5, running, 0, running, running, 0, 0, running, 0, 0, 8, 0, 0, 8)


def run_of(*requests: RequestRecord, end_s: float, steps: tuple[StepRecord, ...] = ()) -> Run:
    number = -1
    for request in requests:
        number += request.sample == 0
        request.request = number
    return Run(list(requests), list(steps), [], 8, end_s)


def test_every_column_of_a_small_run_by_hand() -> None:
    requests = (
        answered([1.0, 1.5, 2.0], scheduled_s=0.0, input_tokens=10),
        answered([3.0, 5.0], scheduled_s=1.0, input_tokens=20),
        refused(UNFINISHED, scheduled_s=2.0, token_s=(7.0, 8.0)),
        refused(REJECTED, scheduled_s=3.0),
        refused(ABORTED, scheduled_s=4.0, token_s=(9.0,)),
    )
    requests[0].cached_tokens, requests[1].cached_tokens = 4, 8
    requests[0].preemptions, requests[2].preemptions, requests[1].truncated_tokens = 2, 1, 5
    requests[0].swaps = 1
    run = run_of(*requests, end_s=10.0, steps=(idle_step(0, 1.0, 1), idle_step(1, 3.0, 3), idle_step(2, 5.0, 2)))
    run.external_fragmentation_events = 4

    row = summarise(run, slos=[Slo("ttft", 1.5)], price_usd_per_hour=3.6, cards=2)

    expected = {
        "window": "total",
        "duration_s": 10.0,
        "ttft_mean_s": 1.5,
        "ttft_p50_s": 1.5,
        "ttft_p90_s": 1.9,
        "ttft_p99_s": 1.99,
        "ttft_samples": 2,
        "tpot_mean_s": 1.25,  # 0.5 and 2.0
        "tpot_p50_s": 1.25,
        "tpot_samples": 2,
        "itl_mean_s": 1.0,  # 0.5, 0.5, 2.0
        "itl_p50_s": 0.5,
        "itl_samples": 3,
        "e2e_mean_s": 3.0,  # 2 and 4
        "e2e_p90_s": 3.8,
        "queue_mean_s": 0.25,
        "output_tokens_per_s": 0.8,  # those of the unfinished and the aborted request too
        "output_tokens_per_s_per_card": 0.4,
        "input_tokens_per_s": 5.0,  # 10 + 20 + 10 + 10: the rejected one never had a first token
        "total_tokens_per_s": 5.8,
        "requests_per_s": 0.2,
        "achieved_rate_per_s": 1.0,
        "goodput_per_s": 0.1,
        "attainment": 0.2,
        "slo_met": False,
        "preemptions": 3,
        "swaps": 1,
        "peak_running": 3,
        "requests_submitted": 5,
        "requests_finished": 2,
        "requests_failed": 0,
        "requests_rejected": 1,
        "requests_aborted": 1,
        "requests_unfinished": 1,
        "requests_truncated": 1,
        "requests_one_token": 0,
        "cached_tokens_total": 12,
        "prefix_hit_rate": 0.4,  # 12 of 10 + 20: the others were never admitted
        "input_tokens_total": 50,
        "output_tokens_total": 8,
        "output_tokens_incomplete": 3,  # two of the unfinished request, one of the aborted
        "external_fragmentation_events": 4,
        "steps": 3,
        "usd_per_million_output_tokens": 3.6 * 2 / (0.8 * 3600) * 1e6,
        "kv_utilisation_mean": 0.0,
        "kv_fragmentation_mean": None,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    json.dumps(row, allow_nan=False)


def test_samples_are_one_request_and_each_has_its_latency() -> None:
    """Two requests of two samples each: one of them whole and in time, the other with a sample that came to nothing."""
    samples = (
        answered([1.0, 1.5]),
        answered([1.0, 3.0]),
        answered([2.0, 2.5], scheduled_s=1.0, input_tokens=30),
        refused(ABORTED, scheduled_s=1.0, token_s=(2.0,)),
    )
    samples[1].sample = samples[3].sample = 1
    samples[0].cached_tokens = 4
    row = summarise(run_of(*samples, end_s=10.0), slos=[Slo("tpot", 2.0)])
    expected = {
        "ttft_samples": 3,
        "tpot_mean_s": 1.0,  # 0.5, 2.0 and 0.5
        "requests_submitted": 2,
        "requests_finished": 1,
        "requests_aborted": 1,
        "requests_per_s": 0.1,
        "achieved_rate_per_s": 1.0,  # (2 - 1) / 1 s
        "attainment": 0.5,
        "input_tokens_total": 40,  # a prompt counts once
        "output_tokens_total": 7,
        "prefix_hit_rate": 0.1,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    late = summarise(run_of(*samples, end_s=10.0), slos=[Slo("tpot", 1.0)])
    assert late["attainment"] == 0.0, "a request is good where all its samples are"


def test_gaps_leave_the_first_token_out() -> None:
    """vllm#7242: tokens at 1.0, 1.1, 1.2 s."""
    assert gaps_s(answered([1.0, 1.1, 1.2])) == pytest.approx([0.1, 0.1])


def test_tokens_of_one_step_share_its_time() -> None:
    """sglang#12064: one token at 100 ms, three at 140 ms, one at 180 ms."""
    request = answered([0.1, 0.14, 0.14, 0.14, 0.18])
    assert tpot_s(request) == pytest.approx(0.020)
    assert gaps_s(request) == pytest.approx([0.04, 0, 0, 0.04])


@pytest.mark.parametrize("status", [FAILED, REJECTED, ABORTED, UNFINISHED])
def test_what_did_not_finish_has_no_latency(status: str) -> None:
    assert not any(latencies([refused(status, token_s=(1.0, 2.0))]).values())


def test_every_request_fails() -> None:
    """pytorch#172616: nulls, and still strict JSON."""
    row = summarise(run_of(refused(FAILED), refused(FAILED, scheduled_s=1.0), end_s=4.0), price_usd_per_hour=2.0)
    assert row["requests_failed"] == row["requests_submitted"] == 2
    for name in ("ttft_p99_s", "tpot_mean_s", "itl_p50_s", "e2e_p90_s", "usd_per_million_output_tokens"):
        assert row[name] is None
    assert row["output_tokens_per_s"] == row["goodput_per_s"] == row["attainment"] == 0
    assert row["slo_met"] is False
    json.dumps(row, allow_nan=False)


def test_no_request_at_all() -> None:
    row = summarise(run_of(end_s=4.0))
    assert row["requests_submitted"] == row["peak_running"] == row["duration_s"] == 0
    names = ("output_tokens_per_s", "requests_per_s", "attainment", "slo_met", "goodput_per_s", "ttft_mean_s")
    for name in (*names, "prefix_hit_rate"):
        assert row[name] is None
    json.dumps(row, allow_nan=False)


def test_one_request_of_one_token() -> None:
    row = summarise(run_of(answered([0.5]), end_s=0.5))
    assert row["ttft_p50_s"] == row["ttft_p99_s"] == row["e2e_mean_s"] == 0.5
    assert row["tpot_mean_s"] is row["itl_p99_s"] is row["achieved_rate_per_s"] is None
    assert row["requests_one_token"] == 1
    assert row["attainment"] == 1.0  # a TPOT SLO is passed vacuously
    assert row["slo_met"] is True


def test_a_window_without_length_has_no_rates() -> None:
    row = summarise(run_of(refused(REJECTED), end_s=0.0))
    assert row["requests_per_s"] is row["output_tokens_per_s"] is row["goodput_per_s"] is None
    assert row["attainment"] == 0


def test_throughput_per_card() -> None:
    """vllm#56111: 100 tokens/s on 8 cards."""
    run = run_of(answered([i / 100 for i in range(1, 101)]), end_s=1.0)
    row = summarise(run, cards=8)
    assert row["output_tokens_per_s"] == 100
    assert row["output_tokens_per_s_per_card"] == 12.5


def test_cost() -> None:
    assert usd_per_million_output_tokens(1000.0, 3.6, 1) == pytest.approx(1.0)
    assert usd_per_million_output_tokens(1000.0, 3.6, 4) == pytest.approx(4.0)
    assert usd_per_million_output_tokens(1000.0, None, 1) is None
    assert usd_per_million_output_tokens(0.0, 3.6, 1) is None
    assert usd_per_million_output_tokens(None, 3.6, 1) is None


def test_percentile_objectives_have_columns_of_their_own() -> None:
    requests = [answered([i / 10]) for i in range(1, 12)]
    slos = [Slo("ttft", 0.6, 50), Slo("ttft", 0.5, 90)]
    row = summarise(run_of(*requests, end_s=2.0), slos=slos)
    assert row["slo_ttft_p50_s"] == pytest.approx(0.6)
    assert row["slo_ttft_p90_s"] == pytest.approx(1.0)
    assert row["slo_met"] is False
    assert row["attainment"] == 1  # no SLO asks each request; all finished
    assert summarise(run_of(*requests, end_s=2.0), slos=slos[:1])["slo_met"] is True


def test_requests_in_flight_are_counted_by_the_moment_not_by_the_second() -> None:
    """0 to 2, 0.5 to 1.25 and 1.25 to 3, then to the end at 5: two at once, though four fall into the second from 1 s.
    One that was rejected on arrival was never in flight."""
    requests = [
        answered([1.0, 2.0]),
        answered([1.25], scheduled_s=0.5),
        answered([3.0], scheduled_s=1.25),
        refused(UNFINISHED, scheduled_s=2.0),
        refused(REJECTED, scheduled_s=1.5),
    ]
    for one in requests:
        one.admitted_s = None
    assert summarise(run_of(*requests, end_s=5.0))["peak_in_flight"] == 2
    both = [answered([1.0, 2.0]), answered([1.0, 3.0])]
    assert summarise(run_of(*both, end_s=5.0))["peak_in_flight"] == 2
    both[1].sample = 1  # a request is one, however many samples it has
    assert summarise(run_of(*both, end_s=5.0))["peak_in_flight"] == 1
    assert summarise(run_of(end_s=5.0))["peak_in_flight"] == 0


def test_the_standard_interpolation_of_four_requests() -> None:
    """TTFT 1, 2, 4 and 8 s: p50 lies in the middle of 2 and 4, p90 at 0.7, p99 at 0.97 of the way from 4 to 8."""
    requests = [answered([ttft_s, ttft_s + 1]) for ttft_s in (1.0, 2.0, 4.0, 8.0)]
    row = summarise(run_of(*requests, end_s=9.0))
    percentiles = [row[f"ttft_p{q}_s"] for q in (50, 90, 99)]
    assert percentiles == pytest.approx([3.0, 4 + 0.7 * 4, 4 + 0.97 * 4])


def test_unfinished_at_the_timeout_is_bad_and_its_tokens_count() -> None:
    """Three whole answers in time and one that the end cut off after three tokens: 3 of 4 good, 3 in 10 s."""
    requests = [answered([1.0 + i, 1.02 + i], scheduled_s=float(i)) for i in range(3)]
    cut = refused(UNFINISHED, scheduled_s=9.0, token_s=(9.25, 9.5, 9.75))
    row = summarise(run_of(*requests, cut, end_s=10.0))
    assert (row["attainment"], row["goodput_per_s"], row["requests_per_s"]) == (0.75, 0.3, 0.3)
    assert row["output_tokens_per_s"] == pytest.approx(0.9)
    assert row["ttft_samples"] == 3


def test_several_objectives_must_all_hold() -> None:
    """TTFT 1 s and 0.5 s, TPOT 0.1 and 0.4 s: each objective alone has one of two, both together none."""
    requests = [answered([1.0, 1.1]), answered([0.5, 0.9])]
    for slos, attainment in (([Slo("ttft", 0.5)], 0.5), ([Slo("tpot", 0.2)], 0.5)):
        assert summarise(run_of(*requests, end_s=2.0), slos=slos)["attainment"] == attainment
    assert summarise(run_of(*requests, end_s=2.0), slos=[Slo("ttft", 0.5), Slo("tpot", 0.2)])["attainment"] == 0


def test_a_token_without_its_time_is_impossible() -> None:
    request = answered([1.0, 2.0])
    request.output_tokens = 3
    with pytest.raises(AssertionError, match="without its time"):
        summarise(run_of(request, end_s=3.0))


def test_an_unknown_status_is_impossible() -> None:
    with pytest.raises(AssertionError, match="unknown status"):
        summarise(run_of(refused("lost"), end_s=3.0))
