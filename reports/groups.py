"""The cells of a run put together: the repeats of one variant at one load and context are a group.

A number of a group is its mean over the repeats that ran (status `ok`), with Student's interval between them; of one
repeat with the interval within it, where it has one. Cells that failed are counted, never averaged. All cells of a load
and context speak of the same window: of the steady one where each that ran has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from kvbench.metrics import points
from kvbench.metrics.points import Context, LoadPoint
from kvbench.metrics.records import MEASURED
from kvbench.metrics.stats import WITHIN, Comparison, Interval, mean_interval, paired_ratio
from kvbench.metrics.store import RunFolder
from kvbench.metrics.summary import of_total
from kvbench.metrics.window import STEADY

Row = Mapping[str, Any]

OK = "ok"


@dataclass(frozen=True, slots=True)
class Variant(points.Variant):
    """As the sweep has it; `copy` 2 is the same asked for once more in one sweep."""

    copy: int = 1

    def differs(self, other: Variant) -> tuple[str, ...]:
        """The fields in which it is not the other."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name))


@dataclass(frozen=True, slots=True)
class Group:
    """All repeats of one variant at one load and context."""

    variant: Variant
    load: LoadPoint
    context: Context
    rows: tuple[Row, ...]

    @property
    def evidence(self) -> str:
        """`measured`, `simulated` or both."""
        return " and ".join(evidences(self.rows))

    @property
    def ok(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.get("status") == OK)

    @property
    def failed(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.get("status") != OK)

    def values(self, column: str) -> list[float]:
        """What is known of a column, one value a repeat that ran."""
        return [row[column] for row in self.ok if row.get(column) is not None]

    def mean(self, column: str) -> Interval:
        found = mean_interval([row.get(column) for row in self.ok])
        if found.n == 1 and found.value is not None:
            low, high, batches = (
                self.values(name) for name in (f"{column}_within_low", f"{column}_within_high", "batches")
            )
            if low and high and batches:
                return Interval(found.value, low[0], high[0], int(batches[0]), found.dropped, WITHIN)
        return found

    def median_row(self, column: str) -> Row | None:
        """The repeat in the middle of a column (the lower of two)."""
        rows = sorted((row for row in self.ok if row.get(column) is not None), key=lambda row: float(row[column]))
        return rows[(len(rows) - 1) // 2] if rows else None


@dataclass(frozen=True, slots=True)
class Results:
    """The groups of a run. Variants stand in the order in which they were asked for, loads and contexts grow."""

    rows: tuple[Row, ...]
    groups: tuple[Group, ...]
    variants: tuple[Variant, ...]
    loads: tuple[LoadPoint, ...]
    contexts: tuple[Context, ...]

    @classmethod
    def of(cls, folder: RunFolder) -> Results:
        return cls.of_rows(folder.rows(), folder.manifest.get("cells") or [])

    @classmethod
    def of_rows(cls, told: Sequence[Row], planned: Sequence[object] = ()) -> Results:
        """The rows of cells, in the order of the variants of the cells that were `planned`."""
        rows = one_window(told)
        cells: dict[tuple[Variant, LoadPoint, Context], list[Row]] = {}
        for row, variant in zip(rows, _variants(rows), strict=True):
            cells.setdefault((variant, LoadPoint.of(row), Context.of(row)), []).append(row)
        asked = dict.fromkeys(_variants([cell for cell in planned if isinstance(cell, dict) and "backend" in cell]))
        present = dict.fromkeys(variant for variant, _, _ in cells)
        variants = list(dict.fromkeys([*(variant for variant in asked if variant in present), *present]))
        groups = [Group(*key, tuple(of_group)) for key, of_group in cells.items()]
        groups.sort(key=lambda g: (variants.index(g.variant), g.context.size, g.load.size))
        return cls(
            tuple(rows),
            tuple(groups),
            tuple(variants),
            tuple(sorted({group.load for group in groups}, key=lambda load: load.size)),
            tuple(sorted({group.context for group in groups}, key=lambda context: context.size)),
        )

    @property
    def ok(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.get("status") == OK)

    @property
    def failed(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.get("status") != OK)

    @property
    def middle(self) -> Context:
        """The grid's middle context, of which headline and charts speak: the middle of the lengths, with the longest
        prefix and the most samples asked of them. Without either there is nothing to share, which the reader knows."""
        richest = max((context.prefix_tokens, context.samples) for context in self.contexts)
        those = [context for context in self.contexts if (context.prefix_tokens, context.samples) == richest]
        return those[(len(those) - 1) // 2]

    @property
    def label(self) -> str:
        """`simulated` where the numbers are, `partly simulated` where some are; empty where all were measured."""
        kinds = set(evidences(self.rows))
        return "" if kinds <= {MEASURED} else "partly simulated" if MEASURED in kinds else "simulated"

    def titled(self, title: str) -> str:
        """A title with the label, so that no number is read as measured that was not."""
        return f"{title} ({self.label})" if self.label else title

    def name(self, variant: Variant) -> str:
        """Its backend's and what it adds to that, with the reservation where the run has several of them."""
        policies = {other.reserve for other in self.variants if other.backend == variant.backend}
        name = str(variant if len(policies) > 1 else replace(variant, reserve=None))
        return name if variant.copy == 1 else f"{name} ({variant.copy})"

    @property
    def varied(self) -> tuple[str, ...]:
        """The fields of a context in which those of the run differ."""
        return tuple(
            field.name
            for field in fields(Context)
            if len({getattr(context, field.name) for context in self.contexts}) > 1
        )

    @property
    def middle_told(self) -> str:
        """The middle context in words where the run has several; empty otherwise."""
        return self.middle.told(self.varied) if len(self.contexts) > 1 else ""

    def of_variant(self, variant: Variant, context: Context | None = None) -> list[Group]:
        """Its groups, by growing load; at one context or at all."""
        return [g for g in self.groups if g.variant == variant and context in (None, g.context)]

    def at(self, variant: Variant, load: LoadPoint, context: Context) -> Group:
        """One group; without rows where nothing was run there."""
        key = (variant, load, context)
        found = (group for group in self.groups if (group.variant, group.load, group.context) == key)
        return next(found, Group(*key, ()))

    def shared_loads(self, variants: Iterable[Variant]) -> list[LoadPoint]:
        """The loads at which all of them ran, at the middle context."""
        return [load for load, context in self.shared_points(variants) if context == self.middle]

    def shared_points(self, variants: Iterable[Variant]) -> list[tuple[LoadPoint, Context]]:
        """The loads and contexts at which all of them ran."""
        variants = list(variants)
        points = [(load, context) for context in self.contexts for load in self.loads]
        return [point for point in points if all(self.at(variant, *point).ok for variant in variants)]


def one_window(rows: Sequence[Row]) -> list[Row]:
    """The same rows, all of a load and context of one window: the total one unless all that ran have a steady one."""
    unsettled = {
        (LoadPoint.of(row), Context.of(row)) for row in rows if row.get("status") == OK and row.get("window") != STEADY
    }
    return [of_total(row) if (LoadPoint.of(row), Context.of(row)) in unsettled else row for row in rows]


def evidences(rows: Iterable[Row]) -> list[str]:
    """What kinds of numbers rows have: `measured`, `simulated`. A row that does not say was measured."""
    return list(dict.fromkeys(str(row.get("evidence") or MEASURED) for row in rows))


def compare(a: Group, b: Group, column: str, *, level: float, higher_is_better: bool = True) -> Comparison:
    """How many times `a` is `b`, paired by seed: a repeat that only one of them has is no pair."""
    return paired_ratio(*paired(a, b, column), higher_is_better=higher_is_better, level=level)


def paired(a: Group, b: Group, column: str) -> list[list[Any]]:
    """A column of both, of the repeats whose seed both have, in the same order."""
    by_seed = [{row.get("seed"): row.get(column) for row in group.ok} for group in (a, b)]
    seeds = [seed for seed in by_seed[0] if seed in by_seed[1]]
    return [[values[seed] for seed in seeds] for values in by_seed]


def _variants(rows: Sequence[Row]) -> list[Variant]:
    """The variant of each row: the same cell of the grid for a second time in a repeat is a second copy."""
    seen: Counter[object] = Counter()
    variants = []
    for row in rows:
        one = Variant.of({**row, "backend": str(row.get("backend"))})
        key = (one, LoadPoint.of(row), Context.of(row), row.get("repeat"), row.get("seed"))
        seen[key] += 1
        variants.append(replace(one, copy=seen[key]))
    return variants
