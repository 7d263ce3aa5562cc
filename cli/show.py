"""How `sweep` and `report` end: the page is written, the result goes to standard output."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbench.metrics.store import RunFolder


def show(folder: RunFolder, output_format: str) -> None:
    """Write `report.html` and print the run: as text with all that is said about it, or as markdown, csv or json with
    the commentary on standard error."""
    from kvbench.reports.groups import Results
    from kvbench.reports.html import write_report
    from kvbench.reports.tables import render
    from kvbench.reports.terminal import closing, commentary

    report = write_report(folder)
    width = shutil.get_terminal_size((100, 24)).columns
    if output_format == "table":
        sys.stdout.write(closing(folder, report, width))
        return
    sys.stdout.write(render(Results.of(folder), output_format))
    sys.stdout.flush()
    sys.stderr.write(commentary(folder, report, width))
