"""How far predictions are off, as tables: for a terminal, as Markdown, CSV or JSON, and as docs/accuracy.md.

Rows come as plain dictionaries (`planner/score.py` makes them); relative errors become per cent only here.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence

Row = Mapping[str, str | int | float | None]

AIMS = {
    ("tpot_mean_ms", "new rate"): 0.05,
    ("tpot_mean_ms", "new model"): 0.08,
    ("tpot_mean_ms", "new card"): 0.12,
    ("tpot_p50_ms", "new rate"): 0.05,
    ("tpot_p50_ms", "new model"): 0.08,
    ("tpot_p50_ms", "new card"): 0.12,
    ("output_tput", "new rate"): 0.05,
    ("output_tput", "new model"): 0.08,
    ("output_tput", "new card"): 0.12,
    ("total_tput", "new rate"): 0.05,
    ("total_tput", "new model"): 0.08,
    ("total_tput", "new card"): 0.12,
    ("completed_req_rate", "new rate"): 0.05,
    ("completed_req_rate", "new model"): 0.08,
    ("completed_req_rate", "new card"): 0.12,
    ("ttft_mean_ms", "new rate"): 0.20,
    ("ttft_mean_ms", "new model"): 0.20,
    ("ttft_mean_ms", "new card"): 0.20,
}
"""MAPE that is aimed at."""

ERROR_HEADS = ("class", "metric", "n", "MAPE %", "median %", "bias %", "P90 %", "aim %", "refused", "excluded")
HEADS = (*ERROR_HEADS, "range n", "90 % holds %")
BASELINE_HEADS = ("roofline n", "MAPE %", "bias %", "P90 %")


def render(rows: Sequence[Row], form: str) -> str:
    """All rows in one of the four formats."""
    if form == "json":
        return json.dumps(list(rows), indent=1, allow_nan=False) + "\n"
    if form == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]) if rows else ["metric", "class"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()
    cells = [_cells(row) for row in rows]
    return markdown(cells) if form == "markdown" else _plain(cells)


def markdown(cells: Sequence[Sequence[str]]) -> str:
    """A Markdown table, text to the left and numbers to the right."""
    heads = [*HEADS, *BASELINE_HEADS]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * 2 + " ---: |" * (len(heads) - 2)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in cells)]) + "\n"


def table_of(rows: Sequence[Row]) -> str:
    return markdown([_cells(row) for row in rows])


def _plain(cells: Sequence[Sequence[str]]) -> str:
    lines = [[*HEADS, *BASELINE_HEADS], *map(list, cells)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = (
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
    return "\n".join(line.rstrip() for line in text) + "\n"


def _cells(row: Row) -> list[str]:
    aim = AIMS.get((str(row["metric"]), str(row["class"])))
    return [
        *(str(row[key]) for key in ("class", "metric", "n")),
        *(_per_cent(row[key]) for key in ("mape", "median", "bias", "p90")),
        "" if aim is None else f"{100 * aim:.0f}",
        *(str(row[key]) for key in ("refused", "excluded", "ranged")),
        _per_cent(row["covered"]),
        str(row["baseline_n"]),
        *(_per_cent(row[key]) for key in ("baseline_mape", "baseline_bias", "baseline_p90")),
    ]


def _per_cent(share: str | float | None) -> str:
    return "–" if share is None else f"{100 * float(share):.1f}"


RANGE_HEADS = ("class", "family", "n", "low %", "high %", "held-out n", "90 % holds %")


def ranges_table(rows: Sequence[Row]) -> str:
    """By class and family of metrics: from how much below to how much above a prediction 90 % is measured, and how much
    of what was held out such a range of the other folds holds."""
    lines = [
        "| " + " | ".join(RANGE_HEADS) + " |",
        "|" + " --- |" * 2 + " ---: |" * (len(RANGE_HEADS) - 2),
    ]
    for row in rows:
        ends = (f"{100 * (float(row[key] or 0) - 1):+.0f}" for key in ("low", "high"))
        cells = [row["class"], row["family"], row["n"], *ends, row["ranged"], _per_cent(row["covered"])]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


MARK = "<!-- what follows is written by `make score` -->"


def document(before: str, parts: Sequence[str]) -> str:
    """The text of docs/accuracy.md: what stands above the mark stays, the rest is new."""
    kept = before.split(MARK)[0].rstrip()
    return "\n\n".join([kept, MARK, *(part.strip() for part in parts)]) + "\n"
