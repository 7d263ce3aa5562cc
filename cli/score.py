"""`kvbench score`: predicts published measurements and says how far off that is. Needs neither a GPU nor torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvbench.planner.published import Row
    from kvbench.planner.score import Outcome


def score(
    file: Annotated[Path, typer.Argument(help="Published measurements: CSV with the columns docs/accuracy.md names.")],
    output_format: Annotated[str, typer.Option("--format", help="table | markdown | csv | json")] = "table",
    cross_validate: Annotated[
        bool, typer.Option("--cross-validate", help="Fit to the file itself, each group predicted without it.")
    ] = False,
    rows: Annotated[
        Path | None, typer.Option("--rows", help="Also write every row with its prediction to this CSV file.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", help="Also bring the tables of this Markdown file up to date.")
    ] = None,
    split: Annotated[
        Path | None, typer.Option("--split", help="Also write which configuration is in which fold to this CSV file.")
    ] = None,
    intervals: Annotated[
        Path | None,
        typer.Option("--intervals", help="Also write the ranges of --cross-validate to this TOML file."),
    ] = None,
) -> None:
    """Predict published measurements, by the shipped parameters or by cross-validation, beside the datasheet's roofline
    (peak rates, nothing else).

    MAPE, signed bias and 90th percentile by metric and class, and how many of the measured values its 90 % ranges hold;
    refused and excluded rows are counted by rule.
    """
    from kvbench.cli.config import FORMATS
    from kvbench.errors import KvbenchError
    from kvbench.planner.published import read_rows
    from kvbench.planner.score import cross_score, score
    from kvbench.planner.shipped import shipped
    from kvbench.planner.tally import refusals, summarise
    from kvbench.reports.accuracy import render
    from kvbench.workloads.options import choice

    output_format = choice(output_format, FORMATS, "--format")
    measured = read_rows(file)
    for option, path in (("--rows", rows), ("--split", split), ("--report", report), ("--intervals", intervals)):
        _check_target(option, path, file)
    if intervals and not cross_validate:
        raise KvbenchError("--intervals are quantiles of what was held out; add --cross-validate")
    model = shipped()
    outcomes = cross_score(measured, model, _say) if cross_validate else score(measured, model)
    lines = [line.as_row() for line in summarise(outcomes)]
    refused, excluded, share = refusals(outcomes)
    sys.stdout.write(render(lines, output_format))
    sys.stdout.flush()
    counts = _counts("refused", refused), _counts("excluded", excluded)
    _say(f"{len(measured):,} rows; {'; '.join(counts)}; {share:.1%} of the rows with a known card and shape refused")
    if rows:
        _write(rows, _row_table(outcomes))
    if split:
        _write(split, _split_table(measured))
    if intervals:
        _write_ranges(intervals, outcomes, file)
    if report:
        _report(report, outcomes, file, cross_validate, measured)


def _check_target(option: str, path: Path | None, file: Path) -> None:
    """What is written never takes the place of what is read."""
    from kvbench.errors import KvbenchError

    if path is not None and path.exists() and path.samefile(file):
        raise KvbenchError(f"{option} {path} is the file that is scored; name another one to write")


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _counts(word: str, counts: dict[str, int]) -> str:
    each = ", ".join(f"{rule} {count}" for rule, count in sorted(counts.items()))
    return f"{word} {sum(counts.values())}" + (f" ({each})" if each else "")


def _write(path: Path, table: Sequence[Sequence[object]]) -> None:
    import csv

    from kvbench.errors import KvbenchError

    try:
        with path.open("w", encoding="utf-8", newline="") as out:
            csv.writer(out, lineterminator="\n").writerows(table)
    except OSError as error:
        raise KvbenchError(f"cannot write {path}: {error.strerror}") from None


def _row_table(outcomes: Sequence[Outcome]) -> list[list[object]]:
    table: list[list[object]] = [
        [
            "line",
            "configuration",
            "metric",
            "class",
            "measured",
            "predicted",
            "baseline",
            "low",
            "high",
            "refused",
            "excluded",
            "reason",
        ]
    ]
    for one in outcomes:
        row = one.row
        values = (one.predicted, one.baseline, one.low, one.high, one.refused, one.excluded, one.reason)
        table.append([row.line, row.configuration.key, row.metric, one.kind, row.value, *values])
    return table


def _write_ranges(path: Path, outcomes: Sequence[Outcome], file: Path) -> None:
    import datetime

    from kvbench.errors import KvbenchError
    from kvbench.planner.intervals import ranges_of, write
    from kvbench.planner.score import residuals_of

    text = write(ranges_of(residuals_of(outcomes)), file.name, datetime.date.today().isoformat())
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise KvbenchError(f"cannot write {path}: {error.strerror}") from None


def _split_table(rows: Sequence[Row]) -> list[list[object]]:
    """Configurations and the fold each is in under the three kinds of hold-out."""
    from kvbench.planner.crossvalidate import rate_fold

    seen = {row.configuration.key: row.configuration for row in rows}
    table: list[list[object]] = [["configuration", "new_rate_fold", "new_model_fold", "new_card_fold"]]
    return table + [[key, rate_fold(one), one.shape, one.card] for key, one in sorted(seen.items())]


RANGES = """Where a measurement lies with a probability of 90 %, relative to its prediction (`planner/intervals.py`):
quantiles of a class's held-out residuals, which `intervals.toml` keeps and a sweep of a virtual card shows. How much
such a range holds is counted honestly: each row's own is taken from the folds it is not in."""


def _report(path: Path, outcomes: Sequence[Outcome], file: Path, crossed: bool, rows: Sequence[Row]) -> None:
    import datetime

    from kvbench.errors import KvbenchError
    from kvbench.planner.tally import coverage, refusals, summarise
    from kvbench.reports.accuracy import document, ranges_table, table_of

    lines = [line.as_row() for line in summarise(outcomes)]
    refused, excluded, share = refusals(outcomes)
    how = "cross-validation" if crossed else "the shipped parameters"
    command = f"kvbench score {file.name}{' --cross-validate' if crossed else ''}"
    parts = [
        f"## Errors\n\n{datetime.date.today().isoformat()}, `{command}`: {len(rows):,} rows, predicted by {how}.",
        f"{_counts('Refused', refused)}: {share:.1%} of the rows with a known card and shape. "
        f"{_counts('Excluded', excluded)}, of which each class counts its own below.",
    ]
    for kind in dict.fromkeys(str(line["class"]) for line in lines):
        mine = [line for line in lines if line["class"] == kind]
        parts += [f"### {kind.capitalize()}", table_of([line for line in mine if line["n"] or line["baseline_n"]])]
        if whole := [str(line["metric"]) for line in mine if not line["n"] and not line["baseline_n"]]:
            parts.append(f"Refused or excluded as a whole: {', '.join(whole)}.")
    if crossed:
        parts[2:2] = ["### 90 % ranges", RANGES, ranges_table(coverage(outcomes))]
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else "# How far predictions are off\n"
        path.write_text(document(before, parts), encoding="utf-8")
    except UnicodeDecodeError:
        raise KvbenchError(f"--report {path} is not UTF-8 text; name a Markdown file") from None
    except OSError as error:
        raise KvbenchError(f"cannot write {path}: {error.strerror}") from None
