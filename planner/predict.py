"""What a published configuration would have measured: its load, drawn, on the cost model, and the metrics from it.

Lengths are drawn without luck: evenly spaced quantiles of a distribution with the stated mean, in a fixed random order.
Which distribution a campaign used, and how many requests, is in `workloads.toml` (facts of the campaigns' own scripts).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import accumulate, repeat
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from kvbench.errors import KvbenchError
from kvbench.planner.catalog import Card, find_card
from kvbench.planner.cost import CostModel, StepParameters, cost_model
from kvbench.planner.engines import EngineRules, find_engine
from kvbench.planner.forecast import Job, Limits, Replay, Unit, forecast
from kvbench.planner.formats import Format, find_format, native
from kvbench.planner.memory import Serving, plan_memory
from kvbench.planner.published import Configuration, Settings
from kvbench.planner.work import StepWork

if TYPE_CHECKING:
    import numpy as np

    from kvbench.engine.shapes import ModelShape


class Refused(Exception):
    """A configuration that no number should be given for; `rule` is one of the rules in docs/accuracy.md."""

    def __init__(self, rule: str, reason: str) -> None:
        super().__init__(reason)
        self.rule = rule


@dataclass(frozen=True, slots=True)
class Situation:
    """A configuration with all its names looked up."""

    card: Card
    shape: ModelShape
    number: Format
    engine: EngineRules
    tp: int
    limits: Limits
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class Workload:
    """How a campaign draws lengths, and how many: coefficients of variation, the longest output, `requests` that were
    sent where the row's own number is not that, `counted` which its rate of requests was divided from, and the share
    of a prompt that prefix caching found. `in_process`: the engine ran without its server, whose defaults are others.
    """

    cv_input: float = 0.0
    cv_output: float = 0.0
    longest_output: int = 1 << 30
    requests: int | None = None
    counted: int | None = None
    cached_share: float = 0.0
    span: float = 1.0
    in_process: bool = False


def look_up(configuration: Configuration, settings: Settings) -> Situation:
    """All that a prediction needs by name. `Refused` where a name is unknown or the model does not fit."""
    from kvbench.engine.shapes import find_shape

    if not configuration.card or not configuration.shape:
        raise Refused("card or shape", "the card or the model's shape is not named")
    try:
        card = find_card(configuration.card)
    except KvbenchError as error:
        raise Refused("card or shape", str(error)) from None
    shape = find_shape(configuration.shape)
    if shape is None:
        raise Refused("card or shape", f"no built-in shape is named {configuration.shape!r}")
    if configuration.load == "other":
        raise Refused("load", "the load is no rate, concurrency, batch or offline run")
    if configuration.input_tokens is None or configuration.output_tokens is None:
        raise Refused("lengths", "the mean lengths are not stated")
    if configuration.tp is None:
        raise Refused("cards", "tensor parallelism is not a number")
    try:
        engine, number = find_engine(configuration.engine), find_format(configuration.precision)
        cost_model(card, shape, number, configuration.tp, StepParameters())
    except KvbenchError as error:
        raise Refused("cards", str(error)) from None
    kv_bytes = 1 if engine.kv_bits == 8 and native(card, number) and number.kind in ("fp8", "fp4") else 2
    shape = replace(shape, quantisation=number.quantisation)
    limits = _limits(card, shape, engine, configuration, settings, kv_bytes)
    return Situation(card, shape, number, engine, configuration.tp, limits, kv_bytes)


LINK_BYTES = 1 << 30
"""Buffers of each card for all-reduces."""

LEAST_POOL = 0.03
"""A published run did serve its load: where the arithmetic leaves next to nothing, it had this share of the card."""


def _limits(
    card: Card,
    shape: ModelShape,
    engine: EngineRules,
    configuration: Configuration,
    settings: Settings,
    kv_bytes: int,
) -> Limits:
    """What the engine lets into a step, and the pool that the exact memory arithmetic leaves."""
    assert configuration.tp and configuration.input_tokens and configuration.output_tokens
    longest = math.ceil(configuration.input_tokens + configuration.output_tokens)
    alone = engine.in_process if workload_of(configuration).in_process else None
    batched = settings.batched_tokens or (alone[1] if alone else engine.token_limit(card))
    if engine.whole_prompts:
        batched = max(batched, longest)
    sequences = settings.sequences or (alone[0] if alone else engine.sequence_limit(card))
    share = settings.memory_share or engine.memory_share
    memory = plan_memory(
        shape,
        card,
        Serving(
            kv_dtype="fp8" if kv_bytes == 1 else "bfloat16",
            tp=configuration.tp,
            gpu_memory_utilization=1.0 if engine.of_the_rest else share,
            max_batched_tokens=batched,
            max_sequences=min(sequences, engine.sampled_at_once),
        ),
    )
    left = memory.left_bytes - (LINK_BYTES if configuration.tp > 1 else 0)
    room = max(left * (share if engine.of_the_rest else 1.0), LEAST_POOL * card.memory_bytes)
    whole = 1.0 - shape.sliding_layers / shape.layers  # engines free what slid out of a window
    pool = int(room / (memory.kv_bytes_per_token * whole))
    if memory.term("weights").bytes >= card.memory_bytes:
        raise Refused("memory", f"the weights of {shape.name} do not fit on {configuration.tp} x {card.name}")
    return Limits(sequences, batched, max(pool, longest), engine.mixed, engine.reserve)


@cache
def _workloads() -> dict[str, list[dict[str, Any]]]:
    import tomllib

    return tomllib.loads(files("kvbench.planner").joinpath("workloads.toml").read_text(encoding="utf-8"))


def workload_of(configuration: Configuration) -> Workload:
    """How the campaign of a configuration drew its requests; fixed lengths where nothing is known."""
    for entry in _workloads()["workload"]:
        inputs = configuration.input_tokens or 0.0
        if entry["group"] == configuration.group and entry.get("above", 0) <= inputs < entry.get("below", math.inf):
            return Workload(**{k: v for k, v in entry.items() if k not in ("group", "above", "below")})
    return Workload()


@cache
def lengths(mean: float, cv: float, longest: int, count: int, stream: str) -> tuple[int, ...]:
    """`count` whole lengths of at least 1, lognormal, cut at `longest`, scaled until their mean is as stated; their
    order is fixed by `stream`."""
    if not cv or count < 2:
        return (max(1, round(mean)),) * count
    if mean >= longest:
        return (longest,) * count
    sigma = math.sqrt(math.log1p(cv * cv))
    normal = NormalDist()
    shape = [math.exp(sigma * normal.inv_cdf((i + 0.5) / count)) for i in range(count)]
    low, high = 0.0, mean * 50.0
    for _ in range(60):
        scale = (low + high) / 2
        if sum(min(scale * value, longest) for value in shape) < mean * count:
            low = scale
        else:
            high = scale
    values = [max(1, round(min(high * value, longest))) for value in shape]
    random.Random(f"{stream} {count}").shuffle(values)
    return tuple(values)


MOST_REQUESTS = 600
STEADY_S = 40.0


def jobs_of(configuration: Configuration, settings: Settings) -> list[Job]:
    """The requests of a configuration in order of arrival: the same for every card, so that comparisons are paired."""
    assert configuration.input_tokens and configuration.output_tokens
    load, value = configuration.load, configuration.load_value or 1.0
    drawn = workload_of(configuration)
    sent = drawn.requests if drawn.counted and load == "rate" else None
    count = sent or configuration.requests or settings.requests or drawn.requests or 0
    if not count:
        count = {"rate": math.ceil(value * STEADY_S), "closed": math.ceil(8 * value), "offline": 1000}[load]
        count = max(count, 100 if load != "closed" else 8)
    count = min(count, 2000) if configuration.requests or settings.requests else min(count, MOST_REQUESTS)
    inputs = lengths(configuration.input_tokens, drawn.cv_input, 1 << 30, count, "inputs")
    outputs = lengths(configuration.output_tokens, drawn.cv_output, drawn.longest_output, count, "outputs")
    times: Iterable[float] = repeat(0.0, count)
    if load == "rate":
        times = (drawn.span * at / value for at in arrivals(count, configuration.arrivals == "constant"))
    return [
        Job(at, prompt, output, int(prompt * drawn.cached_share))
        for at, prompt, output in zip(times, inputs, outputs, strict=True)
    ]


@cache
def arrivals(count: int, constant: bool) -> tuple[float, ...]:
    """Times of `count` arrivals at one a second: evenly spaced, or the quantiles of Poisson gaps in a fixed order."""
    if constant:
        return tuple(float(i) for i in range(count))
    gaps = [-math.log1p(-(i + 0.5) / count) for i in range(count - 1)]
    random.Random(f"arrivals {count}").shuffle(gaps)
    return tuple(accumulate(gaps, initial=0.0))


def metrics_of(
    configuration: Configuration,
    settings: Settings,
    situation: Situation,
    parameters: StepParameters,
    request_s: float,
) -> dict[str, float]:
    """Every metric that the configuration may be asked for, in the collection's names and units. `request_s` passes
    outside the engine's steps before a first token."""
    cost = cost_model(
        situation.card, situation.shape, situation.number, situation.tp, parameters, kv_bytes=situation.kv_bytes
    )
    if configuration.load == "batch":
        return _step_metrics(configuration, cost)
    jobs = jobs_of(configuration, settings)
    if configuration.load == "rate":
        done = forecast(cost, situation.limits, jobs)
        whole = [job for job in done.jobs if job.last_s is not None]
        inputs, outputs = [job.input_tokens for job in whole], [job.output_tokens for job in whole]
        values = _load_metrics(done.times(), inputs, outputs, request_s)
        drawn = workload_of(configuration)
        if drawn.counted and drawn.requests and values:
            values["completed_req_rate"] *= drawn.counted / drawn.requests
        return values
    replay = _replay(configuration, settings, situation.limits)
    return _load_metrics(replay.times(cost), replay.inputs, replay.outputs, request_s)


