"""`kvbench doctor`: what there is to measure with, what is in the way, and what to do about it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvbench.engine.diagnosis import Finding


def doctor(
    output_format: Annotated[str, typer.Option("--format", help="table | markdown | csv | json")] = "table",
) -> None:
    """Look at devices, driver and libraries, test each attention kernel, and say what is missing and how to get it.

    The exit code is 1 where something is wrong."""
    from rich.console import Console

    from kvbench.cli.config import FORMATS
    from kvbench.engine.diagnosis import WRONG
    from kvbench.reports.findings import render
    from kvbench.workloads.options import choice

    output_format = choice(output_format, FORMATS, "--format")
    with Console(stderr=True).status("looking at this machine"):
        found = list(findings())
    width = shutil.get_terminal_size((100, 24)).columns
    sys.stdout.write(render([asdict(one) for one in found], output_format, width))
    if any(one.state == WRONG for one in found):
        raise typer.Exit(1)


def findings() -> Iterator[Finding]:
    """All of them, in the order in which a run would meet them."""
    from kvbench.engine import diagnosis
    from kvbench.engine.nvml import find_driver
    from kvbench.engine.telemetry import packages, rapl_domains

    yield from diagnosis.libraries()
    yield from diagnosis.cards(find_driver(), diagnosis.this_torch(), diagnosis.this_system(), os.getpid())
    yield from diagnosis.processor()
    yield diagnosis.energy(len(rapl_domains()), len(packages()))
    yield from diagnosis.kernels()
    yield from diagnosis.models()
