"""The simulator against queueing theory, and what must hold of any simulated card.

One seat and answers of one token make the engine an M/D/1 queue; k seats and steps that take as long whatever they
carry make it M/M/k, up to the step: who comes while one runs waits for its end. Bounds are Student's intervals over
independent runs of fixed seeds, at 99.9 %."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from fakes import make_pool
from scipy.stats import t as student
from test_simulator import Toy

from kvbench.engine.clock import VirtualClock
from kvbench.engine.engine import Engine, serve
from kvbench.engine.interfaces import Allocator
from kvbench.engine.scheduler import Limits, Scheduler
from kvbench.engine.shapes import find_shape
from kvbench.engine.types import Request
from kvbench.metrics.records import FINISHED, Run
from kvbench.metrics.slo import parse_slos
from kvbench.metrics.summary import summarise
from kvbench.paged.blocks import BlockPool
from kvbench.planner.catalog import find_card
from kvbench.planner.memory import Serving, plan_memory
from kvbench.planner.simulator import SimExecutor, StepCost
from kvbench.planner.steps import step_cost
from kvbench.planner.work import StepWork
from kvbench.workloads.arrivals import Arrivals
from kvbench.workloads.load import OpenLoop
from kvbench.workloads.streams import stream

SURE = 0.999
RUNS = 8


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    return Arrivals.of("poisson").schedule(rate, seed, count=count, duration_s=None)


def geometric(mean: float, count: int, seed: int) -> list[int]:
    """How many steps each service takes: exponential ones, rounded up to whole steps."""
    return [int(n) for n in stream(seed, "lengths").geometric(1 / mean, size=count)]


def served(cost: StepCost, requests: list[Request], allocator: Allocator, seats: int, batched: int = 2048) -> Run:
    limits = Limits(100_000, batched, seats)
    scheduler = Scheduler(allocator, limits, allocator if isinstance(allocator, BlockPool) else None)
    return serve(OpenLoop(requests), Engine(allocator, SimExecutor(cost), limits, scheduler=scheduler), VirtualClock())


def queue(seed: int, rate: float, answers: list[int], cost: Toy, seats: int) -> Run:
    times = arrivals(rate, len(answers), seed)
    asked = [Request(n, (1,), size, size, at_s) for n, (at_s, size) in enumerate(zip(times, answers, strict=True))]
    return served(cost, asked, make_pool("paged-16", seats * (max(answers) + 16), 100_000), seats)


def waits(run: Run, skip: int) -> list[float]:
    """Of those who came when the first `skip` had begun: an empty system is no sample of a busy one."""
    return [(one.admitted_s or 0.0) - one.scheduled_s for one in run.requests[skip:]]


def interval(means: list[float]) -> tuple[float, float]:
    half = float(student.ppf((1 + SURE) / 2, len(means) - 1)) * statistics.stdev(means) / math.sqrt(len(means))
    return statistics.mean(means) - half, statistics.mean(means) + half


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_one_seat_and_one_token_wait_as_in_m_d_1(load: float) -> None:
    """Wq = load D / (2 (1 - load)) (Pollaczek and Khinchine), and each wait is Lindley's: what the one before left."""
    service_s, count, skip = 0.5, 6_000, 1_000
    means = []
    for seed in range(RUNS):
        run = queue(seed, load / service_s, [1] * count, Toy(service_s), seats=1)
        waited = waits(run, 0)
        for (before, after), wait_s in zip(pairwise(run.requests), pairwise(waited), strict=True):
            gap_s = after.scheduled_s - before.scheduled_s
            assert wait_s[1] == pytest.approx(max(0.0, wait_s[0] + service_s - gap_s), abs=1e-8)
        means.append(statistics.mean(waits(run, skip)))
    low, high = interval(means)
    assert low <= load * service_s / (2 * (1 - load)) <= high


def erlang_c(servers: int, offered: float) -> float:
    """The chance to wait in M/M/k."""
    terms = [offered**n / math.factorial(n) for n in range(servers)]
    last = offered**servers / math.factorial(servers) / (1 - offered / servers)
    return last / (sum(terms) + last)


