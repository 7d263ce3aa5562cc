"""The run folder: what a run leaves behind, readable with none of this code.

    run.json                        schema version, configuration, seeds, environment
    cells.csv                       one row per cell, the flat table
    cells/<cell>/result.json        all numbers of one cell
    cells/<cell>/*.parquet          requests, steps and holds; absent where the cell could not run

A file or a cell's folder appears whole or not at all: it is written beside its place under a hidden name, flushed to
disk and renamed. Readers pass over hidden names, which only a killed writer leaves; the next writer removes them.
`cells.csv` is a copy of what the cells hold: a kill may leave it one cell behind, and whoever opens the run next to
write or to report brings it up to date.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import KvbenchError
from kvbench.metrics.files import LOCK, flush_folder, lock_holder, make_folder, take_lock, write_file, writing
from kvbench.metrics.parquet import read_rows, write_run
from kvbench.metrics.records import Hold, RequestRecord, Run, SampleRecord, StepRecord

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1

LEADING_COLUMNS = (
    *("cell", "backend", "evidence", "device", "model", "dtype", "reserve", "block_size", "max_model_len"),
    *("attention", "tp", "concurrency", "request_rate", "input_tokens", "output_tokens", "repeat", "seed"),
    *("window", "status", "reason"),
)
"""How `cells.csv` begins; the metrics follow in the order in which the rows bring them."""

_OF_A_KILLED_START = {LOCK, ".run.json"}
_RUN_NUMBERS = tuple(field.name for field in fields(Run) if not field.type.startswith("list"))


class RunFolder:
    """One run on disk. `manifest` is the content of `run.json`.

    `open` gives a reader, of which there may be many; `create` and `resume` give the one writer. It keeps others out
    until `close`, its end or its process's.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self._unlock: weakref.finalize[[int], RunFolder] | None = None
        self._rows: dict[str, dict[str, Any]] = {}  # the writer's copy of all rows

    @classmethod
    def create(cls, path: str | Path, manifest: dict[str, Any]) -> RunFolder:
        """A new run at `path`. KvbenchError where something is there already or it cannot be written."""
        folder = cls(Path(path), {"schema_version": SCHEMA_VERSION, **manifest})
        text = _to_json(folder.manifest)
        with writing(folder.path):
            refuse_used(folder.path)
            make_folder(folder.path)
            with folder._locked():
                refuse_used(folder.path)  # once more: nobody else can begin now
                write_file(folder.path / "run.json", text)
                make_folder(folder.path / "cells")
        return folder

    @classmethod
    def resume(cls, path: str | Path) -> RunFolder:
        """The run at `path`, to be written on: what a killed writer left half done is gone, the rest stands.

        KvbenchError as from `open`, and where another process is writing.
        """
        folder = cls.open(path)
        with writing(folder.path), folder._locked():
            folder.manifest = cls.open(path).manifest  # the last writer may have added to it before it let go
            make_folder(folder.path / "cells")
            for leftover in (folder.path / "cells").glob(".*"):
                if leftover.is_dir():
                    shutil.rmtree(leftover)
            folder.catch_up()
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """The run at `path`. KvbenchError where there is none or this version cannot read it."""
        path = Path(path)
        if not path.is_dir():
            raise KvbenchError(f"{path} is no folder; name the folder of a run")
        if not (path / "run.json").is_file():
            raise KvbenchError(f"{path} has no run.json; name the folder of a run")
        manifest = _read_json(path / "run.json")
        version = manifest.get("schema_version")
        if type(version) is not int or version < 1:
            raise KvbenchError(f"{path / 'run.json'} is malformed: its schema_version is {version!r}")
        if version > SCHEMA_VERSION:
            raise KvbenchError(
                f"{path} was written by a newer kvbench (schema {version}, this one reads {SCHEMA_VERSION}); upgrade"
            )
        return cls(path, manifest)

    def close(self) -> None:
        """Let others write; this folder can only be read from now on."""
        if self._unlock is not None:
            self._unlock()
            self._unlock = None

    def update_manifest(self, **facts: Any) -> None:
        """Add facts that are known only later, such as the end or an interruption."""
        assert self._unlock is not None, "opened to be read"
        self.manifest.update(facts)
        with writing(self.path):
            write_file(self.path / "run.json", _to_json(self.manifest))

    def write_cell(self, cell_id: str, row: Mapping[str, object], run: Run | None = None) -> None:
        """Store a cell, once: its `row` and, where it ran, its records; then bring `cells.csv` up to date.

        The run's own numbers (`pool_tokens`, `end_s`, ...) join the row.
        """
        assert self._unlock is not None, "opened to be read"
        target = self._cell(cell_id)
        assert not target.exists(), f"cell {cell_id} is stored already"
        assert row.get("cell", cell_id) == cell_id, f"a row of {row['cell']} for cell {cell_id}"
        numbers = {} if run is None else {name: getattr(run, name) for name in _RUN_NUMBERS}
        numbers = {name: number for name, number in numbers.items() if number is not None}
        text = _to_json({"cell": cell_id, **row, **numbers})
        with writing(target):
            aside = target.with_name(f".{cell_id}")
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            try:
                if run is not None:
                    write_run(aside, run)
                write_file(aside / "result.json", text)
                aside.rename(target)
            except BaseException:
                shutil.rmtree(aside, ignore_errors=True)
                raise
            self._rows[cell_id] = json.loads(text)
            flush_folder(target.parent)
            self._write_table()

    def catch_up(self) -> None:
        """Bring `cells.csv` up to date with the cells, which a kill or Ctrl-C between the two leaves behind. Where
        another process is writing it is left to that one."""
        with writing(self.path):
            passing = take_lock(self.path) if self._unlock is None else None
            if self._unlock is None and passing is None:
                return
            try:
                self._rows = self._read_rows()
                self._write_table()
            finally:
                if passing is not None:
                    os.close(passing)

    def _write_table(self) -> None:
        """`cells.csv` from the writer's rows, unless it says the same already."""
        table, text = self.path / "cells.csv", _to_csv([self._rows[name] for name in sorted(self._rows, key=_natural)])
        if self._rows and not (table.is_file() and table.read_bytes() == text.encode()):
            write_file(table, text)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of all cells as they were written, in the natural order of their ids."""
        return list(self._read_rows().values())

    def _read_rows(self) -> dict[str, dict[str, Any]]:
        return {name: self._read_row(name) for name in sorted(self.stored(), key=_natural)}

    def _read_row(self, name: str) -> dict[str, Any]:
        """A cell's row. One that is damaged becomes a failed row of the cell that was planned."""
        try:
            row = _read_json(self.path / "cells" / name / "result.json")
            if row.get("cell") != name:
                raise KvbenchError("it holds no row of this cell")
        except KvbenchError as error:
            planned = [cell for cell in self.manifest.get("cells") or [] if isinstance(cell, dict)]
            known = next((cell for cell in planned if cell.get("id") == name), {})
            reason = f"cells/{name}/result.json is damaged: {error}; delete that folder to have the cell measured again"
            return {**known, "cell": name, "status": "failed", "reason": reason}
        return row

    def stored(self) -> set[str]:
        """The ids of all cells that have a row, whatever became of them."""
        return {entry.name for entry in (self.path / "cells").glob("[!.]*") if entry.is_dir()}

    def cells(self) -> pd.DataFrame:
        """The rows as a table with the columns of `cells.csv`."""
        import pandas as pd

        rows = self.rows()
        return pd.DataFrame(rows, columns=_columns(rows))

    def has_run(self, cell_id: str) -> bool:
        """Whether the cell has records: not where it could not run."""
        return (self._cell(cell_id) / "requests.parquet").is_file()

    def run(self, cell_id: str) -> Run:
        """The records of a cell, equal to those that were written. KvbenchError where it has none."""
        cell = self._cell(cell_id)
        if not self.has_run(cell_id):
            raise KvbenchError(f"cell {cell_id} of {self.path} has no records; its row in cells.csv says why")
        row = _read_json(cell / "result.json")
        remote = row.get("pool_tokens") is None
        unknown = dict.fromkeys(("pool_tokens", "external_fragmentation_events")) if remote else {}
        numbers: dict[str, Any] = {**unknown, **{name: row[name] for name in _RUN_NUMBERS if name in row}}
        return Run(
            requests=read_rows(cell, "requests", RequestRecord),
            steps=[] if remote else read_rows(cell, "steps", StepRecord),
            holds=read_rows(cell, "holds", Hold),
            samples=read_rows(cell, "steps", SampleRecord) if remote else [],
            **numbers,
        )

    def _cell(self, cell_id: str) -> Path:
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,199}", cell_id), f"{cell_id!r} cannot be a folder's name"
        return self.path / "cells" / cell_id

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Become the writer, unless something goes wrong at once. KvbenchError where there is one already."""
        handle = take_lock(self.path)
        if handle is None:
            raise KvbenchError(
                f"{lock_holder(self.path)} is writing {self.path}; wait for its end or choose another --output"
            )
        self._unlock = weakref.finalize(self, os.close, handle)
        try:
            yield
        except BaseException:
            self.close()
            raise


def is_unused(path: Path) -> bool:
    """Whether a new run can begin here: nothing is there, or an empty folder. A start that was killed left nothing."""
    return not path.exists() or (path.is_dir() and {entry.name for entry in path.iterdir()} <= _OF_A_KILLED_START)


def refuse_used(path: Path) -> None:
    """KvbenchError where a new run cannot begin because something is there."""
    if not is_unused(path):
        run = ": it holds a run, which --resume goes on with" if (path / "run.json").is_file() else ""
        raise KvbenchError(f"{path} exists and is not an empty folder{run}; choose another --output")


def latest(runs_dir: str | Path, *, unfinished: bool = False) -> Path:
    """The folder of the run that was written to last, of those that lack cells where it must be `unfinished`.
    KvbenchError where there is none."""
    manifests = list(Path(runs_dir).glob("*/run.json"))
    manifests = [path for path in manifests if not unfinished or _lacks_cells(path.parent)]
    if not manifests:
        what = (
            "no unfinished run; name the one to resume with --output DIR"
            if unfinished
            else ("no run; make one with `kvbench sweep` or name a run's folder")
        )
        raise KvbenchError(f"{runs_dir} holds {what}")
    return max(manifests, key=lambda path: (path.stat().st_mtime_ns, path)).parent


def _lacks_cells(path: Path) -> bool:
    """Whether the run has fewer cells than it planned; no where its run.json cannot be read."""
    with suppress(KvbenchError):
        folder = RunFolder.open(path)
        return len(folder.stored()) < len(folder.manifest.get("cells") or [])
    return False


def _to_json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; KvbenchError where the file is none (NaN and Infinity are not JSON)."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    except OSError as error:
        raise KvbenchError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise KvbenchError(f"{path} is malformed: {error}") from error
    if not isinstance(value, dict):
        raise KvbenchError(f"{path} is malformed: it holds no object")
    return value


def _columns(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys([*LEADING_COLUMNS, *(name for row in rows for name in row)]))


def _to_csv(rows: list[dict[str, Any]]) -> str:
    """Full precision; None is an empty field."""
    out = io.StringIO()
    writer = csv.DictWriter(out, _columns(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _natural(text: str) -> list[tuple[int, str]]:
    """Sorts c8 before c16."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]
