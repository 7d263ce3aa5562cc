"""Command lines to be killed, without the seconds that each would need to load torch.

A `Nursery` is a process that has loaded everything and forks a child for every command. A child is a process of its
own, and its death by SIGKILL the real one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).resolve().parent.parent
KILLED = -9

SERVE = """
import gc, json, os, signal, sys, time
import jinja2, pandas, psutil, pyarrow.parquet, scipy.stats, torch
import transformers.models.llama.modeling_llama
import kvbench.cli.conduct, kvbench.cli.job, kvbench.cli.measure, kvbench.cli.progress, kvbench.cli.show
import kvbench.contiguous.cache, kvbench.engine.runner, kvbench.paged.cache, kvbench.reports.html
from kvbench.cli.app import main

def child(args, log):
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    try:
        main(args)
    except SystemExit as end:
        sys.stdout.flush()
        os._exit(end.code or 0)
    except BaseException:
        import traceback
        traceback.print_exc()
    os._exit(99)

gc.freeze()  # what is loaded stays: a child need not look through it at every collection
print("ready", flush=True)
for line in sys.stdin:
    args, log, kill_after_s = json.loads(line)
    pid = os.fork()
    if not pid:
        child(args, log)
    deadline_s = time.monotonic() + kill_after_s if kill_after_s is not None else float("inf")
    while not (done := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline_s:
        time.sleep(0.002)
    if not done[0]:
        os.kill(pid, signal.SIGKILL)
        done = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(done[1]), flush=True)
"""


class Nursery:
    """Runs `kvbench` commands in a folder, one at a time, each until its end or its death."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "log"
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVE],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        assert self._process.stdout is not None and self._process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.__exit__(kind, error, at)

    def run(self, *args: str, kill_after_s: float | None = None) -> int:
        """The exit code, or KILLED."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([args, str(self._log), kill_after_s]) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    @property
    def said(self) -> str:
        """What the last command wrote on standard output and standard error."""
        return self._log.read_text()
