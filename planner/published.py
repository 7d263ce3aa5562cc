"""Published measurements as configurations and values: what a row of the collection says, checked.

A configuration is everything but metric and value; all of its rows stay together when data are split. Standard library
only.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from kvbench.errors import KvbenchError
from kvbench.workloads.options import LARGEST, SMALLEST

COLUMNS = (
    *("model", "num_gpus", "tp", "precision", "engine", "input_len", "output_len", "concurrency_or_rate", "metric"),
    *("value", "group", "note", "load_kind", "load_value", "arrivals", "num_requests", "input_tokens_mean"),
    *("output_tokens_mean", "gpu_id", "shape"),
)
LOADS = ("rate", "closed", "offline", "batch", "other")
MOST_TOKENS = 10**6
"""Longer than any model reads, and would take minutes to run."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """What was run. Numbers that a row leaves open are None; `tp` is None too where it is no number."""

    group: str
    engine: str
    card: str
    shape: str
    precision: str
    tp: int | None
    cards: int | None
    load: str
    load_value: float | None
    arrivals: str
    requests: int | None
    input_tokens: float | None
    output_tokens: float | None
    lengths: str
    """The lengths as the row's own text has them: rows without means differ by these."""

    @property
    def key(self) -> str:
        """One line that names it, in the split file too."""
        told = (self.load, _short(self.load_value), self.arrivals, _short(self.requests))
        load = ":".join(part for part in told if part)
        cards = f"{_short(self.cards) or '?'}x{self.card or '?'}/tp{_short(self.tp) or '?'}"
        model = f"{self.shape or '?'} {self.precision}"
        return " | ".join((self.group, self.engine, model, cards, self.lengths, load))

    @property
    def family(self) -> tuple[str, str, str, str, int | None]:
        """What a new load or length leaves unchanged."""
        return self.engine, self.card, self.shape, self.precision, self.tp


@dataclass(frozen=True, slots=True)
class Settings:
    """What the note of a row says of how the engine was started; None where it does not."""

    requests: int | None = None
    sequences: int | None = None
    batched_tokens: int | None = None
    memory_share: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One measured value."""

    line: int
    configuration: Configuration
    settings: Settings
    metric: str
    value: float
    note: str


def read_rows(path: Path) -> list[Row]:
    """All rows of a CSV file with the collection's columns. KvbenchError names line and column of the first fault."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets begin theirs with a mark
            return parse_rows(file, str(path))
    except OSError as error:
        raise KvbenchError(f"cannot read {path}: {error.strerror}; name a CSV file of published measurements") from None
    except UnicodeDecodeError:
        raise KvbenchError(f"{path} is not UTF-8 text; name a CSV file of published measurements") from None


def parse_rows(lines: Iterable[str], name: str) -> list[Row]:
    """The rows of the CSV text `lines`; `name` stands in errors."""
    reader = csv.DictReader(lines)
    try:
        names = list(reader.fieldnames or [])
        missing = [column for column in COLUMNS if column not in names]
        if missing:
            raise KvbenchError(f"{name} lacks the column {missing[0]}; it needs {', '.join(COLUMNS)}")
        if twice := next((column for column in COLUMNS if names.count(column) > 1), None):
            raise KvbenchError(f"{name} has the column {twice} twice; keep one of them")
        rows = [_row(reader.line_num, values, name) for values in reader]
    except csv.Error as error:
        raise KvbenchError(f"{name} line {reader.line_num}: {error}") from None
    if not rows:
        raise KvbenchError(f"{name} has no rows below its header")
    return _share_notes(rows)


def _share_notes(rows: list[Row]) -> list[Row]:
    """What one row of a configuration tells of its requests holds for those that tell nothing."""
    told: dict[Configuration, int] = {}
    for row in rows:
        if row.settings.requests:
            told.setdefault(row.configuration, row.settings.requests)
    return [
        replace(row, settings=replace(row.settings, requests=told.get(row.configuration)))
        if row.settings.requests is None
        else row
        for row in rows
    ]


def _row(line: int, values: dict[str, str], name: str) -> Row:
    where = f"{name} line {line}"
    if None in values or any(values[column] is None for column in COLUMNS):
        raise KvbenchError(f"{where}: the number of fields is not that of the header")
    value = _number(values, "value", where)
    if value is None:
        raise KvbenchError(f"{where}: no value")
    load = values["load_kind"]
    if load not in LOADS:
        raise KvbenchError(f"{where}: load_kind is {load!r}; known are {', '.join(LOADS)}")
    tp, cards, requests = (_count(values, column, where) for column in ("tp", "num_gpus", "num_requests"))
    load_value = _number(values, "load_value", where)
    if load_value is None and load in ("rate", "closed", "batch"):
        raise KvbenchError(f"{where}: load_kind {load} needs a load_value")
    configuration = Configuration(
        group=values["group"],
        engine=values["engine"],
        card=values["gpu_id"],
        shape=values["shape"],
        precision=values["precision"],
        tp=tp,
        cards=cards,
        load=load,
        load_value=load_value,
        arrivals=values["arrivals"],
        requests=requests,
        input_tokens=_number(values, "input_tokens_mean", where, MOST_TOKENS),
        output_tokens=_number(values, "output_tokens_mean", where, MOST_TOKENS),
        lengths=f"{values['input_len']}+{values['output_len']}",
    )
    return Row(line, configuration, read_note(values["note"]), values["metric"], value, values["note"])


def read_note(note: str) -> Settings:
    """What a note tells of the engine's flags and of how many requests there were."""
    return Settings(
        requests=_found(r"\b(\d+) (?:requests|prompts)\b", note),
        sequences=_found(r"max[-_]num[-_]seqs[= ](\d+)", note),
        batched_tokens=_found(r"max[-_]num(?:[-_]batched)?[-_]tokens[= ](\d+)", note),
        memory_share=_share(r"gpu_mem(?:ory)?_util(?:ization)?=(0\.\d+)", note),
    )


def _found(pattern: str, note: str) -> int | None:
    match = re.search(pattern, note)
    return min(int(match[1][:12]), LARGEST) or None if match else None


def _share(pattern: str, note: str) -> float | None:
    match = re.search(pattern, note)
    return float(match[1]) or None if match else None


def _number(values: dict[str, str], column: str, where: str, most: int = LARGEST) -> float | None:
    """A finite number above 0 that is not beyond `most`; None where the field is blank."""
    text = values[column].strip()
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        raise KvbenchError(f"{where}: {column} is {text!r}, not a number") from None
    if not math.isfinite(number) or number <= 0:
        raise KvbenchError(f"{where}: {column} is {text}; give a finite number above 0")
    if not SMALLEST <= number <= most:
        raise KvbenchError(f"{where}: {column} is {text}; give a number from {SMALLEST:f} to {most:,}")
    return number


def _count(values: dict[str, str], column: str, where: str) -> int | None:
    """A whole number above 0; None where the field holds words ("submitter choice") or nothing."""
    text = values[column].strip()
    if not re.fullmatch(r"[-+]?\d+(\.\d*)?", text):
        return None
    number = float(text)
    if not 1 <= number <= LARGEST or number != int(number):
        raise KvbenchError(f"{where}: {column} is {text}; give a whole number above 0, at most {LARGEST:,}")
    return int(number)


def _short(number: float | None) -> str:
    return "" if number is None else f"{number:g}"
