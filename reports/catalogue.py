"""The lists of `kvbench gpus` and `kvbench models`: for people a table and where its figures come from, for programs a
flat row each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.reports.plain import as_markdown, as_text, wrapped
from kvbench.reports.words import DASH, number

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """A column for people: the `key` of a row in units of `unit`, with so many decimals; None for words."""

    head: str
    key: str
    unit: float = 1
    decimals: int | None = 0


GPUS = (
    Figure("card", "id", decimals=None),
    Figure("name", "name", decimals=None),
    Figure("GiB", "memory_bytes", 2**30, 2),
    Figure("GB/s", "bandwidth_bytes_per_s", 1e9),
    Figure("bf16 TFLOP/s", "bfloat16_flops_per_s", 1e12),
    Figure("fp16", "float16_flops_per_s", 1e12),
    Figure("fp8", "fp8_flops_per_s", 1e12),
    Figure("link GB/s", "link_bytes_per_s", 1e9),
    Figure("W", "tdp_w"),
    Figure("$/h from", "usd_per_hour_low", 1, 2),
    Figure("to", "usd_per_hour_high", 1, 2),
    Figure("note", "note", decimals=None),
)
MODELS = (
    Figure("model", "name", decimals=None),
    Figure("type", "family", decimals=None),
    Figure("parameters, 10⁹", "parameters", 1e9, 3),
    Figure("active, 10⁹", "active_parameters", 1e9, 3),
    Figure("KV B/token", "kv_bytes_per_token"),
    Figure("layers", "layers"),
    Figure("sliding", "sliding_layers"),
    Figure("window", "sliding_window"),
    Figure("heads", "heads"),
    Figure("kv heads", "kv_heads"),
    Figure("head", "head_dim"),
    Figure("longest", "max_positions"),
    Figure("source", "source", decimals=None),
)


def render(rows: Sequence[Row], figures: Sequence[Figure], notes: Sequence[str], fmt: str, width: int = 100) -> str:
    """The rows as `table`, `markdown`, `csv` or `json`; the last two at full precision."""
    if fmt == "json":
        return json.dumps(list(rows), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if fmt == "csv":
        from kvbench.reports.tables import to_csv

        return to_csv([dict(row) for row in rows])
    left = [place for place, figure in enumerate(figures) if figure.decimals is None]
    lines = [[figure.head for figure in figures], *([_cell(row, figure) for figure in figures] for row in rows)]
    if fmt == "markdown":
        return as_markdown(lines, left) + "\n" + "".join(f"- {note}\n" for note in notes)
    return as_text(lines, left) + "\n" + "".join(wrapped(note, width, "- ") for note in notes)


def _cell(row: Row, figure: Figure) -> str:
    value = row[figure.key]
    if figure.decimals is None:
        return str(value or "")
    return DASH if value is None else number(value / figure.unit, figure.decimals)
