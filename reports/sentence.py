"""What a run found, in words: a headline, then what its seeds fix, then what its repeats prove.

Under a closed loop a seed fixes how many requests run at once; what the memory was used for is a mean over time and
repeats; only repeats can prove a speed. Headline and first sentences speak of the main contest, the reference (see
contests) against the first variant of another backend; then each thing that variants differ in has a clause.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvbench.metrics.points import LoadPoint
from kvbench.metrics.stats import WITHIN, Interval
from kvbench.reports.additions import further
from kvbench.reports.contests import LEVEL, PRIMARY, TELLING, Contest, able_variants, contests, focus, reference, room
from kvbench.reports.context import cells_failed, unfinished
from kvbench.reports.groups import Group, Results, Row, Variant
from kvbench.reports.searches import searches
from kvbench.reports.words import count, listing, number, percent, ratio_decimals, sentence_case, times

_COUNTS = ("requests_submitted", "requests_finished")

_LABELLED = ("headline", "fixed", "proven", "further")

_FEW = 3
"""So many variants are named one by one."""

_WHY = {"oom": "ran out of memory", "rejected": "rejected every request", "timeout": "ran out of time"}


@dataclass(frozen=True, slots=True)
class Finding:
    """`headline` is one sentence. `fixed`, `proven`, `further` and `caveat` are one or more, or empty. The first four
    are about numbers, so each begins with `label` where these were not measured."""

    headline: str
    fixed: str = ""
    proven: str = ""
    further: str = ""
    caveat: str = ""
    label: str = ""

    def labelled(self, label: str) -> Finding:
        """With `Simulated: ` before each part."""
        if not label:
            return self
        begin = f"{sentence_case(label)}: "
        told = {name: f"{begin}{part}" for name in _LABELLED if (part := getattr(self, name))}
        return replace(self, label=begin, **told)

    def __str__(self) -> str:
        """The closing words: what seeds fix first, the headline only where nothing else says it."""
        said = [self.fixed, self.proven] if self.proven else [self.headline, self.fixed]
        told = [part.removeprefix(self.label) for part in [*said, self.further] if part]
        return " ".join(filter(None, [self.label + " ".join(told), self.caveat]))


def find(results: Results, manifest: Row) -> Finding:
    """The finding of any run: also of one that measured nothing, or only one side of the comparison."""
    late = unfinished(results, manifest)
    if not results.rows:
        return Finding("Nothing was measured: the run ended before its first cell did.", caveat=late)
    if not results.ok:
        return Finding(f"Nothing could be measured: {cells_failed(results.rows)}.", caveat=late)
    able = able_variants(results)
    found = _alone(results, able) if len(able) < 2 else _compared(results, able)
    if sought := searches(manifest):
        found = Finding(sought[0], further=" ".join(sought[1:]))
    failed = f"{sentence_case(cells_failed(results.rows))}." if results.failed else ""
    caveat = " ".join(part for part in (_unanswered(results), failed, late) if part)
    return replace(found.labelled(results.label), caveat=caveat)


def _unanswered(results: Results) -> str:
    """`With paged, 6 of 8 requests got no whole answer.`: what a cell that is ok may hide; of many variants the
    worst."""
    missing: dict[str, tuple[int, int]] = {}
    for variant in results.variants:
        rows = [row for group in results.of_variant(variant) for row in group.ok]
        asked, done = (sum(int(row.get(name) or 0) for row in rows) for name in _COUNTS)
        if done < asked:
            missing[results.name(variant)] = asked - done, asked
    said = [
        f"With {name}, {n:,} of {count(asked, 'request')} got no whole answer." for name, (n, asked) in missing.items()
    ]
    if len(said) <= _FEW:
        return " ".join(said)
    worst = max(missing, key=lambda name: missing[name][0] / missing[name][1])
    n, asked = missing[worst]
    return f"With {len(missing)} variants requests got no whole answer, most with {worst}: {n:,} of {asked:,}."


def _alone(results: Results, able: Sequence[Variant]) -> Finding:
    """One variant ran at the middle context, or none did there."""
    if not able:
        where = results.middle_told or results.middle
        return Finding(f"No variant could run at {where}; shorter or longer requests are in the tables.")
    (variant,) = able
    name = sentence_case(results.name(variant))
    others = [other for other in results.variants if other != variant]
    best = max(
        (group for group in results.of_variant(variant, results.middle) if group.ok),
        key=lambda group: group.mean(PRIMARY).value or 0.0,
    )
    speed = best.mean(PRIMARY)
    rate = f"{number(speed.value, 1)} output tokens/s"
    headline = f"{name} gave up to {rate}, at {best.load}{_where(results)}."
    if others:
        absent = listing([_absent(results, other) for other in others])
        headline = f"Only {results.name(variant)} could run{_where(results)}; {absent}."
    load = focus(results)
    assert load is not None
    proven = f"{name} gave {rate} at {best.load} ({_range(speed)})."
    return Finding(headline, _fixed(results, load, [variant]), proven)


def _absent(results: Results, variant: Variant) -> str:
    """`contiguous ran out of memory in all 4 cells`."""
    rows = [row for group in results.of_variant(variant, results.middle) for row in group.failed]
    if not rows:
        return f"{results.name(variant)} has no cell there"
    (status, most), *_ = Counter(str(row.get("status")) for row in rows).most_common(1)
    cells = count(len(rows), "cell") if len(rows) == 1 else f"all {len(rows)} cells"
    how_many = cells if most == len(rows) else f"{most} of {count(len(rows), 'cell')}"
    return f"{results.name(variant)} {_WHY.get(status, 'failed')} in {how_many}"


def _range(speed: Interval) -> str:
    if speed.low is None:
        return "one repeat: how far it would vary is not known"
    if speed.over == WITHIN:
        return f"{percent(LEVEL)} interval within its one repeat {number(speed.low, 1)} to {number(speed.high, 1)}"
    return f"{percent(LEVEL)} interval {number(speed.low, 1)} to {number(speed.high, 1)}, {count(speed.n, 'repeat')}"


def _compared(results: Results, able: Sequence[Variant]) -> Finding:
    main = reference(able)
    others = [variant for variant in able if variant != main]
    rival = next((variant for variant in others if variant.backend != main.backend), others[0])
    load = focus(results)
    fixed = _fixed(results, load, [main, rival]) if load else ""
    return Finding(
        _headline(results, main, rival), fixed, _proof(results, main, rival), further(results, {main, rival})
    )


def _fixed(results: Results, load: LoadPoint, variants: Sequence[Variant]) -> str:
    """Running peak and what became of the memory: no interval needed, a seed fixes them."""
    groups = {results.name(variant): results.at(variant, load, results.middle) for variant in variants}
    running = [(name, _span(group)) for name, group in groups.items() if group.values("peak_running")]
    used, wasted = _shares(groups, "kv_utilisation_mean"), _shares(groups, "kv_fragmentation_mean")
    said = ""
    if running:
        (name, most), *others = running
        noun = "request" if results.middle.samples == 1 else "sample"
        at_once = [f"{name} ran {most} {noun}{'' if most == '1' else 's'} at once"]
        said = f"At {load}{_where(results)}, {', '.join(at_once + [' '.join(other) for other in others])}."
    if used:
        said += f" Of the KV memory, tokens filled {used} on average"
        said += f"; of what was held, {wasted} was wasted." if wasted else "."
    return said.strip()


def _shares(groups: dict[str, Group], column: str) -> str:
    """`81 % with paged and 24 % with contiguous`."""
    means = {name: group.mean(column).value for name, group in groups.items()}
    shares = [f"{percent(mean)} with {name}" for name, mean in means.items() if mean is not None]
    return listing(shares)


def _span(group: Group) -> str:
    """`16`, or `5 to 6` where the seeds differ."""
    values = [int(value) for value in group.values("peak_running")]
    low, high = min(values), max(values)
    return f"{high:,}" if low == high else f"{low:,} to {high:,}"


def _headline(results: Results, main: Variant, other: Variant) -> str:
    """The first case that fits, as the report's design lists them."""
    found = contests(results, main, other)
    names = {variant: results.name(variant) for variant in (main, other)}
    if not found:
        return f"{sentence_case(names[main])} and {names[other]} share no load at which both ran{_where(results)}."
    judged = [contest for contest in found if contest.effect.low is not None]
    where, failed = _where(results), _failed_here(results, main, other)
    if not judged:
        return _unrepeated(found[-1], names, where) + failed + "."
    proven = [contest for contest in judged if contest.proven]
    if not proven:
        pair = f"{names[main]} and {names[other]}"
        return f"No proven difference in output tokens/s between {pair}, {_loads(judged)}{where}{failed}."
    if len({contest.winner for contest in proven}) > 1:
        return _divided(proven, names) + f"{where}{failed}."
    best = max(proven, key=lambda contest: contest.effect.value or 0.0)
    much = f"{'up to ' if len(proven) > 1 else ''}{best.ratio}"
    subject = f"{names[best.winner]} gives {much} the output tokens/s of {names[best.loser]}"
    return sentence_case(_placed(judged, proven, subject)) + f"{where}{failed}."


