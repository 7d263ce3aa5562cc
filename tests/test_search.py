"""The search for the largest load that passes, on servers whose limit is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from fakes import make_pool, request, serve_on
from numpy.random import default_rng

from kvbench.engine.scheduler import Limits
from kvbench.metrics.points import LoadPoint
from kvbench.metrics.slo import Slo
from kvbench.metrics.summary import summarise
from kvbench.workloads.load import ClosedLoop
from kvbench.workloads.search import BUDGET, RETESTS, RETESTS_PASSED, TOLERANCE, Range, Trial, search

RATES = Range(1.0, 0.01, 10_000.0)
USERS = Range(4.0, 1.0, 4096.0, whole=True)


def sharp(limit: float) -> Callable[[float, int], bool]:
    return lambda load, _: load <= limit


@pytest.mark.parametrize("limit", [0.037, 0.9, 1.0, 3.3, 47.0, 800.0])
def test_a_sharp_limit_is_found(limit: float) -> None:
    found = search(sharp(limit), RATES)
    assert found.low is not None and found.high is not None and found.answer is not None
    assert found.low <= limit <= found.high <= found.low * (1 + TOLERANCE) + 1e-9
    assert limit / (1 + TOLERANCE) <= found.answer <= limit
    assert (found.why, found.retested, found.warnings) == ("the interval is narrow", RETESTS, ())
    assert len(found.trials) < BUDGET


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 16, 100])
def test_whole_numbers_of_users(limit: int) -> None:
    found = search(sharp(limit), USERS)
    assert found.answer is not None and all(trial.load == int(trial.load) for trial in found.trials)
    assert found.answer == limit if limit < 10 else limit / (1 + TOLERANCE) - 1 <= found.answer <= limit


def test_every_probe_has_a_seed_of_its_own_and_the_answer_fresh_ones() -> None:
    found = search(sharp(5.0), RATES, seed=30)
    assert [trial.seed for trial in found.trials] == list(range(30, 30 + len(found.trials)))
    at_answer = [trial for trial in found.trials if trial.load == found.answer]
    assert len(at_answer) >= RETESTS
    assert found.trials[-1] == Trial(RATES.nearest((found.answer or 0) / 2), found.trials[-1].seed, True)


@pytest.mark.parametrize("wrong", range(16))
def test_one_run_that_lies_moves_no_answer(wrong: int) -> None:
    """The limit is 5, and the run of this number says the contrary."""
    found = search(lambda load, seed: (load <= 5) != (seed == wrong), RATES, budget=80)
    assert found.low is not None and found.high is not None
    assert found.low * 0.97 <= 5 <= found.high * 1.03
    assert found.answer is not None and 5 / 1.15 <= found.answer <= 5


def mm1(rate: float, seed: int, requests: int = 4000, service_rate: float = 10.0) -> list[float]:
    """Sojourn times of a queue with one server, by Lindley's recursion, from its stationary state on."""
    rng = default_rng([seed, round(rate * 1000)])
    gaps, services = rng.exponential(1 / rate, requests), rng.exponential(1 / service_rate, requests)
    waited = rng.exponential(1 / (service_rate - rate)) if rng.random() < rate / service_rate else 0.0
    times = []
    for gap, service in zip(gaps, services, strict=True):
        times.append(waited + service)
        waited = max(0.0, waited + service - gap)
    return times


def test_the_interval_holds_the_limit_of_a_queue_that_theory_knows() -> None:
    """M/M/1 at 10/s: sojourn times are exponential of rate 10 - λ, so p90 <= 1 s up to λ = 10 - ln 10 = 7.697. Of 20
    intervals at 95 %, five misses or more have a probability of 0.3 %."""
    limit, held, answers = 10 - math.log(10), 0, []
    for seed in range(20):
        found = search(
            lambda rate, at: rate < 10 and float(np.percentile(mm1(rate, at), 90)) <= 1.0, RATES, seed=1000 * seed
        )
        assert found.low is not None and found.high is not None
        held += found.low <= limit <= found.high
        answers.append(found.answer)
    assert held >= 16
    confirmed = [answer for answer in answers if answer is not None]
    assert len(confirmed) >= 15 and max(confirmed) < limit * 1.05 and min(confirmed) > limit * 0.8


