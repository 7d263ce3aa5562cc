"""`kvbench compare`: what two runs, or the variants of one, prove about each other. Needs neither a GPU nor torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvbench.metrics.store import RunFolder

REGRESSION = 3

OF_THE_PLAN = (
    *("variants", "loads", "contexts", "repeats", "until_ci", "seed", "metadata", "save_tokens"),
    *(
        "model",
        "weights",
        "dtype",
        "device",
        "tp",
        "kv_dtype",
        "attention",
        "gpu_file",
        "kv_bytes",
        "gpu_memory_utilization",
        "swap_bytes",
        "max_model_len",
    ),
)
"""Flags that may differ: cells and seeds are matched one by one, and what the others led to is compared instead."""


def compare(
    run: Annotated[Path, typer.Argument(help="The run to compare with, or the only one.")],
    new: Annotated[
        Path | None, typer.Argument(help="The run that is judged; default: the variants of the first among themselves.")
    ] = None,
    metric: Annotated[str, typer.Option(help="The primary metric, judged alone.")] = "output_tokens_per_s",
    fail_on_regression: Annotated[
        bool, typer.Option("--fail-on-regression", help="Exit with 3 where any verdict is worse.")
    ] = False,
    output_format: Annotated[str, typer.Option("--format", help="table | markdown | csv | json")] = "table",
) -> None:
    """Hold two runs, or the variants of one, against each other: effect, interval and verdict for each metric.

    Cells are paired by point and seed. One metric is judged alone, the others are corrected for their number.
    """
    from kvbench.cli.config import FORMATS
    from kvbench.errors import KvbenchError
    from kvbench.metrics.store import RunFolder
    from kvbench.reports.comparison import compare_folders, compare_variants, find_metric
    from kvbench.reports.comparison_tables import conclusion, note_on_level, render
    from kvbench.reports.groups import Results
    from kvbench.workloads.options import choice

    output_format = choice(output_format, FORMATS, "--format")
    primary = find_metric(metric)
    base = RunFolder.open(run)
    unlike: list[str] = []
    if new is None:
        outcome = compare_variants(Results.of(base), base.path.resolve().name, primary)
    else:
        if run.resolve() == new.resolve():
            raise KvbenchError(f"{run} and {new} are the same run; name two runs, or one to compare its variants")
        other = RunFolder.open(new)
        outcome = compare_folders(base, other, primary)
        unlike = _unlike(base, other)
    sys.stdout.write(render(outcome, output_format, unlike))
    sys.stdout.flush()
    _warn(unlike, outcome.notes)
    sys.stderr.write(f"\n{conclusion(outcome)} {note_on_level(outcome)}\n")
    if fail_on_regression and (worse := outcome.regressions):
        heads = ", ".join(dict.fromkeys(one.metric.key for one in worse))
        sys.stderr.write(f"kvbench: regression in {heads}\n")
        raise typer.Exit(REGRESSION)


def _unlike(base: RunFolder, new: RunFolder) -> list[str]:
    """In what two runs are not alike, beside what is compared: machine, versions, model, memory, load."""
    from kvbench.cli.resume import COMPARED, differences

    now = {section: new.manifest.get(section) or {} for section in COMPARED}
    found = [
        f"{label}: {was} against {is_}"
        for section, name, label, was, is_ in differences(base.manifest, now)
        if not (section == "config" and name in OF_THE_PLAN)
    ]
    for folder in (base, new):
        if forced := folder.manifest.get("forced"):
            found.append(f"{folder.path} was resumed by --force although {', '.join(map(str, forced))}")
    return found


def _warn(unlike: Sequence[str], notes: Sequence[str]) -> None:
    from rich.console import Console

    say = Console(stderr=True, highlight=False)
    for line in unlike:
        say.print(f"! NOT ALIKE: {line}", style="bold red", markup=False, soft_wrap=True)
    if unlike:
        line = "! what follows may come from these differences, not from what you meant to compare"
        say.print(line, style="bold red", markup=False, soft_wrap=True)
    for line in notes:
        say.print(f"! {line}: not compared", markup=False, soft_wrap=True)
