"""The points of a sweep: what is compared, under how much load, over which lengths.

The fields are columns of `cells.csv` and of the plan in `run.json`, so whoever plans, stores or reports a cell reads
the same nouns from the same names.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from kvbench.errors import KvbenchError

BATCHINGS = ("continuous", "static")
PREEMPTIONS = ("recompute", "swap")


class _Columns:
    """A noun whose fields are columns."""

    __slots__ = ()

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Read from a row; what it lacks has its default."""
        return cls(**{field.name: row[field.name] for field in fields(cls) if field.name in row})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Variant(_Columns):
    """What is compared: a backend under its policies.

    `reserve` is how much it sets aside for a request (None where it has nothing to choose). Requests join and leave
    batches at any step (`continuous`) or only as a whole (`static`). With `prefix_caching` equal beginnings are stored
    once. Whoever loses its memory computes again (`recompute`) or is copied to host memory and back (`swap`).
    """

    backend: str
    reserve: str | None = None
    batching: str = BATCHINGS[0]
    prefix_caching: bool = False
    preemption: str = PREEMPTIONS[0]

    @property
    def extras(self) -> tuple[str, ...]:
        """What it has beside a reservation that its backend does not have by itself, each in a word or two."""
        has = {
            "static": self.batching == "static",
            "prefix cache": self.prefix_caching,
            "swap": self.preemption == "swap",
        }
        return tuple(word for word, true in has.items() if true)

    def __str__(self) -> str:
        """`contiguous max + static`, `paged + prefix cache + swap`."""
        return " + ".join([" ".join(filter(None, (self.backend, self.reserve))), *self.extras])


@dataclass(frozen=True, slots=True)
class LoadPoint(_Columns):
    """How much is asked: `concurrency` clients (closed loop) or `request_rate` requests a second (open loop); neither
    where the data set says when."""

    concurrency: int | None = None
    request_rate: float | None = None

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.request_rate is not None:
            raise KvbenchError("--concurrency and --request-rate are two different loads; give one of them")

    @property
    def size(self) -> float:
        return self.request_rate or self.concurrency or 0.0

    @property
    def number(self) -> str:
        """As somebody typed it: `16`, `0.5`."""
        return f"{self.size:,.10g}" if self.size else "–"

    def __str__(self) -> str:
        if self.request_rate is not None:
            return f"{self.number} requests/s"
        if self.concurrency is None:
            return "the recorded load"
        return f"{self.number} user{'s' if self.concurrency != 1 else ''}"


@dataclass(frozen=True, slots=True)
class Context(_Columns):
    """What a request is made of: the asked lengths in tokens (None where the data set brings its own), after
    `prefix_tokens` that all share, answered `samples` times."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    prefix_tokens: int = 0
    samples: int = 1

    @property
    def single(self) -> Context:
        """The context with the same prompts that asks for one answer."""
        return replace(self, samples=1)

    @property
    def size(self) -> tuple[int, int, int, int]:
        """Grows with the lengths, then with the prefix, then with the samples."""
        tokens_in, tokens_out = self.input_tokens or 0, self.output_tokens or 0
        return tokens_in + tokens_out, tokens_in, self.prefix_tokens, self.samples

    def told(self, varied: Container[str] = ()) -> str:
        """In words. No prefix and a single sample are said only where the grid has others: `varied` are such fields."""
        lengths = {"in": self.input_tokens, "out": self.output_tokens}
        said = [f"{tokens:,} tokens {way}" for way, tokens in lengths.items() if tokens is not None]
        if self.prefix_tokens or "prefix_tokens" in varied:
            said.append(f"a shared prefix of {self.prefix_tokens:,} tokens" if self.prefix_tokens else "no prefix")
        if self.samples > 1 or "samples" in varied:
            said.append(f"{self.samples:,} samples" if self.samples > 1 else "1 sample")
        return " and ".join([", ".join(said[:-1]), said[-1]] if len(said) > 1 else said) or "its own lengths"

    def __str__(self) -> str:
        return self.told()
