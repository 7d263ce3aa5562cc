"""A comparison as text: a table or markdown for people, csv or json with every number for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby

from kvbench.metrics.records import MEASURED
from kvbench.metrics.stats import UNPROVEN
from kvbench.reports.comparison import Judged, Match, Outcome
from kvbench.reports.contests import LEVEL
from kvbench.reports.groups import Group
from kvbench.reports.tables import Value, to_csv
from kvbench.reports.words import count, number, percent, ratio_decimals, ratio_end, sentence_case

HEADS = ("metric", "base", "new", "effect", "interval", "verdict")
NEEDS_TWO = "needs two repeats"


def render(outcome: Outcome, fmt: str, differences: Sequence[str]) -> str:
    """In one of the formats, ending in a newline. csv and json also name the `differences`, in which the runs are not
    alike."""
    if fmt == "csv":
        return to_csv(records(outcome, differences))
    if fmt == "json":
        return json.dumps(records(outcome, differences), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    blocks = [
        (_title(match), [_line(one) for one in of_match])
        for match, of_match in groupby(_by_match(outcome), key=lambda one: one.match)
    ]
    parts = [_markdown(*block) if fmt == "markdown" else _text(*block) for block in blocks]
    return "\n".join(parts)


def conclusion(outcome: Outcome) -> str:
    """`out tok/s: worse at 1 of 2 points. Of 12 other metrics …: 3 better, 1 worse.`"""
    primary = [one for one in outcome.judged if one.primary]
    said = f"{primary[0].metric.head}, the primary metric: {_tally(primary)}"
    kinds = {group.evidence for one in outcome.judged for group in (one.match.base, one.match.new)}
    label = "" if kinds <= {MEASURED} else f"{sentence_case(' and '.join(sorted(kinds)))}: "
    others = [one for one in outcome.judged if not one.primary]
    return f"{label}{said}. The others, corrected for their number (Holm): {_tally(others)}."


def _tally(judged: Sequence[Judged]) -> str:
    """`better at 2, no proven difference at 1`; one alone without its number."""
    tally: dict[str, int] = {}
    for one in judged:
        tally[_verdict(one)] = tally.get(_verdict(one), 0) + 1
    return ", ".join(f"{n} {verdict}" if len(judged) > 1 else verdict for verdict, n in tally.items())


def records(outcome: Outcome, differences: Sequence[str] = ()) -> list[dict[str, Value]]:
    """A flat row per metric and point, in base units at full precision."""
    return [_record(one, "; ".join(differences)) for one in outcome.judged]


def _record(one: Judged, differs: str) -> dict[str, Value]:
    match, comparison = one.match, one.comparison
    return {
        "base": match.base_name,
        "new": match.new_name,
        "base_evidence": match.base.evidence,
        "new_evidence": match.new.evidence,
        **asdict(match.load),
        **asdict(match.context),
        "window": match.window,
        "metric": one.metric.key,
        "primary": one.primary,
        "higher_is_better": one.metric.higher_is_better,
        "base_mean": one.base,
        "new_mean": one.new,
        "effect": "difference" if one.metric.difference else "ratio",
        "value": comparison.effect.value,
        "low": comparison.effect.low,
        "high": comparison.effect.high,
        "level": one.level,
        "p": comparison.p,
        "pairs": comparison.effect.n,
        "dropped": comparison.effect.dropped,
        "verdict": comparison.verdict,
        "differs": differs,
    }


def _by_match(outcome: Outcome) -> list[Judged]:
    """Point by point, the primary metric first in each."""
    order: list[Match] = [one.match for one in outcome.judged if one.primary]
    return sorted(outcome.judged, key=lambda one: next(i for i, match in enumerate(order) if match is one.match))


def _title(match: Match) -> str:
    pairs = count(len({row.get("seed") for row in match.base.ok} & {row.get("seed") for row in match.new.ok}), "pair")
    lengths = f", {match.context}" if match.context.size[0] else ""
    names = f"{_named(match.new_name, match.new)} against {_named(match.base_name, match.base)}"
    return f"{names}, at {match.load}{lengths} ({pairs}, {match.window} window)"


def _named(name: str, group: Group) -> str:
    """With what its numbers are where they were not measured."""
    return name if group.evidence == MEASURED else f"{name} ({group.evidence})"


def _line(one: Judged) -> list[str]:
    metric, effect = one.metric, one.comparison.effect
    means = [number(None if mean is None else mean * metric.scale, metric.decimals) for mean in (one.base, one.new)]
    if metric.difference:
        told = [None if v is None else v * metric.scale for v in (effect.value, effect.low, effect.high)]
        value, low, high = (
            number(v, metric.decimals) if v is None or v <= 0 else f"+{number(v, metric.decimals)}" for v in told
        )
    else:
        decimals = ratio_decimals(effect.value, effect.low, effect.high)
        value, low, high = (ratio_end(v, decimals) for v in (effect.value, effect.low, effect.high))
        value = f"{value} ×" if effect.value is not None else value
    interval = f"{low} to {high}" if effect.low is not None else ""
    head = f"{metric.head} {metric.unit}".strip() + (" (primary)" if one.primary else "")
    return [head, *means, value, interval, _verdict(one)]


def _verdict(one: Judged) -> str:
    unjudged = one.comparison.verdict == UNPROVEN and one.comparison.p is None
    return (
        NEEDS_TWO
        if unjudged and one.comparison.effect.n == 1
        else "nothing known"
        if unjudged
        else one.comparison.verdict
    )


def _text(title: str, lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in [HEADS, *lines]) for i in range(len(HEADS))]

    def drawn(line: Sequence[str]) -> str:
        cells = [
            text.ljust(w) if i in (0, 5) else text.rjust(w)
            for i, (text, w) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([title, drawn(HEADS), *map(drawn, lines)]) + "\n"


def _markdown(title: str, lines: Sequence[Sequence[str]]) -> str:
    rules = [":---", "---:", "---:", "---:", "---:", ":---"]
    rows = "\n".join(f"| {' | '.join(line)} |" for line in [HEADS, rules, *lines])
    return f"### {title}\n\n{rows}\n"


def note_on_level(outcome: Outcome) -> str:
    """How sure the intervals are."""
    points = sum(one.primary for one in outcome.judged)
    together = f", all {points} together" if points > 1 else ""
    return (
        f"Intervals of the primary metric: {percent(LEVEL)}{together}; of the others: as wide as their correction asks."
    )
