"""What servers tell of themselves in Prometheus' text format, and what becomes of it: by hand."""

from __future__ import annotations

import pytest

from kvbench.metrics.records import FAILED, FINISHED, RequestRecord, Run, SampleRecord
from kvbench.metrics.summary import summarise
from kvbench.workloads.counters import OUTPUT, Counters, grown, read, samples

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="100"} 1.0
vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 1.5e+03
vllm:generation_tokens_total{engine="0",model_name="m"} 250.0 1395066363000
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:request_success_total{finished_reason="length"} 9.0
process_resident_memory_bytes 1e9
"""
SGLANG = """\
sglang:num_running_reqs{model_name="a {strange} one"} 4.0
sglang:num_queue_reqs{model_name="m"} 2.0
sglang:token_usage{model_name="m"} 0.1
sglang:num_used_tokens{model_name="m"} 1000.0
sglang:max_total_num_tokens{model_name="m"} 10000.0
sglang:prompt_tokens_total{model_name="m"} 5.0
sglang:generation_tokens_total{model_name="m"} 6.0
"""
TGI = """\
tgi_batch_current_size 8
tgi_queue_size 3
tgi_request_input_length_sum 120
tgi_request_generated_tokens_sum 77
tgi_request_generated_tokens_count 4
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            VLLM,
            {
                "running": 5,
                "waiting": 1,
                "kv_cache_usage": 0.375,
                "pool_tokens": 1600,
                "held_tokens": 600,
                "preemptions": 7,
                "input_tokens": 1500,
                "output_tokens": 250,
            },
        ),
        (
            SGLANG,
            {
                "running": 4,
                "waiting": 2,
                "kv_cache_usage": 0.1,
                "held_tokens": 1000,
                "pool_tokens": 10000,
                "input_tokens": 5,
                "output_tokens": 6,
            },
        ),
        (TGI, {"running": 8, "waiting": 3, "input_tokens": 120, "output_tokens": 77}),
        ("vllm:num_requests_running NaN\nvllm:num_requests_waiting\nother 5\n", {}),
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n', {}),
    ],
)
def test_names_of_servers(text: str, told: dict[str, float]) -> None:
    assert read(text, 1.0).told == told


def test_preemptions_are_those_since_the_sample_before() -> None:
    readings = [(s, Counters(s + 0.1, {"preemptions": total})) for s, total in ((0.0, 7), (1.0, 9), (2.0, 9), (3.0, 1))]
    rows = samples([*readings, (4.0, Counters(4.1, {}))])
    assert [row.preemptions for row in rows] == [0, 2, 0, 0, None]
    assert [(row.step, row.start_s, row.end_s) for row in rows[:2]] == [(0, 0.0, 0.1), (1, 1.0, 1.1)]


def test_a_counter_that_began_anew_or_is_not_told_is_unknown() -> None:
    first, last = Counters(0, {OUTPUT: 5}), Counters(1, {OUTPUT: 9})
    assert grown(first, last, OUTPUT) == 4
    assert grown(last, first, OUTPUT) is None
    assert grown(None, last, OUTPUT) is None and grown(first, None, OUTPUT) is None
    assert grown(first, last, "input_tokens") is None


def answered(number: int, **more: object) -> RequestRecord:
    """Scheduled at its number, sent 10 ms late, two tokens 1 s and 2 s later."""
    at_s = float(number)
    facts: dict[str, object] = {
        "request": number,
        "scheduled_s": at_s,
        "sent_s": at_s + 0.01,
        "input_tokens": 4,
        "max_tokens": 2,
        "first_s": at_s + 1,
        "last_s": at_s + 2,
        "token_s": [at_s + 1, at_s + 2],
        "output_tokens": 2,
        "status": FINISHED,
        "reason": "length",
        "asked_tokens": 4,
        "told_tokens": 2,
        "streamed_tokens": 2,
        "chunks": 2,
        "empty_chunks": 0,
    }
    return RequestRecord(**(facts | more))  # type: ignore[arg-type]


def failed(number: int, reason: str) -> RequestRecord:
    nothing: dict[str, object] = {"first_s": None, "last_s": None, "token_s": [], "output_tokens": 0, "status": FAILED}
    return answered(number, reason=reason, **nothing)


def a_run(*requests: RequestRecord, **more: object) -> Run:
    return Run(list(requests), [], [], None, 10.0, None, **more)  # type: ignore[arg-type]


def test_the_summary_of_a_server_by_hand() -> None:
    run = a_run(
        answered(0, cached_tokens=3, told_cached_tokens=3),
        answered(1, reason="stop", told_tokens=None, asked_output_tokens=1),
        answered(2, streamed_tokens=5, input_tokens=6, told_cached_tokens=0),
        answered(3, streamed_tokens=None, chunks=3, sent_s=3.05),
        failed(4, "http 429: slow down"),
        failed(5, "http 429: slow down: really"),
        failed(6, "reset: gone"),
        server_input_tokens=20,
        server_output_tokens=8,
        samples=[
            SampleRecord(0, 0.0, 0.1, running=1, waiting=0, preemptions=0, kv_cache_usage=0.5),
            SampleRecord(1, 1.0, 1.1, running=4, waiting=2, preemptions=3, kv_cache_usage=0.2),
            SampleRecord(2, 2.0, 2.1),
        ],
    )
    row = summarise(run)
    expected = {
        "send_lag_p50_s": 0.01,
        "service_ttft_p50_s": 0.99,
        "preemptions": 3,
        "peak_running": 4,
        "peak_waiting": 2,
        "cached_tokens_total": 3,
        "prefix_hit_rate": 3 / 10,
        "kv_cache_usage_mean": (0.5 * 0.1 + 0.2 * 1.0) / 1.1,
        "kv_cache_usage_peak": 0.5,
        "requests_stopped": 1,
        "requests_overlong": 1,
        "usage_missing": 1,
        "usage_differences": 2,
        "prompt_differences": 1,
        "counters_input_tokens": 20 - 30,
        "counters_output_tokens": 0,
        "errors_http_429": 2,
        "errors_reset": 1,
        "requests_finished": 4,
        "requests_failed": 3,
        "ttft_p50_s": 1.0,
        "output_tokens_per_s": 8 / 10,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected)


def test_what_a_server_does_not_tell_is_null_never_0() -> None:
    row = summarise(a_run(answered(0)))
    silent = "preemptions swaps peak_running peak_waiting cached_tokens_total prefix_hit_rate steps queue_p50_s".split()
    silent += ["external_fragmentation_events", "swapped_tokens_peak", "kv_cache_usage_mean", "kv_cache_usage_peak"]
    silent += [f"kv_{part}_mean" for part in "utilisation reserved internal rounding free efficiency cached".split()]
    silent += ["counters_input_tokens", "counters_output_tokens"]
    assert {name: row[name] for name in silent} == dict.fromkeys(silent)


def test_a_run_of_nothing_has_no_numbers() -> None:
    row = summarise(a_run())
    assert row["send_lag_p99_s"] is None and row["service_ttft_p50_s"] is None
    assert row["counters_output_tokens"] is None
