"""The run folder: what a run leaves behind, readable with none of this code.

    run.json                        schema version, configuration, seeds, environment
    cells.csv                       one row per cell, the flat table
    cells/<cell>/result.json        all numbers of one cell
    cells/<cell>/*.parquet          requests, steps and holds; absent where the cell could not run

A file or a cell's folder appears whole or not at all: it is written beside its place under a hidden name, flushed to
disk and renamed. Readers pass over hidden names, which only a killed writer leaves; the next writer removes them.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import KvbenchError
from kvbench.metrics.parquet import read_rows, write_run
from kvbench.metrics.records import Hold, RequestRecord, Run, StepRecord

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1

LEADING_COLUMNS = (
    *("cell", "backend", "evidence", "device", "model", "dtype", "reserve", "block_size", "max_model_len"),
    *("attention", "tp", "concurrency", "request_rate", "input_tokens", "output_tokens", "repeat", "seed"),
    *("window", "status", "reason"),
)
"""How `cells.csv` begins; the metrics follow in the order in which the rows bring them."""

_RUN_NUMBERS = tuple(field.name for field in fields(Run) if not field.type.startswith("list"))


class RunFolder:
    """One run on disk, made by `create` or `open`. `manifest` is the content of `run.json`. It may have many readers
    and one writer."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def create(cls, path: str | Path, manifest: dict[str, Any]) -> RunFolder:
        """A new run at `path`. KvbenchError where something is there already or it cannot be written."""
        folder = cls(Path(path), {"schema_version": SCHEMA_VERSION, **manifest})
        text = _to_json(folder.manifest)
        with _writing(folder.path):
            if folder.path.exists() and (not folder.path.is_dir() or any(folder.path.iterdir())):
                raise KvbenchError(f"{path} exists and is not an empty folder; choose another --output")
            (folder.path / "cells").mkdir(parents=True)
            _write_file(folder.path / "run.json", text)
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

    def update_manifest(self, **facts: Any) -> None:
        """Add facts that are known only later, such as the end or an interruption."""
        self.manifest.update(facts)
        with _writing(self.path):
            _write_file(self.path / "run.json", _to_json(self.manifest))

    def write_cell(self, cell_id: str, row: Mapping[str, object], run: Run | None = None) -> None:
        """Store a cell, once: its `row` and, where it ran, its records; then bring `cells.csv` up to date.

        The run's own numbers (`pool_tokens`, `end_s`, ...) join the row.
        """
        target = self._cell(cell_id)
        assert not target.exists(), f"cell {cell_id} is stored already"
        assert row.get("cell", cell_id) == cell_id, f"a row of {row['cell']} for cell {cell_id}"
        numbers = {} if run is None else {name: getattr(run, name) for name in _RUN_NUMBERS}
        text = _to_json({"cell": cell_id, **row, **numbers})
        with _writing(target):
            self._sweep()
            aside = target.with_name(f".{cell_id}")
            aside.mkdir(parents=True)
            try:
                if run is not None:
                    write_run(aside, run)
                _write_file(aside / "result.json", text)
                aside.rename(target)
            except BaseException:
                shutil.rmtree(aside)
                raise
            _flush_folder(target.parent)
            _write_file(self.path / "cells.csv", _to_csv(self.rows()))

    def rows(self) -> list[dict[str, Any]]:
        """The rows of all cells as they were written, in the natural order of their ids."""
        cells = (entry for entry in (self.path / "cells").glob("[!.]*") if entry.is_dir())
        return [_read_json(cell / "result.json") for cell in sorted(cells, key=lambda cell: _natural(cell.name))]

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
        return Run(
            requests=read_rows(cell, "requests", RequestRecord),
            steps=read_rows(cell, "steps", StepRecord),
            holds=read_rows(cell, "holds", Hold),
            **{name: row[name] for name in _RUN_NUMBERS},
        )

    def _cell(self, cell_id: str) -> Path:
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,199}", cell_id), f"{cell_id!r} cannot be a folder's name"
        return self.path / "cells" / cell_id

    def _sweep(self) -> None:
        for leftover in (self.path / "cells").glob(".*"):
            if leftover.is_dir():
                shutil.rmtree(leftover)


def latest(runs_dir: str | Path) -> Path:
    """The folder of the run that was written to last. KvbenchError where there is none."""
    manifests = list(Path(runs_dir).glob("*/run.json"))
    if not manifests:
        raise KvbenchError(f"{runs_dir} holds no run; make one with `kvbench sweep` or name a run's folder")
    return max(manifests, key=lambda path: (path.stat().st_mtime_ns, path)).parent


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise KvbenchError(f"cannot write {path}: {error.strerror or error}; choose another --output") from error


def _write_file(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}")
    with aside.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    _flush_folder(path.parent)


def _flush_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