@cache
def _replay(configuration: Configuration, settings: Settings, limits: Limits) -> Replay:
    """The steps of a load that no step's time changes, which need not be found twice."""
    concurrency = round(configuration.load_value or 1) if configuration.load == "closed" else None
    return Replay.of(forecast(Unit(), limits, jobs_of(configuration, settings), concurrency))


def sustained_per_s(configuration: Configuration, situation: Situation, cost: CostModel) -> float:
    """Requests per second that a full batch of endless supply ends: beyond it, queues grow for as long as they come."""
    assert configuration.input_tokens and configuration.output_tokens
    prompt, output = round(configuration.input_tokens), max(1, round(configuration.output_tokens))
    limits = situation.limits
    held = prompt + (output if limits.reserve else output // 2)
    batch = max(1, min(limits.sequences, limits.pool_tokens // held))
    context = batch * (prompt + output // 2)
    decode = cost.seconds(StepWork(batch, 0, context, context, batch))
    prefill = cost.seconds(StepWork(0, prompt, prompt * (prompt + 1) // 2, prompt, 1))
    if limits.mixed:  # weights and host pass once for both
        prefill = max(0.0, prefill - cost.seconds(StepWork(1, 0, prompt, prompt, 1)))
    return 1.0 / (output * decode / batch + prefill)


def overloaded(configuration: Configuration, situation: Situation, parameters: StepParameters) -> bool:
    """Whether the asked arrival rate is beyond what the cards sustain."""
    if configuration.load != "rate" or configuration.load_value is None:
        return False
    cost = cost_model(
        situation.card, situation.shape, situation.number, situation.tp, parameters, kv_bytes=situation.kv_bytes
    )
    return configuration.load_value > sustained_per_s(configuration, situation, cost)


def _step_metrics(configuration: Configuration, cost: CostModel) -> dict[str, float]:
    assert configuration.input_tokens and configuration.output_tokens and configuration.load_value
    batch, prompt = round(configuration.load_value), round(configuration.input_tokens)
    whole = StepWork(0, batch * prompt, batch * prompt * (prompt + 1) // 2, batch * prompt, batch)
    middle = batch * (prompt + round(configuration.output_tokens) // 2)
    decode = StepWork(batch, 0, middle, middle, batch)
    return {"prompt_step_ms": 1e3 * cost.seconds(whole), "decode_step_ms": 1e3 * cost.seconds(decode)}


def _load_metrics(
    times: np.ndarray, inputs: Sequence[int] | np.ndarray, outputs: Sequence[int] | np.ndarray, request_s: float
) -> dict[str, float]:
    """Every metric from arrival, first and last token of the jobs, `[3, jobs]`."""
    import numpy as np

    if not times.size:
        return {}
    arrived, first, last = times
    made = np.asarray(outputs, dtype=float)
    several = made > 1
    seconds = float(last.max()) + request_s
    values = {
        "output_tput": float(made.sum()) / seconds,
        "total_tput": float(made.sum() + np.sum(inputs)) / seconds,
        "completed_req_rate": len(made) / seconds,
    }
    tpot = (last - first)[several] / (made[several] - 1)
    for name, spans in (("ttft", first - arrived + request_s), ("tpot", tpot), ("e2e", last - arrived + request_s)):
        if spans.size:
            values[f"{name}_mean_ms"] = 1e3 * float(spans.mean())
            for key, value in zip(("p50", "p99"), np.percentile(spans, (50, 99)), strict=True):
                values[f"{name}_{key}_ms"] = 1e3 * float(value)
    return values


def parameters_of(values: Mapping[str, float]) -> tuple[StepParameters, float]:
    """Step parameters and `request_s` from fitted values."""
    named = dict(values)
    request_s = named.pop("request_s", 0.0)
    return StepParameters(**named), request_s
