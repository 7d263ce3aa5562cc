"""Two variants held against each other, load by load, and the load that shows best what tells them apart.

What is told is of the middle context of the grid. The reference is the first paged variant, where one took part. It is
held against every variant of another backend; and every variant against the first before it that is the same but for
one thing, which shows what that thing does. The one metric that is judged is output tokens/s, paired by seed. All
comparisons of a run, at every context, hold together at `LEVEL`: a grid of many loads and policies does not prove
something by having many chances (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.metrics.points import LoadPoint
from kvbench.metrics.stats import BETTER, UNPROVEN, Comparison, Interval
from kvbench.reports.groups import Results, Variant, compare
from kvbench.reports.words import ratio_decimals, times

PRIMARY = "output_tokens_per_s"
REFERENCE = "paged"
LEVEL = 0.95
TELLING = 3.0
"""A bound beyond this ratio says nothing about the variants, only that the repeats differ."""


@dataclass(frozen=True, slots=True)
class Contest:
    """Two variants at one load: how many times the `PRIMARY` of `loser` is that of `winner`, at least 1."""

    load: LoadPoint
    winner: Variant
    loser: Variant
    effect: Interval
    proven: bool

    @property
    def ratio(self) -> str:
        """`1.32 ×`."""
        assert self.effect.value is not None
        return times(self.effect.value, ratio_decimals(self.effect.value))


def reference(variants: Sequence[Variant]) -> Variant:
    """The variant the others are held against."""
    return next((variant for variant in variants if variant.backend == REFERENCE), variants[0])


def able_variants(results: Results) -> list[Variant]:
    """The variants that ran at the middle context at all."""
    return [variant for variant in results.variants if any(g.ok for g in results.of_variant(variant, results.middle))]


def focus(results: Results) -> LoadPoint | None:
    """The largest load at which all variants ran that ran at all: there they differ most. None if there is none."""
    able = able_variants(results)
    loads = results.shared_loads(able) if able else []
    return loads[-1] if loads else None


def pairs(results: Results) -> list[tuple[Variant, Variant]]:
    """Every variant with those it is held against: the reference, and the one that differs in one thing."""
    able = able_variants(results)
    found = []
    for place, variant in enumerate(able):
        main = reference(able)
        siblings = (other for other in able[:place] if other.backend == variant.backend)
        base = next((other for other in siblings if len(variant.differs(other)) == 1), None)
        if variant.backend != main.backend:
            found.append((variant, main))
        if base is not None or (variant.backend == main.backend and variant != main):
            found.append((variant, base or main))
    return found


def level(results: Results) -> float:
    """Of each interval, so that those of all pairs at every load and context both ran at hold together at `LEVEL`."""
    return level_of(sum(len(results.shared_points(pair)) for pair in pairs(results)))


def level_of(count: int) -> float:
    """Of each of so many intervals that hold together at `LEVEL`."""
    return 1 - (1 - LEVEL) / max(1, count)


def contests(results: Results, variant: Variant, other: Variant) -> list[Contest]:
    """Both variants at every load at which a pair of repeats can be compared."""
    found, each = [], level(results)
    for load in results.shared_loads([variant, other]):
        pair = results.at(other, load, results.middle), results.at(variant, load, results.middle)
        contest = _contest(load, variant, other, compare(*pair, PRIMARY, level=each))
        if contest:
            found.append(contest)
    return found


def _contest(load: LoadPoint, a: Variant, b: Variant, comparison: Comparison) -> Contest | None:
    effect, proven = comparison.effect, comparison.verdict != UNPROVEN
    if effect.value is None:
        return None
    if comparison.verdict == BETTER or (not proven and effect.value >= 1):
        return Contest(load, a, b, effect, proven)
    low, high = (None if bound is None else 1 / bound for bound in (effect.high, effect.low))
    return Contest(load, b, a, Interval(1 / effect.value, low, high, effect.n, effect.dropped), proven)


def room(effect: Interval) -> float:
    """The largest ratio in the interval, whichever of the two is ahead."""
    assert effect.low and effect.high
    return max(effect.high, 1 / effect.low)
