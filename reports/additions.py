"""What the variants beyond the main contest show: a clause for each thing in which they differ, however many there are.

Two variants that differ in one thing show what it does to output tokens/s. Of several such pairs the first speaks, the
others are in the page's table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from itertools import groupby

from kvbench.metrics.points import LoadPoint
from kvbench.metrics.stats import UNPROVEN, Comparison
from kvbench.reports.contests import LEVEL, PRIMARY, TELLING, level, pairs, room
from kvbench.reports.groups import Results, Variant, compare
from kvbench.reports.words import count, listing, number, percent, ratio_decimals, ratio_end, times

_SWITCHES = {"batching": "static batching", "prefix_caching": "the prefix cache", "preemption": "swapping"}
"""Fields with two values, by what the other than the default does."""

Pair = tuple[Variant, Variant]


def further(results: Results, main: Collection[Variant]) -> str:
    """`At 16 users, the prefix cache gave 1.70 × [1.50–1.90] the output tokens/s of paged without it.` Nothing of the
    `main` contest, which has been spoken of; empty where nothing else was compared."""
    rest = [pair for pair in pairs(results) if set(pair) != set(main)]
    clauses: list[tuple[LoadPoint, str]] = []
    told = 0
    for of_field in _by_field(rest).values():
        load, compared = _where_it_shows(results, of_field)
        if load is not None:
            clauses.append((load, _clause(results, compared)))
            told += len(compared)
    clauses.sort(key=lambda clause: clause[0].size)
    said = [
        f"At {load}, {'; '.join(clause for _, clause in of_load)}."
        for load, of_load in groupby(clauses, key=lambda clause: clause[0])
    ]
    if any("[" in clause for _, clause in clauses):
        said.append(f"In brackets: {percent(LEVEL)} intervals.")
    if told < len(rest):
        said.append(f"{count(len(rest) - told, 'more comparison')} in the report.")
    return " ".join(said)


def _by_field(found: Sequence[Pair]) -> dict[str, list[Pair]]:
    """Of the pairs that differ in one field, by that field: all with the base of the first."""
    of_each: dict[str, list[Pair]] = {field.name: [] for field in fields(Variant)}
    for variant, other in found:
        if len(differing := variant.differs(other)) == 1:
            extra, plain = _oriented(differing[0], variant, other)
            of_field = of_each[differing[0]]
            if not of_field or of_field[0][1] == plain:
                of_field.append((extra, plain))
    return {name: of_field for name, of_field in of_each.items() if of_field}


def _oriented(field: str, variant: Variant, other: Variant) -> Pair:
    """The variant that has a switch on first, whichever was asked for first."""
    on = getattr(other, field) != getattr(Variant(""), field)
    return (other, variant) if field in _SWITCHES and on else (variant, other)


def _where_it_shows(results: Results, found: Sequence[Pair]) -> tuple[LoadPoint | None, dict[Pair, Comparison]]:
    """The largest load at which any of the pairs is told apart, else the largest all ran at; perhaps none."""
    best: tuple[LoadPoint | None, dict[Pair, Comparison]] = None, {}
    for load in results.shared_loads({variant for pair in found for variant in pair}):
        each = {pair: _compare(results, pair, load) for pair in found}
        compared = {pair: one for pair, one in each.items() if one.effect.value is not None}
        proven, before = (any(one.verdict != UNPROVEN for one in of.values()) for of in (compared, best[1]))
        if compared and (proven or not before):
            best = load, compared
    return best


def _compare(results: Results, pair: Pair, load: LoadPoint) -> Comparison:
    """How many times the speed of the second is that of the first."""
    extra, plain = (results.at(variant, load, results.middle) for variant in pair)
    return compare(plain, extra, PRIMARY, level=level(results))


def _clause(results: Results, compared: Mapping[Pair, Comparison]) -> str:
    """What each does to the one that all are held against."""
    (first, base), *_ = compared
    (field,) = first.differs(base)
    without = f"{results.name(base)} without it" if field in _SWITCHES else results.name(base)
    names = {pair: _SWITCHES.get(field, results.name(pair[0])) for pair in compared}
    proven = {names[pair]: one for pair, one in compared.items() if one.verdict != UNPROVEN}
    once = {names[pair]: one for pair, one in compared.items() if one.effect.low is None}
    alike = {name: one for pair, one in compared.items() if (name := names[pair]) not in proven | once}
    said = []
    if proven:
        said.append(_gave(proven, without))
    if alike:
        telling = all(room(one.effect) <= TELLING for one in alike.values())
        seen = ", ".join(_effect(one) for one in alike.values()) if telling else "the repeats differ too much"
        said.append(f"{listing(list(alike))} made no proven difference to {results.name(base)} ({seen})")
    if once:
        said.append(f"{_gave(once, without)}, but one repeat cannot prove it")
    return ", ".join(said)


def _gave(compared: Mapping[str, Comparison], base: str) -> str:
    """`a gave 1.20 × [1.10–1.30] and b 1.30 × [1.20–1.40] the output tokens/s of c`."""
    (name, first), *others = compared.items()
    each = [f"{name} gave {_effect(first)}", *(f"{name} {_effect(one)}" for name, one in others)]
    return f"{listing(each)} the output tokens/s of {base}"


def _effect(comparison: Comparison) -> str:
    """`1.70 × [1.50–1.90]`; without an interval where one repeat has none."""
    effect = comparison.effect
    assert effect.value is not None
    if effect.low is None or effect.high is None:
        return times(effect.value, ratio_decimals(effect.value))
    decimals = ratio_decimals(effect.low, effect.high)
    return f"{times(effect.value, decimals)} [{number(effect.low, decimals)}–{ratio_end(effect.high, decimals)}]"
