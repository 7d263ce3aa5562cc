"""The run folder when its writer dies or the disk refuses, at every single call to the file system in turn.

A death is final: from that call on nothing happens any more, no clean-up either. It comes before the call, after it,
or, where data are flushed, with half of them lost. A refusal is one failed call; the writer lives on.
"""

from __future__ import annotations

import csv
import io
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import KvbenchError
from kvbench.metrics.records import Hold, RequestRecord, Run, StepRecord
from kvbench.metrics.store import RunFolder, is_unused

CALLS = (
    *((os, name) for name in ("open", "mkdir", "rename", "replace", "fsync", "ftruncate", "write", "unlink", "rmdir")),
    (io, "open"),
)
"""Where the store and what it calls meet the file system; `io.open` is the one behind `Path.open`."""

WAYS = ("before", "after", "torn", "refused")
PLAN = ("a", "b", "c")


class Died(BaseException):
    """The process is gone."""


class Disk:
    """Counts the calls to the file system, in `log`, and lets one of them go wrong in one of `WAYS`. It flushes
    nothing: what a process has written outlives it anyhow."""

    def __init__(self, fatal: int = -1, way: str = "before") -> None:
        self.log: list[str] = []
        self.dead = False
        self._fatal, self._way = fatal, way

    def call(self, name: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.dead:
            raise Died
        self.log.append(name)
        if len(self.log) - 1 != self._fatal:
            return None if name == "fsync" else real(*args, **kwargs)
        if self._way == "refused":
            raise OSError(28, "No space left on device")
        self.dead = True
        if self._way == "after":
            opened = real(*args, **kwargs)
            if name == "open":
                os.close(opened) if isinstance(opened, int) else opened.close()
        if self._way == "torn" and name == "fsync" and stat.S_ISREG(os.fstat(args[0]).st_mode):
            os.truncate(args[0], os.fstat(args[0]).st_size // 2)
        raise Died

    def ways(self) -> Iterator[tuple[int, str]]:
        """Every way in which every call could have gone wrong."""
        for number, name in enumerate(self.log):
            for way in WAYS:
                if way != "torn" or name == "fsync":
                    yield number, way


@contextmanager
def on(disk: Disk) -> Iterator[None]:
    """Calls to the file system go through `disk`."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in CALLS:
            real = getattr(module, name)

            def through(*args: Any, _name: str = name, _real: Any = real, **kwargs: Any) -> Any:
                return disk.call(_name, _real, *args, **kwargs)

            patch.setattr(module, name, through)
        yield


def a_run() -> Run:
    request = RequestRecord(0, 0.0, 0.0, 3, 2, 0, 0.0, 0.5, 1.0, [0.5, 1.0], 2, status="finished", reason="length")
    steps = [StepRecord(i, i / 2, (i + 1) / 2, 0.1, 0.4, 1, 3 * (1 - i), i, 1, 6, 3 + i, 1, 0, 0, 8, 3 + i, 4, 4)
             for i in (0, 1)]  # fmt: skip
    return Run([request], steps, [Hold(0, 0, 2, 4, 4, 4)], 8, 1.0)


def sweep(path: Path, finished: list[str]) -> None:
    """A sweep's whole life with its folder, as `cli/conduct.py` leads it; `finished` notes each cell once stored."""
    fresh = is_unused(path)
    folder = RunFolder.create(path, {"cells": list(PLAN), "sessions": 1}) if fresh else RunFolder.resume(path)
    with closing(folder):  # as the kernel does for the dead
        if not fresh:
            folder.update_manifest(sessions=folder.manifest["sessions"] + 1)
        for cell in PLAN:
            if cell not in folder.stored():
                folder.write_cell(cell, {"status": "ok", "seed": PLAN.index(cell)}, a_run() if cell == "a" else None)
            finished.append(cell)
        folder.update_manifest(finished="now")


def check_whole(path: Path, finished: list[str]) -> None:
    """What a reader and the next writer find: every finished cell, whole, and perhaps the one in hand; valid files."""
    if is_unused(path):
        assert not finished
        return
    folder = RunFolder.open(path)
    assert folder.manifest["cells"] == list(PLAN)
    stored = [row["cell"] for row in folder.rows()]
    assert stored == list(PLAN[: len(stored)]) and len(finished) <= len(stored) <= len(finished) + 1
    for row in folder.rows():
        assert row["status"] == "ok" and row["seed"] == PLAN.index(row["cell"])
        assert not folder.has_run(row["cell"]) if row["cell"] != "a" else folder.run("a") == a_run()
    folder.catch_up()
    if stored:
        table = csv.DictReader((path / "cells.csv").read_text().splitlines())
        assert [row["cell"] for row in table] == stored


def files(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def test_whatever_call_goes_wrong_no_finished_cell_is_lost_and_no_half_one_is_seen(tmp_path: Path) -> None:
    with on(whole := Disk()):
        sweep(tmp_path / "untouched", [])
    assert len(whole.log) > 40
    for number, way in whole.ways():
        path, finished = tmp_path / f"{number}-{way}", list[str]()
        with on(Disk(number, way)), pytest.raises(KvbenchError if way == "refused" else Died) as held:
            sweep(path, finished)
        assert held.tb  # whoever still looks at the error keeps the dead folder's frames alive, but not its lock
        with on(Disk()):
            check_whole(path, finished)
            sweep(path, finished := [])
            assert finished == list(PLAN)
            check_whole(path, finished)
        assert files(path) == files(tmp_path / "untouched"), (number, way)


def test_a_resumption_may_die_as_well(tmp_path: Path) -> None:
    """After a death in the middle of the second cell, before every call of the resumption."""
    with on(whole := Disk()):
        sweep(tmp_path / "untouched", [])
    middle = [number for number, name in enumerate(whole.log) if name == "rename"][1]

    def half_done(path: Path) -> Path:
        with on(Disk(middle)), pytest.raises(Died):
            sweep(path, [])
        return path

    once = half_done(tmp_path / "once")
    with on(resumption := Disk()):
        sweep(once, [])
    for number in range(len(resumption.log)):
        path, finished = half_done(tmp_path / f"{number}"), list[str]()
        with on(Disk(number)), pytest.raises(Died):
            sweep(path, finished)
        with on(Disk()):
            check_whole(path, finished or ["a"])
            sweep(path, finished := [])
            check_whole(path, finished)
        assert files(path) == files(tmp_path / "untouched"), number


def test_a_name_is_given_only_to_what_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a loss of power: all is flushed before it is renamed, and the folder around it after."""
    flushed: set[int] = set()
    stale: set[Path] = set()

    def flush(handle: int) -> None:
        flushed.add(os.fstat(handle).st_ino)
        stale.difference_update([folder for folder in stale if folder.stat().st_ino == os.fstat(handle).st_ino])

    def move(source: Path, target: Path) -> None:
        for path in (source, *source.rglob("*")):
            assert path.stat().st_ino in flushed, f"{path} is renamed before it is on disk"
        stale.add(target.parent)
        replace(source, target)

    replace = os.replace
    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "rename", move)
    monkeypatch.setattr(os, "replace", move)
    sweep(tmp_path / "run", [])
    assert not stale and {tmp_path.stat().st_ino, (tmp_path / "run").stat().st_ino} <= flushed


def test_a_cell_that_was_refused_can_be_written_by_the_same_writer(tmp_path: Path) -> None:
    with on(once := Disk()):
        folder = RunFolder.create(tmp_path / "run", {})
        begun = len(once.log)
        folder.write_cell("whole", {}, a_run())
    for number in range(len(once.log) - begun):
        cell = f"cell{number}"
        with on(Disk(number, "refused")), pytest.raises(KvbenchError, match="No space left on device"):
            folder.write_cell(cell, {}, a_run())
        if cell not in folder.stored():
            folder.write_cell(cell, {}, a_run())
        assert folder.run(cell) == a_run()
    folder.catch_up()
    assert len((tmp_path / "run" / "cells.csv").read_text().splitlines()) == 1 + len(folder.rows())
