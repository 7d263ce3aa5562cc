"""The nouns of the engine, in the order in which one becomes the next. Standard library only; read this first.

A `Request` is what somebody asked. A `Sequence` (in `sequence.py`) is the engine's one mutable object for it (for each
sample of it, where several are asked for), from arrival to metrics. A `Chunk` is the piece of a sequence that one step
computes, a `Batch` the chunks of one step and the `Move`s of rows that come before them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvbench.errors import KvbenchError

if TYPE_CHECKING:
    from kvbench.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen; the default is greedy. Penalty first, then temperature, then top-p, as vLLM and
    transformers do.

    `temperature` 0 is greedy, whatever `top_p` says. `top_p` keeps the fewest, most likely tokens that reach it
    together. `repetition_penalty` above 1 makes tokens of prompt and answer less likely, below 1 more. `seed` fixes the
    draws of one request, in any batch.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise KvbenchError(f"temperature must be a number of at least 0, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise KvbenchError(f"top-p must be above 0 and at most 1, not {self.top_p}")
        if not 0.01 <= self.repetition_penalty <= 100:
            raise KvbenchError(f"repetition penalty must be from 0.01 to 100, not {self.repetition_penalty}")
        if not 0 <= self.seed < 2**63:
            raise KvbenchError(f"a sampling seed must be at least 0 and below 2**63, not {self.seed}")

    @property
    def plain(self) -> bool:
        """Whether the token is simply that of the highest logit."""
        return not self.temperature and self.repetition_penalty == 1


GREEDY = Sampling()

SAMPLE = 2**32
"""A sequence's id is its request's, plus this for each sample before it."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked: `prompt` (token ids) and how long the answer may be.

    `max_tokens` is declared by the client and known to everyone. `output_tokens` is the answer's true length where the
    workload drew it (the request then ignores end-of-sequence), None where the answer ends by itself at one of
    `stop_ids`. The scheduler never reads it; an allocator reads it only under the two policies that say so (`pow2`,
    `oracle`). `scheduled_s` is when the load wants it sent, on the run's clock. Only requests of one `cache_salt` share
    cached prefixes. `n` answers are drawn, samples 0 to n - 1, each of the same length and with a seed of its own.

    A later `turn` of a conversation goes on from the request of the id before it: the load puts that one's prompt and
    real answer before its own and schedules it `think_s` after that one's end. `sent_s` is when a load that holds
    requests back let this one go; None: at once.
    """

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    output_tokens: int | None = None
    scheduled_s: float = 0.0
    sampling: Sampling = GREEDY
    stop_ids: frozenset[int] = frozenset()
    cache_salt: str = ""
    n: int = 1
    turn: int = 0
    think_s: float = 0.0
    sent_s: float | None = None

    def sampling_of(self, sample: int) -> Sampling:
        """How the tokens of one of the samples are chosen: each has a seed of its own."""
        if sample == 0:
            return self.sampling
        return replace(self.sampling, seed=(self.sampling.seed + sample * 0x9E3779B97F4A7C15) % 2**63)

    def __post_init__(self) -> None:
        if not self.id < SAMPLE:
            raise KvbenchError(f"request {self.id} has a number of 2**32 or more; count from 0")
        if not self.prompt:
            raise KvbenchError(f"request {self.id} has an empty prompt; give it at least one token")
        if not self.n >= 1:
            raise KvbenchError(f"request {self.id} asks for {self.n} samples; it must ask for at least 1")
        if not self.max_tokens >= 1:
            raise KvbenchError(f"request {self.id} declares max_tokens {self.max_tokens}; it must be at least 1")
        if self.output_tokens is not None and not 1 <= self.output_tokens <= self.max_tokens:
            raise KvbenchError(
                f"request {self.id} answers {self.output_tokens} tokens but declares {self.max_tokens}; "
                "an answer has at least one token and no more than max_tokens"
            )
        if not (math.isfinite(self.scheduled_s) and self.scheduled_s >= 0):
            raise KvbenchError(f"request {self.id} is scheduled at {self.scheduled_s} s; it needs a time of at least 0")


@dataclass(slots=True)
class Chunk:
    """Positions `start` to `end - 1` of a sequence, computed in one step. `samples`: its last position is the last
    known token, so the step yields a new one, and the first one of each sample that waits for this prompt."""

    sequence: Sequence
    start: int
    end: int
    samples: bool

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def draws(self) -> int:
        """How many tokens its last position gives: one to its sequence and to each sample that waits for the prompt."""
        return 1 + len(self.sequence.forks) if self.samples else 0


COPY, OUT, IN = "copy", "out", "in"


@dataclass(frozen=True, slots=True)
class Move:
    """`rows` rows to be copied from `source` on to `target` on: within the arena (`copy`), `out` of it to host memory,
    or back `in`."""

    way: str
    source: int
    target: int
    rows: int


class Batch:
    """What one step computes, in scheduling order: the next token of each of the `decodes`, then the `fresh` chunks,
    those of prompts and of what is computed again. All tokens lie flat, one chunk after the other. The `moves` come
    before anything else: all that go out, then the copies, then all that come in, each kind at once. The decodes read
    `context` keys and values in all, their own new ones among them."""

    __slots__ = ("_chunks", "_positions", "context", "decodes", "fresh", "moves", "step")

    def __init__(
        self,
        step: int,
        fresh: Iterable[Chunk] = (),
        moves: Iterable[Move] = (),
        decodes: Iterable[Sequence] = (),
        context: int = 0,
    ) -> None:
        self.step = step
        self.fresh = tuple(fresh)
        self.moves = tuple(moves)
        self.decodes = tuple(decodes)
        self.context = context
        self._chunks: tuple[Chunk, ...] | None = None
        self._positions: list[int] | None = None

    @property
    def positions(self) -> list[int]:
        """Of each of the decodes, the position of the token it computes; made at the first look, as `chunks` are."""
        if self._positions is None:
            self._positions = [one.computed for one in self.decodes]
        return self._positions

    @property
    def sequences(self) -> list[Sequence]:
        """All that it computes something of, in order."""
        return [*self.decodes, *(chunk.sequence for chunk in self.fresh)]

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """All of them, made at the first look, which has to come before the step is committed."""
        if self._chunks is None:
            ones = [Chunk(one, one.computed, one.computed + 1, samples=True) for one in self.decodes]
            self._chunks = (*ones, *self.fresh)
        return self._chunks

    @property
    def tokens(self) -> int:
        return len(self.decodes) + sum(chunk.length for chunk in self.fresh)

    def drawn(self) -> list[Sequence]:
        """The sequences to which it gives a token each, in order."""
        return [*self.decodes, *self.drawn_fresh()]

    def drawn_fresh(self) -> list[Sequence]:
        """Those that did not decode before."""
        found: list[Sequence] = []
        for chunk in self.fresh:
            if chunk.samples:
                found.append(chunk.sequence)
                found.extend(chunk.sequence.forks)
        return found

    def moved(self, way: str) -> int:
        """Rows that are moved this way."""
        return sum(move.rows for move in self.moves if move.way == way)


@dataclass(slots=True)
class Ticket:
    """A batch in flight. `done_s` is when it will be done on virtual time, None on a real device; `pending` is the
    executor's own. `later_s` are the seconds that each of the steps after it takes, which are as uneventful and run in
    one go with it."""

    batch: Batch
    done_s: float | None = None
    pending: object = None
    later_s: Ordered[float] = ()

    def ends_s(self) -> list[float]:
        """When each of its steps will be done on virtual time."""
        assert self.done_s is not None, "a real device tells no times"
        return list(itertools.accumulate(self.later_s, initial=self.done_s))


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a batch yielded: one token for each sequence drawn by its chunks, in order (None where tokens are not
    computed), and the seconds it took inside the executor."""

    tokens: list[int] | None
    device_s: float


@dataclass(slots=True)
class Usage:
    """Present facts of an allocator, in rows (one row holds one token): `filled` hold data, `held` belong to some
    sequence (filled ones included), `free` to none. `cached` counts the free rows whose content could be reused,
    `saved` the filled rows that sharing spares: those of each sequence, added up, are `filled + saved`; `saved_held` is
    the same of held ones. `swapped` rows lie in host memory, outside the pool."""

    filled: int
    held: int
    free: int
    cached: int = 0
    saved: int = 0
    saved_held: int = 0
    swapped: int = 0


@dataclass(slots=True)  # not frozen, which makes it several times slower to make: there are as many as events
class Holding:
    """A change of what a sequence holds: from now on `held` rows of its own, of which its policy `asked` for some, and
    `shared` filled ones together with others. With neither it gave everything back, `filled` rows of it full, those it
    had shared included. What is shared is held, once, by the sequence `COMMON`."""

    sequence: int
    held: int
    asked: int
    filled: int
    shared: int = 0


COMMON = -1
"""The number under which rows are held that several sequences share; requests count from 0."""
