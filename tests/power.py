"""How often `compare`, intervals and the change-point detector are right, on made-up numbers whose truth is known.

`python tests/power.py` prints the tables of docs/statistics.md; the tests hold the numbers the project promises.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from numpy.random import Generator, default_rng

from kvbench.metrics.batches import rate_interval
from kvbench.metrics.change import settled_from
from kvbench.metrics.precision import FEWEST_REPEATS, wide
from kvbench.metrics.stats import UNPROVEN, WORSE, mean_interval
from kvbench.reports.comparison import METRICS, Judged, Metric, Outcome, Side, compare_runs, find_metric
from kvbench.reports.contests import PRIMARY

Cell = dict[str, object]
NOISE = 0.05


def made_up(name: str, seeds: dict[int, float], rng: Generator, slower: float = 0.0, of: str = "") -> Side:
    """A run of one point with a repeat for each seed, its rows in shuffled order.

    What a seed asks moves every metric by its own factor, the same in every run; on top each has noise of its own.
    Where `of` names a metric it is by `slower` worse, or all are where it is empty.
    """
    rows: list[Cell] = []
    for repeat, (seed, effort) in enumerate(seeds.items()):
        row: Cell = {"backend": "paged", "concurrency": 16, "repeat": repeat, "seed": seed, "status": "ok"}
        for metric in METRICS:
            factor = effort * math.exp(NOISE * rng.standard_normal())
            if of in ("", metric.key):
                factor *= 1 - slower if metric.higher_is_better else 1 / (1 - slower)
            row[metric.key] = (0.5 if metric.difference else 100.0) * factor
        rows.append(row)
    rng.shuffle(rows)
    return Side(name, rows)


def comparison(seed: int, pairs: int, slower: float = 0.0, of: str = "") -> Outcome:
    """Two runs under the same seeds, which differ by half among themselves; the second is `slower`."""
    rng = default_rng(seed)
    seeds = {int(one): float(math.exp(0.4 * rng.standard_normal())) for one in rng.permutation(1000)[:pairs]}
    return compare_runs(made_up("a", seeds, rng), made_up("b", seeds, rng, slower, of), find_metric(PRIMARY))


def primary(outcome: Outcome) -> Judged:
    return next(one for one in outcome.judged if one.primary)


def different(first_seed: int, comparisons: int, pairs: int) -> tuple[int, int]:
    """Of A/A comparisons: in how many the primary metric, and in how many any other, is said to differ."""
    found: Counter[bool] = Counter()
    for seed in range(first_seed, first_seed + comparisons):
        said = {one.primary for one in comparison(seed, pairs).judged if one.comparison.verdict != UNPROVEN}
        found.update(said)
    return found[True], found[False]


def detected(first_seed: int, comparisons: int, pairs: int, slower: float, metric: Metric) -> int:
    """In how many comparisons a planted slowdown of this one metric is found."""
    return sum(
        any(
            one.metric == metric and one.comparison.verdict == WORSE
            for one in comparison(seed, pairs, slower, metric.key).judged
        )
        for seed in range(first_seed, first_seed + comparisons)
    )


def until(first_seed: int, runs: int, fewest: int, share: float, noise: float) -> tuple[float, float]:
    """Repeats are added until the interval is within `share` of the mean: how often it holds the truth then, and how
    many repeats that took on average."""
    covered = took = 0
    for seed in range(first_seed, first_seed + runs):
        rng = default_rng(seed)
        values = rng.normal(1.0, noise, fewest).tolist()
        while wide(mean_interval(values), share):
            values.append(float(rng.normal(1.0, noise)))
        interval = mean_interval(values)
        assert interval.low is not None and interval.high is not None
        covered += interval.low <= 1.0 <= interval.high
        took += len(values)
    return covered / runs, took / runs


def autoregressive(rng: Generator, phi: float, n: int) -> list[float]:
    """Values of variance 1 of which neighbours have the correlation `phi`."""
    values = [rng.standard_normal()]
    while len(values) < n:
        values.append(phi * values[-1] + math.sqrt(1 - phi * phi) * rng.standard_normal())
    return values


def alarms(seed: int, series: int, phi: float) -> float:
    """The share of series without a change in which the detector finds one."""
    rng = default_rng(seed)
    return sum(settled_from(autoregressive(rng, phi, 32)) > 0 for _ in range(series)) / series


def coverage(seed: int, runs: int, phi: float) -> tuple[float, float]:
    """Of runs of 1,000 s at 5 events/s, with a rate whose seconds have the correlation `phi`: the share that gives an
    interval, and of these the share that holds the rate."""
    rng = default_rng(seed)
    given = covered = 0
    for _ in range(runs):
        rates = [max(0.0, 5 + (1.5 * x if phi else 0.0)) for x in autoregressive(rng, phi, 1000)]
        at_s = [second + 0.5 for second, n in enumerate(rng.poisson(rates).tolist()) for _ in range(n)]
        found = rate_interval(at_s, 0.0, 1000.0)
        if found is not None and found.low is not None and found.high is not None:
            given += 1
            covered += found.low <= 5 <= found.high
    return given / runs, covered / max(1, given)


def tables() -> Iterator[str]:
    """The tables of docs/statistics.md."""
    other = find_metric("ttft_p99_s")
    yield from ("| pairs | A/A of 200: primary different | any other different |", "| ---: | ---: | ---: |")
    yield from (f"| {n} | {a} | {b} |" for n in (5, 10, 20) for a, b in [different(0, 200, n)])
    yield ""
    yield from ("| pairs | slowdown | found as primary | found as one of the others |", "| ---: | ---: | ---: | ---: |")
    for n in (5, 10, 20):
        for slower in (0.03, 0.05, 0.1):
            found = [detected(1000, 200, n, slower, metric) / 2 for metric in (find_metric(PRIMARY), other)]
            yield f"| {n} | {slower:.0%} | {found[0]:.1f} % | {found[1]:.1f} % |"
    yield ""
    yield from (
        "| at least | noise | `--until-ci` | holds the truth | repeats |",
        "| ---: | ---: | ---: | ---: | ---: |",
    )
    for fewest in (2, 3, 5, FEWEST_REPEATS, 10):
        for noise, share in ((0.05, 0.05), (0.1, 0.05), (0.05, 0.02)):
            held, took = until(0, 2000, fewest, share, noise)
            yield f"| {fewest} | {noise:.0%} | {share:.0%} | {held:.1%} | {took:.1f} |"
    yield ""
    yield from ("| correlation of neighbours | detector's false alarms |", "| ---: | ---: |")
    yield from (f"| {phi} | {alarms(1, 1000, phi):.1%} |" for phi in (0.0, 0.2, 0.4, 0.6))
    yield ""
    yield from ("| correlation lasts | batch means give an interval | that holds the rate |", "| ---: | ---: | ---: |")
    for phi, lasts in ((0.0, "0"), (0.9, "1 % of the run"), (0.97, "3 %"), (0.99, "10 %")):
        given, held = coverage(1, 400, phi)
        yield f"| {lasts} | {given:.0%} | {held:.1%} |"


if __name__ == "__main__":
    for line in tables():
        print(line, flush=True)