def test_users_of_our_own_engine_against_every_number_of_them() -> None:
    """On virtual time a seed fixes everything: TTFT grows with the users that share the steps."""

    def passes(users: float, seed: int) -> bool:
        tokens = default_rng(seed).integers(8, 24, int(users) * 6).tolist()
        load = ClosedLoop([request(i, 16, n) for i, n in enumerate(tokens)], int(users))
        run = serve_on(make_pool("paged-16", 8192, 64), load, Limits(64, 64, 256)).run
        row = summarise(run, load=LoadPoint(concurrency=int(users)), slos=[Slo("tpot", 0.012, 90)])
        return bool(row["slo_met"])

    scanned = [sum(passes(users, seed) for seed in range(5)) for users in range(1, 25)]
    limit = max(users for users, passed in enumerate(scanned, 1) if passed >= 3)
    assert 5 < limit < 20 and min(scanned) == 0
    found = search(passes, USERS, seed=100)
    assert found.answer is not None and abs(found.answer - limit) <= max(1, 0.1 * limit)


def test_a_limit_beyond_what_may_be_asked_is_said() -> None:
    found = search(lambda load, _: True, Range(1.0, 0.5, 16.0))
    assert (found.answer, found.low, found.high, found.retested) == (16.0, None, None, 5)
    assert found.why == "the largest load that may be asked, 16, passes"
    found = search(lambda load, _: False, USERS)
    assert (found.answer, found.why) == (None, "even 1 fails")


@pytest.mark.parametrize("budget", [1, 2, 5, 7, 12, 15])
def test_the_budget_is_kept(budget: int) -> None:
    """What is left of it tests the lower end again: an answer, if a poor one, or none."""
    found = search(sharp(5.0), RATES, budget=budget)
    assert len(found.trials) <= budget
    assert found.why.startswith(f"{budget} runs were not enough")
    assert found.answer is None if budget < 9 else 2 < (found.answer or 0) <= 5
    assert search(lambda load, seed: seed % 2 == 0, RATES, budget=budget).answer is None


def test_what_is_not_monotone_is_said() -> None:
    """Passing from 8 to 20 only: half the answer is probed last, and fails. With one limit nothing is said."""
    found = search(lambda load, _: 8 <= load <= 20, Range(16.0, 0.01, 1000.0))
    assert found.answer is not None and found.answer > 16
    assert search(sharp(20), Range(16.0, 0.01, 1000.0)).warnings == ()
    hole = search(lambda load, _: load <= 20 and not 3 <= load <= 6, Range(4.0, 0.01, 1000.0))
    assert hole.answer is not None and hole.answer <= 3, "it fails where it begins, so it looks below"
    narrow = search(lambda load, _: 12 <= load <= 20, Range(16.0, 0.01, 1000.0))
    (warning,) = narrow.warnings
    assert warning.startswith("not monotone: it fails at 9.") and "(0 of 1 passed) but passes at " in warning


def test_the_largest_load_that_may_be_asked_has_to_pass_again_too() -> None:
    found = search(lambda load, seed: seed < 5, Range(1.0, 0.5, 16.0))
    assert (found.answer, found.retested) == (None, 0)
    assert found.why == "the largest load that may be asked, 16, did not pass again"


def test_an_answer_that_does_not_pass_again_is_none() -> None:
    """Every load passes once in its life."""
    seen: set[float] = set()

    def probe(load: float, seed: int) -> bool:
        first = load not in seen
        seen.add(load)
        return first and load <= 3

    found = search(probe, RATES)
    assert found.answer is None and found.retested < RETESTS_PASSED
