"""The summary of a run as tables: a row per load and context, a table per variant and one of all for the memory, four
ways to write them down.

`table` and `markdown` round, one count of decimals a column. `csv` and `json` have one row per group at full precision
and in base units: each metric with `_low` and `_high`, its 95 % interval over the repeats.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from kvbench.reports.columns import Column, all_columns, answer_columns, device_columns, energy_columns, pool_columns
from kvbench.reports.groups import Group, Results, Variant
from kvbench.reports.servers import remote
from kvbench.reports.words import plain, sentence_case

if TYPE_CHECKING:
    import rich.table

FORMATS = ("table", "markdown", "csv", "json")

Value = str | float | int | None


@dataclass(frozen=True, slots=True)
class Place:
    """A coordinate of the grid: its `head` and what of a group stands under it."""

    head: str
    label: Callable[[Group], str]


@dataclass(frozen=True, slots=True)
class Table:
    """Groups in rows. The labels of a row say where in the grid it stands, `columns` what is told of it. `named`: the
    first label is a name, so it stands left."""

    title: str
    label_heads: tuple[str, ...]
    columns: tuple[Column, ...]
    rows: tuple[tuple[tuple[str, ...], Group], ...]
    named: bool = False


def summary(results: Results) -> list[Table]:
    """A table per variant, in the order asked."""
    places, columns = _places(results), answer_columns(results)
    return [
        Table(
            results.titled(_title(results, variant)),
            _heads(places),
            columns,
            tuple((_labels(places, group), group) for group in results.of_variant(variant)),
        )
        for variant in results.variants
    ]


def pool_table(results: Results) -> Table | None:
    """Where the rows of the pool were; None where nothing is known of it, as of a server's."""
    return _of_all("Where the KV memory went, in % of the pool", results, pool_columns(results))


def device_table(results: Results) -> Table | None:
    """The device's own figures beside the pool's; None where there are none."""
    return _of_all("Beside the pool, in MiB at the peak", results, device_columns(results))


def energy_table(results: Results) -> Table | None:
    """Energy, power, clocks and heat; None where the device tells of none."""
    return _of_all("How the device fared", results, energy_columns(results))


def _of_all(title: str, results: Results, columns: tuple[Column, ...]) -> Table | None:
    places = _places(results)
    groups = [group for group in results.groups if not remote(group)]
    rows = tuple(((results.name(group.variant), *_labels(places, group)), group) for group in groups)
    return (
        Table(results.titled(title), ("backend", *_heads(places)), columns, rows, named=True)
        if columns and rows
        else None
    )


def _heads(places: Sequence[Place]) -> tuple[str, ...]:
    return tuple(place.head for place in places)


def _labels(places: Sequence[Place], group: Group) -> tuple[str, ...]:
    return tuple(place.label(group) for place in places)


def render(results: Results, fmt: str = "table", width: int = 80) -> str:
    """The summary in one of FORMATS, ending in a newline; `width` characters wide where it is a `table`, which leaves
    out the device's own figures."""
    assert fmt in FORMATS, fmt
    if fmt == "csv":
        return to_csv(records(results))
    if fmt == "json":
        return json.dumps(records(results), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    tables, pool = summary(results), pool_table(results)
    if fmt == "markdown":
        beside = (device_table(results), energy_table(results))
        return "\n".join(_markdown(table) for table in (*tables, pool, *beside) if table)
    return "\n".join(_text(alike, width) for alike in (tables, [pool] if pool else []) if alike)


def records(results: Results) -> list[dict[str, Value]]:
    """One flat row per group at full precision, in base units."""
    columns = all_columns(results)
    return [_record(group, columns) for group in results.groups]


def _record(group: Group, columns: Sequence[Column]) -> dict[str, Value]:
    row: dict[str, Value] = {
        **asdict(group.variant),
        **asdict(group.load),
        **asdict(group.context),
        "repeats": len(group.ok),
        "evidence": group.evidence,
    }
    for column in columns:
        value = column.value(group)
        row[column.key] = value.value
        if not column.counted:
            row |= {f"{column.key}_low": value.low, f"{column.key}_high": value.high}
    return row


def _title(results: Results, variant: Variant) -> str:
    """`Contiguous, reserving max`."""
    name = results.name(variant)
    reserve = f", reserving {variant.reserve}" if variant.reserve and variant.reserve not in name else ""
    return sentence_case(name) + reserve


def _places(results: Results) -> tuple[Place, ...]:
    """The load, and what contexts differ in; both lengths where one of them does."""
    rates = any(group.load.request_rate is not None for group in results.groups)
    users = any(group.load.concurrency is not None for group in results.groups)
    varied = set(results.varied)
    lengths = bool(varied & {"input_tokens", "output_tokens"})
    places = {
        Place("requests/s" if rates else "users" if users else "load", lambda group: group.load.number): True,
        Place("in tokens", lambda group: plain(group.context.input_tokens)): lengths,
        Place("out tokens", lambda group: plain(group.context.output_tokens)): lengths,
        Place("prefix tokens", lambda group: plain(group.context.prefix_tokens)): "prefix_tokens" in varied,
        Place("samples", lambda group: plain(group.context.samples)): "samples" in varied,
    }
    return tuple(place for place, shown in places.items() if shown)


def to_csv(rows: Sequence[dict[str, Value]]) -> str:
    """Full precision, None an empty field; a text that a spreadsheet would run as a formula gets a '."""
    out = io.StringIO()
    heads = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(out, list(heads), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _inert(value) for name, value in row.items()} for row in rows)
    return out.getvalue()


def _inert(value: Value) -> Value:
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def _lines(table: Table, columns: Sequence[Column]) -> list[list[str]]:
    return [
        [*labels, *(f"{column.cell(group)} {column.interval(group)}".strip() for column in columns)]
        for labels, group in table.rows
    ]


def _markdown(table: Table) -> str:
    heads = [*table.label_heads, *(column.head.replace("- ", "") for column in table.columns)]
    rules = [":---" if table.named else "---:", *["---:"] * (len(heads) - 1)]
    lines = [heads, rules, *_lines(table, table.columns)]
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"### {_one_line(table.title)}\n\n{rows}\n"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _text(tables: Sequence[Table], width: int) -> str:
    """Plain text of tables with the same columns. On a narrow terminal those that matter least make room, and are
    named."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=10_000, color_system=None, force_terminal=False, legacy_windows=False)
    columns, left_out = list(tables[0].columns), list[str]()
    for column in sorted((column for column in columns if column.drop), key=lambda column: column.drop):
        if all(console.measure(_drawn(table, columns)).maximum <= width for table in tables):
            break
        columns.remove(column)
        left_out.append(column.head)
    for table in tables:
        console.print(table.title, markup=False, highlight=False)
        console.print(_drawn(table, columns))
        console.print()
    if left_out:
        console.print(f"(left out at this width: {', '.join(left_out)})", markup=False, highlight=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n") + "\n"


def _drawn(table: Table, columns: Sequence[Column]) -> rich.table.Table:
    import rich.table

    drawn = rich.table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, head in enumerate((*table.label_heads, *(column.head for column in columns))):
        words = head.replace("- ", "-\n").replace(" ", "\n")
        side: Literal["left", "right"] = "left" if table.named and not place else "right"
        drawn.add_column(words, justify=side, no_wrap=True, vertical="bottom")
    for line in _lines(table, columns):
        drawn.add_row(*line)
    return drawn
