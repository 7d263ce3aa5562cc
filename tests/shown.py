"""Commands that a page shows, run as they stand in it, so that no number there is typed in."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class Shell:
    """Runs `kvbench …` in a folder, where its runs then lie."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def run(self, command: str) -> Any:
        """What the command, which ends with `--format json`, writes to standard output."""
        name, *words = shlex.split(command)
        assert name == "kvbench"
        done = subprocess.run(
            [sys.executable, "-m", "kvbench", *words],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{command}\nended with {done.returncode}: {done.stderr.strip()}")
        return json.loads(done.stdout)


def block(*commands: str) -> str:
    """Commands as a block of a page."""
    return "\n".join(["```", *(_wrapped(command) for command in commands), "```"])


def _wrapped(command: str, width: int = 112) -> str:
    """A command over as many lines as it needs; a shell reads them as one."""
    lines = [""]
    for word in command.split(" --"):
        flag = f" --{word}" if lines[0] else word
        if len(lines[-1]) + len(flag) > width:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += flag
    return "\n".join(lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """A Markdown table; all but the first `words` columns to the right."""
    lines = [head, [*["---"] * words, *["---:"] * (len(head) - words)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
