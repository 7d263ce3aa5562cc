"""The summary of a run as tables: a row per load and context, a table per variant, four ways to write them down.

`table` and `markdown` round, one count of decimals a column. `csv` and `json` have one row per group at full precision
and in base units: each metric with `_low` and `_high`, its 95 % interval over the repeats.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvbench.metrics.stats import Interval
from kvbench.reports.groups import Group, Results, Variant
from kvbench.reports.words import number, plain, sentence_case

if TYPE_CHECKING:
    import rich.table

FORMATS = ("table", "markdown", "csv", "json")

Value = str | float | int | None


@dataclass(frozen=True, slots=True)
class Column:
    """`value` of a group in base units times `scale` stands under `head` (its spaces may become line breaks), with its
    interval where `spread`. `counted`: nothing to be uncertain about. `drop`: the order in which columns make room on a
    narrow terminal, 0 never."""

    key: str
    head: str
    value: Callable[[Group], Interval]
    decimals: int = 0
    scale: float = 1.0
    spread: bool = False
    counted: bool = False
    drop: int = 0

    def cell(self, group: Group) -> str:
        """The rounded mean, or a dash."""
        value = self.value(group).value
        return number(None if value is None else value * self.scale, self.decimals)

    def interval(self, group: Group) -> str:
        """`± 12.3`, the half-width of the 95 % interval; empty below two repeats."""
        found = self.value(group)
        if not self.spread or found.high is None or found.value is None:
            return ""
        return f"± {number((found.high - found.value) * self.scale, self.decimals)}"


@dataclass(frozen=True, slots=True)
class Place:
    """A coordinate of the grid: its `head` and what of a group stands under it."""

    head: str
    label: Callable[[Group], str]


@dataclass(frozen=True, slots=True)
class Table:
    """One variant's groups. `places` say where in the grid a row stands, `columns` what is told of it."""

    title: str
    places: tuple[Place, ...]
    columns: tuple[Column, ...]
    groups: tuple[Group, ...]

    @property
    def label_heads(self) -> tuple[str, ...]:
        return tuple(place.head for place in self.places)

    def labels(self, group: Group) -> tuple[str, ...]:
        return tuple(place.label(group) for place in self.places)


def _known(value: float | None) -> Interval:
    return Interval(value, None, None, int(value is not None), 0)


def _mean(column: str) -> Callable[[Group], Interval]:
    return lambda group: group.mean(column)


def _sum(column: str) -> Callable[[Group], Interval]:
    return lambda group: _known(sum(values) if (values := group.values(column)) else None)


def _peak(column: str) -> Callable[[Group], Interval]:
    return lambda group: _known(max(group.values(column), default=None))


COLUMNS = (
    Column("requests", "requests", _sum("requests_submitted"), counted=True, drop=1),
    Column("output_tokens_per_s", "out tok/s", _mean("output_tokens_per_s"), 1, spread=True),
    Column("ttft_p50_s", "TTFT p50 ms", _mean("ttft_p50_s"), 0, 1e3, drop=4),
    Column("ttft_p99_s", "TTFT p99 ms", _mean("ttft_p99_s"), 0, 1e3),
    Column("tpot_p50_s", "TPOT p50 ms", _mean("tpot_p50_s"), 1, 1e3, drop=3),
    Column("tpot_p99_s", "TPOT p99 ms", _mean("tpot_p99_s"), 1, 1e3),
    Column("attainment", "in time %", _mean("attainment"), 1, 100),
    Column("kv_utilisation_mean", "KV used %", _mean("kv_utilisation_mean"), 1, 100),
    Column("kv_fragmentation_mean", "KV wasted %", _mean("kv_fragmentation_mean"), 1, 100),
    Column("preemptions", "pre- empted", _mean("preemptions"), 1, drop=5),
    Column("peak_running", "peak running", _peak("peak_running"), counted=True),
    Column("usd_per_million_output_tokens", "$/1M out", _mean("usd_per_million_output_tokens"), 3, drop=2),
    Column("failed_cells", "failed cells", lambda group: _known(len(group.failed)), counted=True),
)
SHARING = (
    Column("prefix_hit_rate", "prefix hits %", _mean("prefix_hit_rate"), 1, 100),
    Column("kv_sharing_mean", "KV shared %", _mean("kv_sharing_mean"), 1, 100, drop=6),
)