@pytest.mark.parametrize(("seats", "load", "mean_steps"), [(1, 0.6, 20), (3, 0.7, 40)])
def test_seats_and_exponential_answers_wait_as_in_m_m_k(seats: int, load: float, mean_steps: int) -> None:
    """Wq = C(k, a) / (k mu - lambda); steps are whole, so that nobody waits for more than one of them longer."""
    count, skip = 2_500, 500
    step_s = 1 / mean_steps
    rate = seats * load
    means = []
    for seed in range(RUNS):
        run = queue(seed, rate, geometric(mean_steps, count, seed), Toy(step_s), seats)
        assert max(step.running for step in run.steps) == seats
        means.append(statistics.mean(waits(run, skip)))
    theory_s = erlang_c(seats, rate) / (seats - rate)
    low, high = interval(means)
    assert low - step_s <= theory_s <= high


def test_littles_law_is_exact_by_two_accounts() -> None:
    """Who is in the system, by the records of steps, and how long each stayed, by the records of requests."""
    for seats, kind in ((1, "max"), (3, "paged-16")):
        answers = geometric(10, 400, 3)
        times = arrivals(1.2, len(answers), 3)
        asked = [Request(n, (1, 2), size, size, at) for n, (at, size) in enumerate(zip(times, answers, strict=True))]
        run = served(Toy(0.03, 0.001), asked, make_pool(kind, 20_000 * seats, 20_000), seats)
        starts = [step.start_s for step in run.steps]
        seen = [(step.running + step.waiting) * (step.end_s - step.start_s) for step in run.steps]
        unseen = []  # from when each came until the engine was there to see it
        at = 0
        for one in run.requests:
            while starts[at] < one.scheduled_s:
                at += 1
            unseen.append(starts[at] - one.scheduled_s)
        stays = [(one.last_s or math.nan) - one.scheduled_s for one in run.requests]
        assert math.fsum([*seen, *unseen]) == pytest.approx(math.fsum(stays), rel=1e-12)


def crowd(count: int, seed: int, rate: float, scale: float = 1.0) -> list[Request]:
    rng = stream(seed, "lengths")
    times = arrivals(rate, count, seed)
    sizes = zip(rng.integers(4, 120, count), rng.integers(1, 60, count), times, strict=True)
    return [
        Request(n, tuple(range(n, n + int(prompt))), 60, int(answer), at_s * scale)
        for n, (prompt, answer, at_s) in enumerate(sizes)
    ]


def filled(run: Run) -> int:
    """Rows that were filled in all stays in memory; the pieces of one stay follow each other."""
    ends: dict[int, int] = {}
    rows = 0
    for hold in sorted(run.holds, key=lambda hold: (hold.request, hold.first_step)):
        rows += hold.final_tokens if ends.get(hold.request) != hold.first_step else 0
        ends[hold.request] = hold.end_step
    return rows


POOLS: dict[str, Callable[[], Allocator]] = {
    "contiguous max": lambda: make_pool("max", 1024, 180),
    "contiguous declared": lambda: make_pool("declared", 1024, 180),
    "paged": lambda: BlockPool(1024, 16),
    "paged + swap": lambda: BlockPool(1024, 16, swap_tokens=4096),
    "paged + prefix cache": lambda: BlockPool(1024, 16, prefix_caching=True),
}


