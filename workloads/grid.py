"""The points of a sweep, in the order in which they run, and the lists of numbers that a user spans them with.

Within a repeat the variants follow each other at every point, and every other repeat turns their order round (ABBA), so
a machine that slowly warms up or slows down favours none of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from kvbench.errors import KvbenchError
from kvbench.metrics.points import Context, LoadPoint, Variant

_RANGE = re.compile(r"([\d.]+)-([\d.]+)([*+])([\d.]+)")
_LONGEST_LIST = 10_000
_LEAST, _MOST = Decimal("0.000001"), Decimal(10**9)


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid in one repeat under one variant. `id` names its folder, `order` is its place in the run."""

    id: str
    variant: Variant
    load: LoadPoint
    context: Context
    repeat: int
    seed: int
    order: int

    def facts(self) -> dict[str, Any]:
        """As `run.json` keeps it: flat, with the names of `cells.csv`."""
        point = asdict(self.variant) | asdict(self.load) | asdict(self.context)
        return {"id": self.id, **point, "repeat": self.repeat, "seed": self.seed, "order": self.order}

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Cell:
        """The cell that `facts` were made of."""
        own = {name: facts[name] for name in ("id", "repeat", "seed", "order")}
        return cls(variant=Variant.of(facts), load=LoadPoint.of(facts), context=Context.of(facts), **own)


def cells(
    variants: Sequence[Variant],
    loads: Sequence[LoadPoint],
    contexts: Sequence[Context],
    repeats: int,
    seed: int,
) -> list[Cell]:
    """Every variant at every load and context, `repeats` times, in running order.

    A pass over the whole grid makes a repeat, so an interrupted sweep has all points of the repeats before. Repeat r
    has the seed `seed + r` for all its cells: the variants are paired, the repeats independent. A variant or point that
    is asked for twice runs twice, the second with `.2` at the end of its id.
    """
    if repeats < 1:
        raise KvbenchError(f"--repeats must be at least 1, not {repeats}")
    points = [(load, context) for load in loads for context in contexts]
    plan: list[Cell] = []
    for repeat in range(repeats):
        seen: Counter[str] = Counter()
        for load, context in points:
            row = []
            for variant in variants:
                name = _name(variant, load, context, repeat)
                seen[name] += 1
                row.append((variant, name if seen[name] == 1 else f"{name}.{seen[name]}"))
            for variant, name in row if repeat % 2 == 0 else reversed(row):
                plan.append(Cell(name, variant, load, context, repeat, seed + repeat, len(plan)))
    return plan


def _name(variant: Variant, load: LoadPoint, context: Context, repeat: int) -> str:
    """`paged-prefix-c16-i128-o64-p80-n4-r0`: only letters, digits, dots and dashes. What is None or as it is by default
    is left out."""
    words = [variant.backend, variant.reserve, *(extra.split()[0] for extra in variant.extras)]
    numbers = {
        "c": load.concurrency,
        "q": None if load.request_rate is None else str(load.request_rate).removesuffix(".0"),
        "i": context.input_tokens,
        "o": context.output_tokens,
        "p": context.prefix_tokens or None,
        "n": context.samples if context.samples > 1 else None,
        "r": repeat,
    }
    return "-".join(
        [word for word in words if word is not None]
        + [f"{letter}{value}" for letter, value in numbers.items() if value is not None]
    )


def parse_ints(text: str, flag: str, *, least: int = 1) -> list[int]:
    """`1,8,64`, `1-64*2` (1, 2, 4 … 64) or `64-256+64` (64, 128 … 256), mixed at will; `flag` is named in errors."""
    values = _parse(text, flag, Decimal(least))
    for value in values:
        if value != int(value):
            raise KvbenchError(f"{flag} takes whole numbers, not {value}")
    return [int(value) for value in values]


def parse_floats(text: str, flag: str) -> list[float]:
    """As `parse_ints`, with fractions: `0.5,2` or `0.5-8*2`."""
    return [float(value) for value in _parse(text, flag, _LEAST)]


def _parse(text: str, flag: str, least: Decimal) -> list[Decimal]:
    """Exact decimals, so that `0.1-0.3+0.1` has three of them."""
    values: list[Decimal] = []
    for item in map(str.strip, text.split(",")):
        found = _RANGE.fullmatch(item)
        if found is None:
            values.append(_number(item, item, flag, least))
            continue
        first, last = (_number(found[group], item, flag, least) for group in (1, 2))
        values.extend(_span(first, last, found[3], _number(found[4], item, flag, _LEAST), item, flag))
    return values


def _number(word: str, item: str, flag: str, least: Decimal) -> Decimal:
    try:
        value = Decimal(word)
    except InvalidOperation:
        raise KvbenchError(
            f"{flag} cannot read {item!r}; give numbers like 1,8,64 or ranges like 1-64*2 and 64-256+64"
        ) from None
    if not (value.is_finite() and least <= value <= _MOST):
        raise KvbenchError(f"{flag} takes numbers from {least} to {_MOST:,}, not {item!r}")
    return value


def _span(first: Decimal, last: Decimal, sign: str, step: Decimal, item: str, flag: str) -> list[Decimal]:
    """From `first` on while not beyond `last`, each value `step` times or plus `step` the one before."""
    if last < first:
        raise KvbenchError(f"{flag} has the range {item!r} the wrong way round; the smaller number comes first")
    if sign == "*" and not first:
        raise KvbenchError(f"{flag} cannot multiply 0 in {item!r}; write 0,1-64*2")
    if sign == "*" and step <= 1:
        raise KvbenchError(f"{flag} must multiply by more than 1 in {item!r}")
    values = [first]
    while (value := values[-1] * step if sign == "*" else values[-1] + step) <= last:
        values.append(value)
        if len(values) > _LONGEST_LIST:
            raise KvbenchError(f"{flag} has over {_LONGEST_LIST} values in {item!r}; take larger steps")
    return values
