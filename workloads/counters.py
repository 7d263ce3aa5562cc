"""What a server tells of itself in Prometheus' text format, under the names of vLLM, SGLang and TGI."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite

from kvbench.metrics.records import SampleRecord

RUNNING, WAITING, PREEMPTIONS, USAGE = "running", "waiting", "preemptions", "kv_cache_usage"
HELD, POOL = "held_tokens", "pool_tokens"
INPUT, OUTPUT = "input_tokens", "output_tokens"

NAMES: Mapping[str, str] = {
    "vllm:num_requests_running": RUNNING,
    "vllm:num_requests_waiting": WAITING,
    "vllm:kv_cache_usage_perc": USAGE,
    "vllm:gpu_cache_usage_perc": USAGE,  # its name before 0.10
    "vllm:num_preemptions_total": PREEMPTIONS,
    "vllm:prompt_tokens_total": INPUT,
    "vllm:generation_tokens_total": OUTPUT,
    "sglang:num_running_reqs": RUNNING,
    "sglang:num_queue_reqs": WAITING,
    "sglang:token_usage": USAGE,
    "sglang:num_used_tokens": HELD,
    "sglang:max_total_num_tokens": POOL,
    "sglang:prompt_tokens_total": INPUT,
    "sglang:generation_tokens_total": OUTPUT,
    "tgi_batch_current_size": RUNNING,
    "tgi_queue_size": WAITING,
    "tgi_request_input_length_sum": INPUT,
    "tgi_request_generated_tokens_sum": OUTPUT,
}
VLLM_POOL = "vllm:cache_config_info"
"""A gauge that is always 1; block size and number of blocks are its labels."""

_PREFIXES = ("vllm:", "sglang:", "tgi_")


@dataclass(frozen=True, slots=True)
class Counters:
    """One reading, at `at_s`, by the words above; what the server does not tell is absent."""

    at_s: float
    told: Mapping[str, float]

    def whole(self, name: str) -> int | None:
        return None if name not in self.told else round(self.told[name])


def read(text: str, at_s: float) -> Counters:
    """Series of one name (a server of several engines has one for each) are added up; of usage the mean counts."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        if not line.startswith(_PREFIXES):
            continue
        name = re.split(r"[{ ]", line, maxsplit=1)[0]
        if name == VLLM_POOL:
            blocks, size = (re.search(rf'\b{label}="(\d+)"', line) for label in ("num_gpu_blocks", "block_size"))
            if blocks and size:
                found.setdefault(POOL, []).append(float(blocks[1]) * float(size[1]))
        elif name in NAMES:
            value = _number(line.rpartition("}")[2] if "{" in line else line[len(name) :])
            if value is not None:
                found.setdefault(NAMES[name], []).append(value)
    told = {name: sum(values) / (len(values) if name == USAGE else 1) for name, values in found.items()}
    if HELD not in told and USAGE in told and POOL in told:
        told[HELD] = told[USAGE] * told[POOL]
    return Counters(at_s, told)


def _number(text: str) -> float | None:
    """The value of a series, which a time stamp may follow; None where it is no finite number."""
    try:
        value = float(text.split()[0])
    except (IndexError, ValueError):
        return None
    return value if isfinite(value) else None


def samples(readings: Iterable[tuple[float, Counters]]) -> list[SampleRecord]:
    """Readings with the times at which they were asked for, as rows."""
    rows: list[SampleRecord] = []
    before: int | None = None
    for asked_s, reading in readings:
        preemptions = reading.whole(PREEMPTIONS)
        since = preemptions if before is None else before
        rows.append(
            SampleRecord(
                step=len(rows),
                start_s=asked_s,
                end_s=reading.at_s,
                running=reading.whole(RUNNING),
                waiting=reading.whole(WAITING),
                preemptions=None if preemptions is None or since is None else max(0, preemptions - since),
                pool_tokens=reading.whole(POOL),
                held_tokens=reading.whole(HELD),
                kv_cache_usage=reading.told.get(USAGE),
            )
        )
        before = preemptions
    return rows


def grown(first: Counters | None, last: Counters | None, name: str) -> int | None:
    """By how much a counter grew; None where it is not told, or began anew because the server did."""
    if first is None or last is None or name not in first.told or name not in last.told:
        return None
    more = round(last.told[name] - first.told[name])
    return more if more >= 0 else None
