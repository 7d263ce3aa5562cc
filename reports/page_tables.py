"""The tables and meters of the page, ready for its template: every cell already words."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.reports.columns import answer_columns
from kvbench.reports.contests import LEVEL, Contest, contests, focus, pairs
from kvbench.reports.figure import looks
from kvbench.reports.groups import OK, Group, Results, Row
from kvbench.reports.tables import Table, device_table, energy_table, pool_table, summary
from kvbench.reports.words import DASH, number, percent, ratio_decimals, ratio_end, sentence_case


@dataclass(frozen=True, slots=True)
class Head:
    """`text`: the column is of words, so it stands left."""

    words: str
    text: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """`kind` is its class: `text`, `bad`, or a variant's colour. `note` follows in small type."""

    words: str
    kind: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    title: str
    heads: tuple[Head, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """One variant's value; `share` of the longest bar in percent."""

    name: str
    token: str
    share: float
    words: str


@dataclass(frozen=True, slots=True)
class Meter:
    title: str
    bars: tuple[Bar, ...]


_METERS = (
    ("KV memory that holds tokens", "kv_utilisation_mean", percent, 1.0),
    ("Held but wasted, share of what is held", "kv_fragmentation_mean", percent, 1.0),
    ("Answers in the making at once, peak", "peak_running", number, None),
    (
        "Waiting for a slot, 99th percentile",
        "queue_p99_s",
        lambda s: DASH if s is None else f"{number(s * 1e3)} ms",
        None,
    ),
)


def meters(results: Results) -> tuple[list[Meter], str]:
    """What explains the difference, at the load where it shows most, and the words for that load."""
    load = focus(results) if results.contexts else None
    if load is None:
        return [], ""
    groups = [group for variant in results.variants if (group := results.at(variant, load, results.middle)).ok]
    colours = looks(results)
    found = []
    for title, column, words, scale in _METERS:
        means = [group.mean(column).value for group in groups]
        longest = scale or max((mean for mean in means if mean is not None), default=0.0) or 1.0
        bars = tuple(
            Bar(
                results.name(group.variant),
                colours[group.variant].token,
                round(100 * (mean or 0.0) / longest, 1),
                words(mean),
            )
            for group, mean in zip(groups, means, strict=True)
        )
        found.append(Meter(title, bars))
    return found, f"{load}{f', {results.middle_told}' if results.middle_told else ''}"


def variant_tables(results: Results) -> list[Grid]:
    """The summary of each variant."""
    return [_grid(results, table) for table in summary(results)]


def memory_tables(results: Results) -> list[Grid]:
    """Where the rows of the pool were, and the device's own figures beside it: as much as is known."""
    tables = (pool_table(results), device_table(results), energy_table(results))
    return [_grid(results, table) for table in tables if table]


def _grid(results: Results, table: Table) -> Grid:
    colours = looks(results)
    heads = [*table.label_heads, *(column.head.replace("- ", "") for column in table.columns)]
    rows = tuple(
        (
            Cell(labels[0], f"text {colours[group.variant].token}" if table.named else ""),
            *map(Cell, labels[1:]),
            *(Cell(column.cell(group), _alarm(column.key, group), column.interval(group)) for column in table.columns),
        )
        for labels, group in table.rows
    )
    return Grid(table.title, tuple(Head(head, table.named and not place) for place, head in enumerate(heads)), rows)


def _alarm(key: str, group: Group) -> str:
    return "bad" if key == "failed_cells" and group.failed else ""


def duel_table(results: Results) -> Grid | None:
    """Every pair that is compared, load by load; None where nothing can be."""
    found = [duel for variant, other in pairs(results) for duel in contests(results, other, variant)]
    heads = ("out tok/s of", "÷ that of", "load", "ratio", f"{percent(LEVEL)} interval", "paired repeats", "verdict")
    rows = tuple(_duel(results, duel) for duel in found)
    return Grid("", tuple(Head(head, head in (*heads[:3], "verdict")) for head in heads), rows) if rows else None


def _duel(results: Results, duel: Contest) -> tuple[Cell, ...]:
    effect = duel.effect
    decimals = ratio_decimals(effect.low, effect.high)
    interval = DASH if effect.low is None else f"{number(effect.low, decimals)} to {ratio_end(effect.high, decimals)}"
    verdict = "proven" if duel.proven else "needs two repeats" if effect.low is None else "no proven difference"
    return (
        Cell(sentence_case(results.name(duel.winner)), f"text {looks(results)[duel.winner].token}"),
        Cell(results.name(duel.loser), "text"),
        Cell(str(duel.load), "text"),
        Cell(duel.ratio),
        Cell(interval),
        Cell(str(effect.n)),
        Cell(verdict, "text"),
    )


def cell_table(results: Results) -> Grid | None:
    """Every cell with its own numbers, in the order of cells.csv; None without cells."""
    if not results.rows:
        return None
    columns = [column for column in answer_columns(results) if column.key not in ("requests", "failed_cells")]
    heads = [Head("cell", True), Head("status", True), Head("repeat"), Head("seed"), Head("requests")]
    heads += [Head(column.head.replace("- ", "")) for column in columns] + [Head("reason", True)]
    alone = {
        id(row): Group(g.variant, g.load, g.context, ({**row, "status": OK},)) for g in results.groups for row in g.rows
    }
    rows = tuple(
        (
            *_start(row),
            *(Cell(column.cell(alone[id(row)])) for column in columns),
            Cell(str(row.get("reason") or ""), "text"),
        )
        for row in results.rows
    )
    return Grid("", tuple(heads), rows)


def _start(row: Row) -> tuple[Cell, ...]:
    status = str(row.get("status"))
    return (
        Cell(str(row.get("cell")), "text"),
        Cell(status, "text" if status == OK else "text bad"),
        Cell(number(None if row.get("repeat") is None else row["repeat"] + 1)),
        Cell(DASH if row.get("seed") is None else str(row["seed"])),
        Cell(number(row.get("requests_submitted"))),
    )
