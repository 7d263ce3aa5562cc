"""The rows of a run as three Parquet files, and back again without a loss."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvbench.metrics.memory import split
from kvbench.metrics.records import Hold, RequestRecord, Run, StepRecord

if TYPE_CHECKING:
    import pyarrow as pa

Row = TypeVar("Row", RequestRecord, StepRecord, Hold)

_STEP_COLUMNS = ("used_tokens", "reserved_tokens", "internal_tokens", "rounding_tokens", "free_tokens")
_REQUEST_COLUMNS = (
    *("request", "sample", "scheduled_s", "sent_s", "admitted_s", "first_s", "last_s", "token_s"),
    *("input_tokens", "output_tokens", "cached_tokens", "preemptions", "status", "reason"),
)


def write_run(folder: Path, run: Run) -> None:
    """Write `requests.parquet`, `steps.parquet` (with the parts of the pool) and `holds.parquet`, each flushed to disk.

    AssertionError where the run's memory does not add up.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    requests = _table(RequestRecord, run.requests)
    unsaved = [name for name in ("prompt_token_ids", "output_token_ids") if requests[name].null_count == len(requests)]
    requests = requests.drop_columns(unsaved)
    requests = requests.select([*_REQUEST_COLUMNS, *(n for n in requests.column_names if n not in _REQUEST_COLUMNS)])

    parts, steps = split(run), _table(StepRecord, run.steps)
    at = steps.column_names.index("used_tokens") + 1
    for offset, name in enumerate(("reserved", "internal", "rounding")):
        steps = steps.add_column(at + offset, f"{name}_tokens", pa.array(getattr(parts, name)))

    for name, table in (("requests", requests), ("steps", steps), ("holds", _table(Hold, run.holds))):
        with (folder / f"{name}.parquet").open("wb") as file:
            pq.write_table(table, file)
            file.flush()
            os.fsync(file.fileno())


def read_rows(folder: Path, name: str, kind: type[Row]) -> list[Row]:
    """The rows of `name`.parquet; columns beside the record's own are left out."""
    import pyarrow.parquet as pq

    table = pq.read_table(folder / f"{name}.parquet")
    own = [field.name for field in fields(kind) if field.name in table.column_names]
    return [kind(**row) for row in table.select(own).to_pylist()]


def _table(kind: type[Row], rows: Sequence[Row]) -> pa.Table:
    """One column for each field, typed by its annotation: a column of nothing but None keeps its type."""
    import pyarrow as pa

    types = {
        "int": pa.int64(),
        "str": pa.string(),
        "float": pa.float64(),
        "float | None": pa.float64(),
        "list[float]": pa.list_(pa.float64()),
        "list[int] | None": pa.list_(pa.int64()),
    }
    return pa.table(
        {
            field.name: pa.array([getattr(row, field.name) for row in rows], types[str(field.type)])
            for field in fields(kind)
        }
    )