@pytest.mark.parametrize("name", POOLS)
def test_tokens_are_conserved(name: str) -> None:
    """Each answer has its tokens, each prompt and answer (but for its last token) is computed once, or found, or was
    computed before and given up; what went out came back."""
    asked = crowd(150, 1, 40.0)
    run = served(Toy(0.01, 1e-4), asked, POOLS[name](), 32)
    assert {one.status for one in run.requests} == {FINISHED}
    assert [one.output_tokens for one in run.requests] == [one.output_tokens for one in asked]
    made = sum(step.sampled_tokens for step in run.steps)
    assert made == sum(one.output_tokens for one in run.requests) == sum(len(one.token_s) for one in run.requests)
    assert sum(step.swapped_out_tokens for step in run.steps) == sum(step.swapped_in_tokens for step in run.steps)
    preempted = sum(one.preemptions for one in run.requests)
    assert bool(preempted) == name.startswith("paged"), "the pool is too small for all"
    computed = sum(step.prefill_tokens + step.decode_tokens for step in run.steps)
    once = sum(one.input_tokens + one.output_tokens - 1 - one.cached_tokens for one in run.requests)
    if name == "paged + swap":
        assert sum(one.swaps for one in run.requests) == preempted
    if name == "paged":
        assert computed == filled(run) > once
    elif name != "paged + prefix cache":  # which finds again what it had computed: more than the first time counts
        assert computed == once


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("factor", [4.0, 0.125])
def test_all_times_scale_together_and_nothing_else_changes(name: str, factor: float) -> None:
    """A power of two, so that floats scale exactly too."""
    base = served(Toy(0.01, 1e-4), crowd(120, 2, 40.0), POOLS[name](), 32)
    slow = served(Toy(0.01 * factor, 1e-4 * factor), crowd(120, 2, 40.0, factor), POOLS[name](), 32)
    assert slow.holds == base.holds
    for before, after in zip(base.requests, slow.requests, strict=True):
        assert after.token_s == [at_s * factor for at_s in before.token_s]
        assert after.admitted_s == before.admitted_s * factor if before.admitted_s is not None else True
    counts = {"prefill_tokens", "decode_tokens", "running", "waiting", "preemptions", "used_tokens", "free_tokens"}
    assert [[getattr(step, name) for name in counts] for step in base.steps] == [
        [getattr(step, name) for name in counts] for step in slow.steps
    ]


RATES = [2.0 ** (n / 4) for n in range(-4, 33)]
SLOS = parse_slos(["ttft:300", "tpot:40"])


def meets(cost: StepCost, pool_tokens: int, seats: int, rate: float) -> bool:
    rng = stream(5, "lengths")
    count = 60
    requests = [
        Request(n, tuple(range(n * 1000, n * 1000 + int(rng.integers(40, 600)))), 120, int(rng.integers(20, 120)), at_s)
        for n, at_s in enumerate(arrivals(rate, count, 5))
    ]
    run = served(cost, requests, BlockPool(pool_tokens, 16), seats)
    return summarise(run, slos=SLOS)["slo_met"] is True


def most(cost: StepCost, pool_tokens: int) -> float:
    """The largest of the rates at which the SLOs hold, with the seats that suit it best; 0 where none do."""
    best = 0.0
    for rate in RATES:
        if not any(meets(cost, pool_tokens, seats, rate) for seats in (8, 32, 128)):
            return best
        best = rate
    return best


def test_a_faster_card_or_more_memory_never_lowers_the_maximum_rate() -> None:
    toy = Toy(0.01, 2e-4)
    by_speed = [most(Toy(toy.base_s * k, toy.token_s * k), 20_000) for k in (1.0, 0.7, 0.4)]
    assert by_speed == sorted(by_speed) and 0 < by_speed[0] < by_speed[-1]
    by_memory = [most(Toy(0.02, 1e-5), pool) for pool in (2_000, 4_000, 10_000, 100_000)]
    assert by_memory == sorted(by_memory) and 0 < by_memory[0] < by_memory[-1]


def test_nor_does_a_better_card_of_the_catalogue() -> None:
    """Each of these has at least the bandwidth, the FLOP/s and the memory of the one before."""
    shape = find_shape("Llama-3.1-8B")
    assert shape is not None
    found = []
    for name in ("l4", "a100-40-sxm", "a100-80-sxm", "h100-sxm", "h200-sxm"):
        card = find_card(name)
        memory = plan_memory(shape, card, Serving())
        found.append(most(step_cost(card, shape, "bfloat16", 1).cost, memory.pool_tokens))
    assert found == sorted(found) and found[-1] > 2 * found[1] > 0, found


def test_cards_that_share_a_model_are_faster_and_have_more_room() -> None:
    shape, card = find_shape("Llama-3.1-8B"), find_card("h100-sxm")
    assert shape is not None
    one, two = (plan_memory(shape, card, replace(Serving(), tp=tp)).pool_tokens for tp in (1, 2))
    assert two > 2 * one
    work = StepWork(16, 0, 16_000, 16_000, 16)
    times = [step_cost(card, shape, "bfloat16", tp).cost.seconds(work) for tp in (1, 2, 4)]
    assert times == sorted(times, reverse=True)