def columns_of(results: Results) -> tuple[Column, ...]:
    """The columns of a run's tables: those about sharing only where a prefix cache was on."""
    if not any(row.get("prefix_caching") for row in results.rows):
        return COLUMNS
    after = 1 + next(at for at, column in enumerate(COLUMNS) if column.key == "kv_fragmentation_mean")
    return COLUMNS[:after] + SHARING + COLUMNS[after:]


def summary(results: Results) -> list[Table]:
    """A table per variant, in the order asked."""
    return [
        Table(_title(results, variant), _places(results), columns_of(results), tuple(results.of_variant(variant)))
        for variant in results.variants
    ]


def render(results: Results, fmt: str = "table", width: int = 80) -> str:
    """The summary in one of FORMATS, ending in a newline; `width` characters wide where it is a `table`."""
    assert fmt in FORMATS, fmt
    if fmt == "csv":
        return _csv(records(results))
    if fmt == "json":
        return json.dumps(records(results), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    tables = summary(results)
    return "\n".join(map(_markdown, tables)) if fmt == "markdown" else _text(tables, width)


def records(results: Results) -> list[dict[str, Value]]:
    """One flat row per group at full precision, in base units."""
    return [_record(group, columns_of(results)) for group in results.groups]


def _record(group: Group, columns: Sequence[Column]) -> dict[str, Value]:
    row: dict[str, Value] = {
        **asdict(group.variant),
        **asdict(group.load),
        **asdict(group.context),
        "repeats": len(group.ok),
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
    varied = set(results.varied)
    lengths = bool(varied & {"input_tokens", "output_tokens"})
    places = {
        Place("requests/s" if rates else "users", lambda group: group.load.number): True,
        Place("in tokens", lambda group: plain(group.context.input_tokens)): lengths,
        Place("out tokens", lambda group: plain(group.context.output_tokens)): lengths,
        Place("prefix tokens", lambda group: plain(group.context.prefix_tokens)): "prefix_tokens" in varied,
        Place("samples", lambda group: plain(group.context.samples)): "samples" in varied,
    }
    return tuple(place for place, shown in places.items() if shown)


def _csv(rows: Sequence[dict[str, Value]]) -> str:
    """Full precision, None an empty field; a text that a spreadsheet would run as a formula gets a '."""
    out = io.StringIO()
    heads = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(out, list(heads), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _inert(value) for name, value in row.items()} for row in rows)
    return out.getvalue()


def _inert(value: Value) -> Value:
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def _cells(table: Table, columns: Sequence[Column], group: Group) -> list[str]:
    shown = [f"{column.cell(group)} {column.interval(group)}".strip() for column in columns]
    return [*table.labels(group), *shown]


def _markdown(table: Table) -> str:
    heads = [*table.label_heads, *(column.head.replace("- ", "") for column in table.columns)]
    lines = [heads, ["---:"] * len(heads), *(_cells(table, table.columns, group) for group in table.groups)]
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"### {_one_line(table.title)}\n\n{rows}\n"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _text(tables: Sequence[Table], width: int) -> str:
    """Plain text. On a narrow terminal the columns that matter least make room, and are named."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=10_000, color_system=None, force_terminal=False, legacy_windows=False)
    columns, left_out = [column for table in tables[:1] for column in table.columns], list[str]()
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
    for head in (*table.label_heads, *(column.head for column in columns)):
        words = head.replace("- ", "-\n").replace(" ", "\n")
        drawn.add_column(words, justify="right", no_wrap=True, vertical="bottom")
    for group in table.groups:
        drawn.add_row(*_cells(table, columns, group))
    return drawn
