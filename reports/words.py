"""Numbers and counts as a person reads them. A missing value is a dash, never 0."""

from __future__ import annotations

from collections.abc import Sequence

DASH = "–"
THIN = "\u202f"
"""A narrow no-break space, before % and ×."""

MUCH = 1000


def number(value: float | None, decimals: int = 0) -> str:
    """`1,234.5`; minus zero is zero."""
    return DASH if value is None else f"{round(value, decimals) + 0.0:,.{decimals}f}"


def plain(value: float | None) -> str:
    """A number as somebody typed it: `16`, `0.5`."""
    return DASH if value is None else f"{value:,.10g}"


def count(n: int, noun: str, nouns: str | None = None) -> str:
    """`1 user`, `1,200 users`."""
    return f"{n:,} {noun if n == 1 else nouns or f'{noun}s'}"


def percent(share: float | None, decimals: int = 0) -> str:
    return DASH if share is None else f"{number(share * 100, decimals)}{THIN}%"


def times(ratio: float, decimals: int = 2) -> str:
    return f"{number(ratio, decimals)}{THIN}×"


def ratio_end(ratio: float | None, decimals: int = 2) -> str:
    """An end of an interval of ratios: beyond a thousand it says no more than that nothing is known."""
    return f"over {MUCH:,}" if ratio is not None and ratio > MUCH else number(ratio, decimals)


def ratio_decimals(*ratios: float | None) -> int:
    """Two, or as many more (up to four) as keep a ratio that is not 1 from looking like 1."""
    unequal = [ratio for ratio in ratios if ratio is not None and ratio != 1]
    return next((decimals for decimals in (2, 3) if all(round(ratio, decimals) != 1 for ratio in unequal)), 4)


def listing(items: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(items[:-1]), items[-1]]) if len(items) > 1 else "".join(items)


def binary_size(size_bytes: float | None) -> str:
    """`90 MiB`, `1.5 GiB`."""
    if size_bytes is None:
        return DASH
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 1 << power:
            value = size_bytes / (1 << power)
            return f"{plain(round(value, 1 if value < 100 else 0))} {unit}"
    return f"{plain(size_bytes)} B"


def sentence_case(text: str) -> str:
    """The first letter large, the rest as it is."""
    return text[:1].upper() + text[1:]
