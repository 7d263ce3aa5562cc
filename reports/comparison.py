"""`kvbench compare`: the same points of two runs, or two variants of one, held against each other metric by metric.

Cells are paired by point of the grid and by seed. One metric, the primary, is judged alone, its intervals at all points
holding together at `LEVEL` as in the report (see contests); all others at all points are one family, corrected after
Holm.
Interval and verdict are one thing: an interval is as wide as its verdict is careful.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.errors import KvbenchError
from kvbench.metrics.points import Context, LoadPoint
from kvbench.metrics.stats import WORSE, Comparison, holm_levels, paired_difference, paired_ratio
from kvbench.metrics.store import RunFolder
from kvbench.reports.contests import LEVEL, PRIMARY, level, level_of, pairs
from kvbench.reports.groups import Group, Results, Row, one_window, paired
from kvbench.reports.words import count, listing


@dataclass(frozen=True, slots=True)
class Metric:
    """What is judged: a column of `cells.csv`. Its effect is a ratio, or a `difference` where it may be 0; it is shown
    times `scale` with `decimals`, in `unit`."""

    key: str
    head: str
    higher_is_better: bool
    difference: bool = False
    unit: str = ""
    scale: float = 1.0
    decimals: int = 1


METRICS = (
    Metric(PRIMARY, "out tok/s", True),
    Metric("requests_per_s", "requests/s", True, decimals=2),
    Metric("goodput_per_s", "good requests/s", True, difference=True, decimals=2),
    Metric("attainment", "in time", True, difference=True, unit="%", scale=100),
    Metric("ttft_p50_s", "TTFT p50", False, unit="ms", scale=1e3),
    Metric("ttft_p99_s", "TTFT p99", False, unit="ms", scale=1e3),
    Metric("tpot_p50_s", "TPOT p50", False, unit="ms", scale=1e3),
    Metric("tpot_p99_s", "TPOT p99", False, unit="ms", scale=1e3),
    Metric("e2e_p50_s", "E2E p50", False, unit="ms", scale=1e3),
    Metric("e2e_p99_s", "E2E p99", False, unit="ms", scale=1e3),
    Metric("kv_fragmentation_mean", "KV wasted", False, difference=True, unit="%", scale=100),
    Metric("preemptions", "preempted", False, difference=True),
)
"""All that is judged, whichever is the primary one: a fixed family, so that nobody can choose it by its results. What
is neither good nor bad in itself, such as how full the KV memory is, is not in it."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of two runs: what it is called, its cells' rows, and the cells that it planned."""

    name: str
    rows: Sequence[Row]
    planned: Sequence[object] = ()


@dataclass(frozen=True, slots=True)
class Match:
    """`new` against `base` at one point; both groups have repeats that ran under the same seeds. `base_name` and
    `new_name` tell them apart."""

    base: Group
    new: Group
    base_name: str
    new_name: str

    @property
    def load(self) -> LoadPoint:
        return self.base.load

    @property
    def context(self) -> Context:
        return self.base.context

    @property
    def window(self) -> str:
        return str(next((row.get("window") for row in self.base.ok), None) or "total")


@dataclass(frozen=True, slots=True)
class Judged:
    """A metric of a match: what both had on average over the pairs, the effect, and at which level it was judged."""

    match: Match
    metric: Metric
    primary: bool
    base: float | None
    new: float | None
    comparison: Comparison
    level: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """All verdicts, the primary metric's first. `notes` name what has no counterpart and takes no part."""

    judged: tuple[Judged, ...]
    notes: tuple[str, ...]

    @property
    def regressions(self) -> tuple[Judged, ...]:
        return tuple(one for one in self.judged if one.comparison.verdict == WORSE)


def find_metric(name: str) -> Metric:
    """The metric of that name; KvbenchError with the nearest where there is none."""
    known = {metric.key: metric for metric in METRICS}
    if name.strip().lower() in known:
        return known[name.strip().lower()]
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
    raise KvbenchError(f"--metric {name!r} is no metric that can be compared; {hint}")


def compare_variants(results: Results, name: str, primary: Metric) -> Outcome:
    """The variants of one run: the reference (see contests) against those of other backends, and every further variant
    against the one it adds something to. KvbenchError where the run, called `name`, has no two that can be paired."""
    if len(results.variants) < 2:
        only = f" ({results.name(results.variants[0])})" if results.variants else ""
        raise KvbenchError(f"{name} has {count(len(results.variants), 'variant')}{only}; name a second run to compare")
    found = []
    for variant, other in pairs(results):
        base, new = (variant, other) if variant.backend != other.backend else (other, variant)
        found += [
            Match(results.at(base, *point), results.at(new, *point), results.name(base), results.name(new))
            for point in results.shared_points([base, new])
        ]
    if not found:
        raise KvbenchError(f"no two variants of {name} ran at the same load and context; nothing can be paired")
    _refuse_unpaired(found, f"two variants of {name}")
    return _judge(found, primary, level(results), _failed({name: results}))


