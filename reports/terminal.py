"""What a sweep prints when it ends: context, tables, warnings, what was found and where the page is, in plain text."""

from __future__ import annotations

from pathlib import Path

from kvbench.metrics.store import RunFolder
from kvbench.reports.context import checks, evidence, headline_facts, price, reasons
from kvbench.reports.groups import Results
from kvbench.reports.plain import wrapped
from kvbench.reports.sentence import find
from kvbench.reports.sign import WARNING
from kvbench.reports.tables import render
from kvbench.reports.words import THIN


def closing(folder: RunFolder, report: Path | None = None, width: int = 80) -> str:
    """The last words of a run, `width` characters wide except where a table needs more; `report` is the page."""
    results = Results.of(folder)
    head = wrapped(f"{evidence(results)}: {', '.join(headline_facts(folder, results))}", width)
    table = render(results, "table", width) if results.rows else ""
    return _joined(head, table, commentary(folder, report, width))


def commentary(folder: RunFolder, report: Path | None = None, width: int = 80) -> str:
    """What is said about the tables: warnings, what was found and where the page is."""
    results = Results.of(folder)
    return _joined(
        "".join(wrapped(line, width, "! ") for line in warnings(folder, results)),
        wrapped(str(find(results, folder.manifest)), width),
        f"Report: {report}\n" if report else "",
    )


def _joined(*parts: str) -> str:
    return "\n".join(part for part in parts if part).replace(THIN, " ")


def warnings(folder: RunFolder, results: Results) -> list[str]:
    """What to beware of, a line each: the checks that do not hold, every reason of a failed cell, a missing price."""
    found = [check.text for check in checks(folder, results) if check.kind == WARNING]
    found += reasons(results)
    if results.ok and not price(folder.manifest):
        found.append("no price: give --price USD_PER_HOUR for $/1M out")
    return found
