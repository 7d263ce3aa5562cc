"""The rows of a run as three Parquet files, and back again without a loss."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvbench.errors import KvbenchError
from kvbench.metrics.memory import split
from kvbench.metrics.records import Hold, RequestRecord, Run, SampleRecord, StepRecord

if TYPE_CHECKING:
    import pyarrow as pa

Row = TypeVar("Row", RequestRecord, StepRecord, SampleRecord, Hold)

_NOT_ALWAYS = (
    *("prompt_token_ids", "output_token_ids"),
    *("due_s", "asked_tokens", "asked_output_tokens", "told_tokens", "told_cached_tokens", "streamed_tokens"),
    *("chunks", "empty_chunks"),
)
"""Columns of requests that are left out where nothing is known: unsaved tokens, and what only a server brings."""
_REQUEST_COLUMNS = (
    *("request", "sample", "scheduled_s", "sent_s", "admitted_s", "first_s", "last_s", "token_s"),
    *("input_tokens", "output_tokens", "cached_tokens", "preemptions", "status", "reason"),
)


def write_run(folder: Path, run: Run) -> None:
    """Write `requests.parquet`, `steps.parquet` (with the parts of the pool) and `holds.parquet`, each flushed to disk.

    AssertionError where the run's memory does not add up.
    """
    import pyarrow.parquet as pq

    requests = _requests(run)
    unsaved = [name for name in _NOT_ALWAYS if requests[name].null_count == len(requests)]
    requests = requests.drop_columns(unsaved)
    requests = requests.select([*_REQUEST_COLUMNS, *(n for n in requests.column_names if n not in _REQUEST_COLUMNS)])

    tables = {"requests": requests, "steps": _steps(run), "holds": _table(Hold, run.holds)}
    for name, table in tables.items():
        with (folder / f"{name}.parquet").open("wb") as file:
            pq.write_table(table, file)
            file.flush()
            os.fsync(file.fileno())


def _requests(run: Run) -> pa.Table:
    """A row a request; of a server null where nobody knows."""
    import pyarrow as pa

    requests = _table(RequestRecord, run.requests)
    if run.remote:
        unknown = pa.nulls(len(requests), pa.int64())
        known = {"cached_tokens": requests["told_cached_tokens"], "preemptions": unknown, "swaps": unknown}
        for name, column in known.items():
            requests = requests.set_column(requests.column_names.index(name), name, column)
    return requests


def _steps(run: Run) -> pa.Table:
    """A row a step with the parts of the pool; of a server a row a sample, null where it does not tell."""
    import pyarrow as pa

    steps = _table(StepRecord, run.samples if run.remote else run.steps)
    parts = None if run.remote else split(run)
    at = steps.column_names.index("used_tokens") + 1
    for offset, name in enumerate(("reserved", "internal", "rounding")):
        rows = pa.nulls(len(steps), pa.int64()) if parts is None else pa.array(getattr(parts, name))
        steps = steps.add_column(at + offset, f"{name}_tokens", rows)
    if run.remote:
        steps = steps.append_column("kv_cache_usage", _table(SampleRecord, run.samples)["kv_cache_usage"])
    return steps


def read_rows(folder: Path, name: str, kind: type[Row]) -> list[Row]:
    """The rows of `name`.parquet; columns beside the record's own are left out, and what is null is as by default.
    KvbenchError where the file is damaged."""
    import pyarrow.parquet as pq

    path = folder / f"{name}.parquet"
    try:
        table = pq.read_table(path)
        own = [field.name for field in fields(kind) if field.name in table.column_names]
        rows = table.select(own).to_pylist()
        return [kind(**{name: value for name, value in row.items() if value is not None}) for row in rows]
    except (OSError, ValueError, TypeError) as error:  # not there, no Parquet, columns that are missing
        raise KvbenchError(
            f"{path} is damaged or gone ({type(error).__name__}); delete {folder} and --resume the run"
        ) from error


def _table(kind: type[Row], rows: Sequence[object]) -> pa.Table:
    """One column for each field, typed by its annotation: a column of nothing but None keeps its type. A field that the
    rows lack is null."""
    import pyarrow as pa

    types = {
        "int": pa.int64(),
        "str": pa.string(),
        "float": pa.float64(),
        "float | None": pa.float64(),
        "int | None": pa.int64(),
        "list[float]": pa.list_(pa.float64()),
        "list[int] | None": pa.list_(pa.int64()),
        "Sequence[int] | None": pa.list_(pa.int64()),
    }
    return pa.table(
        {
            field.name: pa.array([getattr(row, field.name, None) for row in rows], types[str(field.type)])
            for field in fields(kind)
        }
    )