def compare_folders(base: RunFolder, new: RunFolder, primary: Metric) -> Outcome:
    """As `compare_runs`; each is called by its folder's name, or by its path where those are the same."""
    names = [folder.path.resolve().name for folder in (base, new)]
    if names[0] == names[1]:
        names = [str(folder.path) for folder in (base, new)]
    first, second = (Side(n, f.rows(), f.manifest.get("cells") or ()) for n, f in zip(names, (base, new), strict=True))
    return compare_runs(first, second, primary)


def compare_runs(base: Side, new: Side, primary: Metric) -> Outcome:
    """Each variant of `new` against the same of `base`, at every load and context both have. KvbenchError where nothing
    can be paired."""
    rows = one_window([*base.rows, *new.rows])  # no steady window against a total one
    split = rows[: len(base.rows)], rows[len(base.rows) :]
    both = {side.name: Results.of_rows(part, side.planned) for side, part in zip((base, new), split, strict=True)}
    for name, results in both.items():
        if not results.ok:
            raise KvbenchError(f"{name} has no cell that ran; nothing can be paired")
    mine, theirs = ({(g.variant, g.load, g.context): g for g in results.groups if g.ok} for results in both.values())
    found = [
        Match(group, theirs[point], *(f"{both[base.name].name(point[0])} of {name}" for name in both))
        for point, group in mine.items()
        if point in theirs
    ]
    if not found:
        unlike = _unlike(*both.values())
        raise KvbenchError(f"{base.name} and {new.name} have no point in common: {unlike}; nothing can be paired")
    _refuse_unpaired(found, f"{base.name} and {new.name}")
    alone = [
        f"{count(n, 'point')} of {name} without a counterpart"
        for name, n in ((base.name, len(mine.keys() - theirs)), (new.name, len(theirs.keys() - mine)))
        if n
    ]
    return _judge(found, primary, level_of(len(found)), alone + _failed(both))


def _refuse_unpaired(found: Sequence[Match], what: str) -> None:
    """KvbenchError where no point has a seed on both sides."""
    if any(paired(match.base, match.new, PRIMARY)[0] for match in found):
        return
    seeds = [
        ", ".join(map(str, sorted({row.get("seed") for match in found for row in getattr(match, side).ok}, key=str)))
        for side in ("base", "new")
    ]
    raise KvbenchError(
        f"{what} have no seed in common ({seeds[0]} against {seeds[1]}); measure both with the same --seed"
    )


def _unlike(a: Results, b: Results) -> str:
    """In what two runs without a common point differ."""
    sides = {
        "variants": [{str(v) for v in results.variants} for results in (a, b)],
        "loads": [{str(load) for load in results.loads} for results in (a, b)],
        "contexts": [{str(context) for context in results.contexts} for results in (a, b)],
    }
    for noun, (mine, theirs) in sides.items():
        if not mine & theirs:
            return f"the {noun} are {listing(sorted(mine))} against {listing(sorted(theirs))}"
    return "no variant ran at the same load and context in both"


def _failed(runs: dict[str, Results]) -> list[str]:
    return [
        f"{len(results.failed)} of {count(len(results.rows), 'cell')} of {name} did not run to their end"
        for name, results in runs.items()
        if results.failed
    ]


def _judge(found: Sequence[Match], primary: Metric, primary_level: float, notes: Sequence[str]) -> Outcome:
    others = [(match, metric) for metric in METRICS if metric != primary for match in found]
    p_values = [_compare(match, metric, LEVEL).p for match, metric in others]
    levels = holm_levels(p_values, LEVEL)
    judged = [
        *(_judged(match, primary, primary_level, primary=True) for match in found),
        *(_judged(match, metric, each) for (match, metric), each in zip(others, levels, strict=True)),
    ]
    single = sum(
        len(group.ok) - len(paired(match.base, match.new, PRIMARY)[0])
        for match in found
        for group in (match.base, match.new)
    )
    apart = [f"{count(single, 'repeat')} without one of the same seed on the other side"] if single else []
    return Outcome(tuple(judged), (*notes, *apart))


def _judged(match: Match, metric: Metric, each: float, *, primary: bool = False) -> Judged:
    base, new = (_mean(values) for values in paired(match.base, match.new, metric.key))
    return Judged(match, metric, primary, base, new, _compare(match, metric, each), each)


def _compare(match: Match, metric: Metric, each: float) -> Comparison:
    test = paired_difference if metric.difference else paired_ratio
    return test(*paired(match.base, match.new, metric.key), higher_is_better=metric.higher_is_better, level=each)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
