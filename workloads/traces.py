"""Recorded traffic: when requests came and how long they were, from files of Azure, of Mooncake and of our own runs.

| `--dataset` | file                                             | brings                                        |
| `azure`     | CSV: `TIMESTAMP, ContextTokens, GeneratedTokens` | times and lengths                             |
| `mooncake`  | JSONL: `timestamp` (ms), lengths, `hash_ids`     | and which blocks of 512 tokens prompts share  |
| `run`       | a cell's folder, or its `requests.parquet`       | times, lengths, and the ids if they are saved |

Token ids that a file does not bring are random. Rows come in the order of their times, the first at 0.
"""

from __future__ import annotations

import csv
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import KvbenchError
from kvbench.metrics.records import FINISHED
from kvbench.workloads.datasets import Drawn, Outline, Segment, allowed_ids
from kvbench.workloads.lengths import LONGEST
from kvbench.workloads.streams import stream
from kvbench.workloads.text import check_ids

if TYPE_CHECKING:
    from kvbench.workloads.datasets import Ids

HASHED = 512
"""Tokens of a block that a `hash_id` of Mooncake's stands for."""

LATEST_S = 1e12
"""No time of a trace lies beyond it: thirty thousand years."""

_STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:?\d\d)?")


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request as it was recorded. `blocks` name what its prompt is made of, `prompt` are its very ids, `limit` is
    what it declared; each only where the file knows it."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    prompt: tuple[int, ...] | None = None
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """The rows of a trace as a data set, always from the first one on. `note` says what a reader should know of it."""

    name: str
    rows: Sequence[Recorded]
    vocab_size: int
    excluded: frozenset[int] = frozenset()
    note: str = ""
    _blocks: dict[tuple[int, int], list[int]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def longest_input(self) -> int:
        return max(row.input_tokens for row in self.rows)

    @property
    def longest_output(self) -> int:
        """As long as the longest declared, where the file knows it: room is made for that."""
        return max(row.limit or row.output_tokens for row in self.rows)

    @property
    def rate_per_s(self) -> float | None:
        """(N - 1) / (last - first); None where all come at once."""
        return (len(self.rows) - 1) / self.rows[-1].at_s if self.rows[-1].at_s else None

    def first(self, count: int) -> Trace:
        """The first `count` rows; KvbenchError where there are fewer."""
        if count > len(self.rows):
            raise KvbenchError(f"--dataset {self.name} has {len(self.rows)} requests, fewer than --num-prompts {count}")
        return replace(self, rows=self.rows[:count], _blocks={})

    def played(self, speed: float, duration_s: float | None = None) -> list[float]:
        """When the requests come at so many times the speed, up to `duration_s`."""
        times = [row.at_s / speed for row in self.rows]
        return times if duration_s is None else times[: bisect_right(times, duration_s)]

    def draw(self, count: int, seed: int) -> list[Drawn]:
        """The first `count` rows; ids that the file does not bring are random, equal blocks of one seed being equal."""
        assert count <= len(self.rows), f"{count} rows of {len(self.rows)}"
        allowed = allowed_ids(self.vocab_size, self.excluded)
        rows = self.rows[:count]
        bare = sum(row.input_tokens for row in rows if row.prompt is None and not row.blocks)
        ids = iter(allowed[stream(seed, "tokens").integers(0, allowed.size, size=bare)].tolist())
        drawn = []
        for row in rows:
            if row.prompt is not None:
                prompt = row.prompt
            elif row.blocks:
                whole = [token for block in row.blocks for token in self._block(block, seed, allowed)]
                prompt = tuple(whole[: row.input_tokens])
            else:
                prompt = tuple(islice(ids, row.input_tokens))
            drawn.append(Drawn(prompt, row.output_tokens, row.limit))
        return drawn

    def _block(self, block: int, seed: int, allowed: Ids) -> list[int]:
        if (seed, block) not in self._blocks:
            ids = allowed[stream(seed, f"tokens.block.{block}").integers(0, allowed.size, size=HASHED)]
            self._blocks[seed, block] = ids.tolist()
        return self._blocks[seed, block]

    def outline(self, count: int, seed: int) -> list[Outline]:
        return [Outline(row.input_tokens, row.output_tokens, _segments(row)) for row in self.rows[:count]]


def _segments(row: Recorded) -> tuple[Segment, ...]:
    if row.prompt is not None:
        return tuple((token, 1) for token in row.prompt)
    rest = row.input_tokens % HASHED or HASHED
    return tuple((block, HASHED if place else rest) for place, block in enumerate(row.blocks, 1 - len(row.blocks)))


def read_trace(name: str, path: Path, vocab_size: int, excluded: frozenset[int] = frozenset()) -> Trace:
    """The trace at `path`, every row of it checked. KvbenchError names file and line."""
    rows, note = _READERS[name](path)
    if not rows:
        raise KvbenchError(f"{path} holds no requests; give --dataset {name} another --dataset-path")
    for row in rows:
        if row.prompt is not None:
            try:
                check_ids(row.prompt, vocab_size)
            except KvbenchError as error:
                raise KvbenchError(f"{path}: {error}") from error
    rows.sort(key=lambda row: row.at_s)
    start_s = rows[0].at_s
    return Trace(name, [replace(row, at_s=row.at_s - start_s) for row in rows], vocab_size, excluded, note)


def trace_file(path: Path) -> Path:
    """The file to read: that of our own runs may be named by its cell's folder."""
    return path / "requests.parquet" if path.is_dir() else path


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """The lines of a text file that are not blank, each with its place."""
    if path.exists() and not path.is_file():
        raise KvbenchError(f"--dataset-path {path} is no file; name the file of a trace")
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{path}:{number}"
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise KvbenchError(f"{where} is no UTF-8 text: {error.reason}") from error
                if text.strip():
                    yield where, text
    except OSError as error:
        raise KvbenchError(f"cannot read --dataset-path {path}: {error.strerror}") from error


def _read_azure(path: Path) -> tuple[list[Recorded], str]:
    columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    rows: list[Recorded] = []
    head: list[str] = []
    origin: datetime | None = None
    for where, line in _lines(path):
        try:
            fields = [word.strip() for word in next(csv.reader([line]))]
        except csv.Error as error:
            raise KvbenchError(f"{where} is no line of CSV: {error}") from error
        if not head:
            head = fields
            for column in columns:
                if column not in head:
                    raise KvbenchError(f"{where} lacks the column {column}; an Azure trace has {', '.join(columns)}")
            continue
        if len(fields) != len(head):
            raise KvbenchError(f"{where} has {len(fields)} fields where the first line has {len(head)}")
        stamp, tokens_in, tokens_out = (fields[head.index(column)] for column in columns)
        found = _STAMP.fullmatch(stamp)
        try:
            at = datetime.fromisoformat(found[1] + (found[3] or "")) if found else None
        except ValueError:
            at = None
        if found is None or at is None or (origin and (at.tzinfo is None) != (origin.tzinfo is None)):
            raise KvbenchError(f"{where} has the TIMESTAMP {stamp!r}; write 2023-11-16 18:15:46.6805900")
        origin = origin or at
        at_s = (at - origin).total_seconds() + float(found[2] or 0)
        rows.append(Recorded(at_s, _count(tokens_in, columns[1], where), _count(tokens_out, columns[2], where)))
    return rows, ""


def _read_mooncake(path: Path) -> tuple[list[Recorded], str]:
    rows: list[Recorded] = []
    for where, line in _lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise KvbenchError(f"{where} is not JSON: {error}") from error
        keys = ("timestamp", "input_length", "output_length", "hash_ids")
        if not isinstance(row, dict) or (missing := [key for key in keys if key not in row]):
            what = f"lacks {missing[0]!r}" if isinstance(row, dict) else "must be an object"
            raise KvbenchError(f"{where} {what}; a Mooncake trace has {', '.join(keys)} in every line")
        at_ms, blocks = row["timestamp"], row["hash_ids"]
        if type(at_ms) not in (int, float) or not 0 <= at_ms <= LATEST_S * 1000:
            raise KvbenchError(f"{where} has the timestamp {at_ms!r}; it must be milliseconds of at least 0")
        tokens = [_count(row[key], key, where) for key in keys[1:3]]
        if not isinstance(blocks, list) or any(type(block) is not int for block in blocks):
            raise KvbenchError(f"{where} must have whole numbers as its hash_ids")
        if len(blocks) != -(-tokens[0] // HASHED):
            raise KvbenchError(
                f"{where} has {len(blocks)} hash_ids for an input_length of {tokens[0]}; there must be one for each "
                f"{HASHED} tokens begun, {-(-tokens[0] // HASHED)}"
            )
        rows.append(Recorded(at_ms / 1000, tokens[0], tokens[1], tuple(blocks)))
    return rows, ""


def _read_run(path: Path) -> tuple[list[Recorded], str]:
    """What a cell was asked; requests that did not finish count with the answer that they declared."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = trace_file(path)
    if not file.is_file():
        what = "is no file" if file.exists() else "is not there"
        raise KvbenchError(f"cannot read --dataset-path {path}: {file} {what}; name a cell's folder (runs/…/cells/…)")
    columns = ["request", "scheduled_s", "input_tokens", "output_tokens", "max_tokens", "status"]
    try:
        table = pq.read_table(file)
        known = [name for name in (*columns, "sample", "prompt_token_ids") if name in table.column_names]
        found: list[dict[str, Any]] = table.select(known).to_pylist()
    except OSError as error:
        raise KvbenchError(
            f"cannot read --dataset-path {file}: {error.strerror or 'it is damaged'}; name a cell's folder"
        ) from error
    except pa.ArrowInvalid as error:
        raise KvbenchError(
            f"{file} is no parquet file; name a cell's folder (runs/…/cells/…) of a kvbench run"
        ) from error
    if missing := [name for name in columns if name not in known]:
        raise KvbenchError(f"{file} lacks the column {missing[0]}; give the requests.parquet of a kvbench run")
    rows, unfinished = [], 0
    for number, row in enumerate(found):
        if row.get("sample"):
            continue
        where, ids = f"{file}, row {number}", row.get("prompt_token_ids")
        at_s, limit = row["scheduled_s"], _count(row["max_tokens"], "max_tokens", where)
        if type(at_s) not in (int, float) or not abs(at_s) <= LATEST_S:
            raise KvbenchError(f"{where} has scheduled_s {at_s!r}; it must be a time in seconds")
        finished = row["status"] == FINISHED
        unfinished += not finished
        tokens = _count(row["input_tokens"], "input_tokens", where)
        if ids is not None and not (isinstance(ids, list) and all(type(token) is int for token in ids)):
            raise KvbenchError(f"{where} must have whole numbers as its prompt_token_ids")
        if ids is not None and len(ids) != tokens:
            raise KvbenchError(f"{where} has {len(ids)} prompt_token_ids but {tokens} input_tokens")
        answer = _count(row["output_tokens"], "output_tokens", where) if finished else limit
        rows.append(Recorded(at_s, tokens, answer, prompt=None if ids is None else tuple(ids), limit=limit))
    note = f"{unfinished} of its requests did not finish and count with the answer they declared" if unfinished else ""
    return rows, note


def _count(word: object, name: str, where: str) -> int:
    """A number of tokens, from a CSV field or a JSON value."""
    digits = isinstance(word, str) and word.isascii() and word.isdigit() and len(word) < 12
    value = int(word) if isinstance(word, str) and digits else word
    if type(value) is not int or not 1 <= value <= LONGEST:
        raise KvbenchError(f"{where} has {name} {word!r}; it must be a whole number from 1 to {LONGEST:,}")
    return value


_READERS: dict[str, Callable[[Path], tuple[list[Recorded], str]]] = {
    "azure": _read_azure,
    "mooncake": _read_mooncake,
    "run": _read_run,
}
TRACES = tuple(_READERS)
"""The data sets that say when their requests came."""