def _unrepeated(contest: Contest, names: dict[Variant, str], where: str) -> str:
    """One repeat: what was seen, and that it is no proof."""
    if contest.ratio == times(1.0):
        pair = f"{sentence_case(names[contest.winner])} and {names[contest.loser]} were equally fast"
    else:
        pair = (
            f"{sentence_case(names[contest.winner])} gave {contest.ratio} the output tokens/s of {names[contest.loser]}"
        )
    return f"{pair} at {contest.load}{where}, but one repeat cannot prove it"


def _divided(proven: Sequence[Contest], names: dict[Variant, str]) -> str:
    """Each wins somewhere."""
    winners = [contest.winner for contest in proven]
    first, last = winners[0], winners[-1]
    turn = winners.index(last)
    if first != last and set(winners[turn:]) == {last}:
        early = max(proven[:turn], key=lambda contest: contest.effect.value or 0.0)
        late = max(proven[turn:], key=lambda contest: contest.effect.value or 0.0)
        return (
            f"Up to {proven[turn - 1].load} {names[first]} gives more output tokens/s ({early.ratio}), "
            f"from {proven[turn].load} on {names[last]} ({late.ratio})"
        )
    each = [f"{names[contest.winner]} at {contest.load} ({contest.ratio})" for contest in proven]
    return f"Which gives more output tokens/s depends on the load: {listing(each)}"


