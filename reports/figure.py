"""What a figure of the page is, and how a variant looks in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvbench.reports.groups import Results, Variant

Rows = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """`svg` under a title, with the numbers it shows; `error` says why there is none."""

    title: str
    subtitle: str
    svg: str = ""
    heads: tuple[str, ...] = ()
    numbers: tuple[tuple[str, Rows], ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Look:
    """How a variant is drawn everywhere: the token of its colour, the token of its tint and its mark."""

    token: str
    tint: str
    mark: str


_OF_BACKEND = {"contiguous": Look("contiguous", "contiguous-tint", "s"), "paged": Look("paged", "paged-tint", "o")}
_OTHERS = (Look("third", "grid", "^"), Look("fourth", "grid", "D"), Look("ink2", "grid", "v"))


def looks(results: Results) -> dict[Variant, Look]:
    """The first variant of each backend has its backend's look, later ones the others in turn."""
    found: dict[Variant, Look] = {}
    own = dict(_OF_BACKEND)
    for variant in results.variants:
        spare = len([look for look in found.values() if look in _OTHERS])
        other = _OTHERS[min(spare, len(_OTHERS) - 1)]
        found[variant] = own.pop(variant.backend, other)
    return found


def of_context(results: Results) -> str:
    """The end of a subtitle where the run has several contexts and the figure shows one."""
    return f"; {results.middle_told}" if results.middle_told else ""


def apart(at: Sequence[float], gap: float, top: float) -> list[float]:
    """Growing positions, moved to lie at least `gap` apart and, while that is possible, between 0 and `top`."""
    found = list(at)
    for before, here in pairwise(range(len(found))):
        found[here] = max(found[here], found[before] + gap)
    limit = top
    for here in reversed(range(len(found))):
        found[here] = min(found[here], limit)
        limit = found[here] - gap
    return found
