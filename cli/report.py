"""`kvbench report`: render a stored run again. Needs neither a GPU nor torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path | None, typer.Argument(help="A run's folder; default: the latest under runs/.")] = None,
    output_format: Annotated[str, typer.Option("--format", help="table | markdown | csv | json")] = "table",
) -> None:
    """Render a run again: tables on standard output and its report.html."""
    from kvbench.cli.config import FORMATS
    from kvbench.cli.show import show
    from kvbench.metrics.store import RunFolder, latest
    from kvbench.workloads.options import choice

    output_format = choice(output_format, FORMATS, "--format")
    folder = RunFolder.open(run or latest("runs"))
    folder.catch_up()
    show(folder, output_format)