def _placed(judged: Sequence[Contest], proven: Sequence[Contest], subject: str) -> str:
    """At which of the loads the subject holds."""
    unproven = [contest for contest in judged if not contest.proven]
    if not unproven:
        return f"{subject} {'at every load measured, ' if len(judged) > 1 else ''}{_loads(judged)}"
    if len(judged) - len(proven) == judged.index(proven[0]):
        start = f"from {proven[0].load} on," if len(proven) > 1 else f"at {proven[0].load}"
        before = f"up to {unproven[-1].load}," if len(unproven) > 1 else f"at {unproven[0].load},"
        return f"{start} {subject}; {before} no proven difference"
    return f"{subject} at {listing([str(contest.load) for contest in proven])}; elsewhere no proven difference"


def _loads(found: Sequence[Contest]) -> str:
    first, last = found[0].load, found[-1].load
    return f"at {last}" if first == last else f"from {first.number} to {last}"


def _proof(results: Results, main: Variant, other: Variant) -> str:
    """What the repeats prove, at the largest load where they prove anything, or how large a difference they allow."""
    found = contests(results, main, other)
    judged = [contest for contest in found if contest.effect.low is not None]
    proven = [contest for contest in judged if contest.proven]
    if not found:
        return ""
    contest = (proven or found)[-1]
    winner, loser = results.name(contest.winner), results.name(contest.loser)
    start = f"At {contest.load}{_where(results)}, {winner} gave {contest.ratio} the output tokens/s of {loser}"
    if not judged:
        return f"{start}, but one repeat cannot prove it."
    pairs = count(min(contest.effect.n for contest in judged), "paired repeat")
    if not proven:
        pair = f"{results.name(main)} and {results.name(other)}"
        unproven = f"Between {pair} no difference in output tokens/s is proven"
        if max(room(contest.effect) for contest in judged) > TELLING:
            return f"{unproven}: the repeats differ too much ({pairs})."
        return f"{unproven}; if there is one, it is smaller than {_bounds(judged)} ({percent(LEVEL)} sure, {pairs})."
    decimals = ratio_decimals(contest.effect.low, contest.effect.high)
    low, high = number(contest.effect.low, decimals), number(contest.effect.high, decimals)
    pairs = count(contest.effect.n, "paired repeat")
    said = f"{start} ({percent(LEVEL)} interval {low} to {high}, {pairs})."
    last = judged[-1]
    if not last.proven:
        most = room(last.effect)
        bound = (
            f"if there is one, it is smaller than {_bound(most)}" if most <= TELLING else "the repeats differ too much"
        )
        said += f" At {last.load} no difference is proven; {bound}."
    return said


def _bounds(judged: Sequence[Contest]) -> str:
    """How large a difference the intervals leave room for: at each of a few loads, at any of many."""
    if len(judged) <= 3:
        return listing([f"{_bound(room(contest.effect))} at {contest.load}" for contest in judged])
    return f"{_bound(max(room(contest.effect) for contest in judged))} at each of the {len(judged)} loads"


def _bound(ratio: float) -> str:
    """A ratio as percent beyond 1, or as it is from 2 on, rounded up."""
    if ratio >= 2:
        return times(math.ceil(ratio * 10) / 10, 1)
    excess = max(ratio - 1, 0.001)
    return percent(math.ceil(excess * 1000) / 1000, 1) if excess < 0.1 else percent(math.ceil(excess * 100) / 100)


def _where(results: Results) -> str:
    """`, with 128 tokens in and 64 tokens out` where the run has several contexts."""
    return f", with {results.middle_told}" if results.middle_told else ""


def _failed_here(results: Results, *variants: Variant) -> str:
    groups = [group for variant in variants for group in results.of_variant(variant, results.middle)]
    failed, cells = sum(len(group.failed) for group in groups), sum(len(group.rows) for group in groups)
    return f" ({failed} of {count(cells, 'cell')} of this comparison failed)" if failed else ""
