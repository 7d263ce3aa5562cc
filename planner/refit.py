"""Fits the shipped parameters anew: `python -m kvbench.planner.refit FILE.csv [--rounds N]`, a few minutes.

Writes `planner/parameters.toml` (run from a checkout) from scratch: priors, then all rows that are neither refused nor
excluded by the rules of docs/accuracy.md.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path

from kvbench.errors import KvbenchError
from kvbench.planner.fit import fit, objective, residuals
from kvbench.planner.published import read_rows
from kvbench.planner.residuals import fit_residuals
from kvbench.planner.score import look_at, usable
from kvbench.planner.shipped import FILE, shipped, write

HERE = Path(__file__).resolve().parent


def refit(path: Path, rounds: int, warm: bool) -> str:
    """The text of `parameters.toml` for the rows of a file; `warm` begins at the shipped ones."""
    looked = look_at(read_rows(path))
    effects: dict[tuple[str, str], float] = dict(shipped().effects) if warm else {}
    for turn in range(2 if not warm else 1):  # which rows are overloaded depends on the parameters
        cases = usable(looked.cases, effects)
        effects = fit(cases, effects, rounds if turn or warm else 4)
    left = residuals(cases, effects)
    sys.stderr.write(f"{len(cases)} configurations, loss {objective(cases, effects, left):.1f}\n")
    extra = fit_residuals(cases, left)
    return write(effects, extra, cases, path.name, datetime.date.today().isoformat())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--warm", action="store_true", help="begin at the parameters that are there")
    parser.add_argument("--output", type=Path, default=HERE / FILE)
    asked = parser.parse_args()
    try:
        text = refit(asked.file, asked.rounds, asked.warm)
    except KvbenchError as error:
        sys.exit(f"refit: {error}")
    asked.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
