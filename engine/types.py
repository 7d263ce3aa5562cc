"""The nouns of the engine, in the order in which one becomes the next. Standard library only; read this first.

A `Request` is what somebody asked. A `Sequence` is the engine's one mutable object for it (for each sample of it, where
several are asked for), from arrival to metrics. A `Chunk` is the piece of a sequence that one step computes, a `Batch`
the chunks of one step and the `Move`s of rows that come before them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace

from kvbench.errors import KvbenchError


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

_NONE: frozenset[int] = frozenset()

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


class Sequence:
    """A sample of a request being served. `tokens` is everything known (prompt, then output), `computed` how many of
    them have their keys and values stored. A step moves `computed` towards `known`; nothing else distinguishes a
    prefill from a decode.

    One that decodes gets a token in every step, so it only follows the steps of the engine (`follow`): what it knows
    and has computed is worked out when it is asked for, and it costs nothing in between. Where nobody computes tokens
    (on virtual time) they are made then, too: `stand_in`s.

    `forks` are the request's other samples while this one computes the prompt for them; they start with its end.
    `spans` keeps when output tokens appeared, as half-open ranges of steps with one token in each step.
    `cached_tokens` of the prompt were found in memory when the sequence was first admitted. In `swaps` of its
    `preemptions` its rows went to host memory, in the others they were given up. `place` orders those that run, the
    first admitted first; `due_step` and `end_step` are the steps in which it needs memory and completes its answer.
    """

    __slots__ = (
        *("request", "prompt_tokens", "truncated_tokens", "sample", "id", "sampling", "forks", "preemptions", "swaps"),
        *("admitted_s", "cached_tokens", "place", "due_step", "end_step"),
        *("_tokens", "_unmade", "_computed", "_spans", "_steps", "_since"),
    )

    def __init__(
        self, request: Request, tokens: list[int], prompt_tokens: int, truncated_tokens: int = 0, sample: int = 0
    ) -> None:
        self.request = request
        self.prompt_tokens = prompt_tokens
        self.truncated_tokens = truncated_tokens
        self.sample = sample
        self.id = request.id + sample * SAMPLE
        self.sampling = request.sampling_of(sample)
        self.forks: list[Sequence] = []
        self.preemptions = 0
        self.swaps = 0
        self.admitted_s: float | None = None
        self.cached_tokens = 0
        self.place = 0
        self.due_step = -1
        self.end_step = -1
        self._tokens = tokens
        self._unmade = 0  # of those known, the stand-ins that nobody asked for yet
        self._computed = 0
        self._spans: list[list[int]] = []
        self._steps: Steps | None = None  # followed since step `_since`, where `_computed` was right
        self._since = 0

    @classmethod
    def of(cls, request: Request, prompt: Iterable[int] | None = None, sample: int = 0) -> Sequence:
        """A sample of a request that has just arrived; `prompt` where it was cut to fit."""
        tokens = list(request.prompt if prompt is None else prompt)
        return cls(request, tokens, len(tokens), len(request.prompt) - len(tokens), sample)

    @property
    def computed(self) -> int:
        return self._computed if self._steps is None else self._computed + self._steps.done - self._since

    @computed.setter
    def computed(self, rows: int) -> None:
        assert self._steps is None, f"sequence {self.id} decodes: it computes one token a step"
        self._computed = rows

    @property
    def known(self) -> int:
        return len(self._tokens) + self._unmade if self._steps is None else self.computed + 1

    @property
    def tokens(self) -> list[int]:
        if len(self._tokens) < (known := self.known):
            self._tokens.extend(stand_ins(self, len(self._tokens), known))
            self._unmade = 0
        return self._tokens

    @property
    def spans(self) -> list[list[int]]:
        if self._steps is not None and self._steps.done > self._since:
            return self._with_span(self._since, self._steps.done)
        return self._spans

    @property
    def output(self) -> Ordered[int]:
        if len(self._tokens) == self.prompt_tokens < (known := self.known):
            return stand_ins(self, self.prompt_tokens, known)
        return self.tokens[self.prompt_tokens :]

    @property
    def generated(self) -> int:
        return self.known - self.prompt_tokens

    @property
    def decodes(self) -> bool:
        """Whether it gets a token in every step."""
        return self._steps is not None

    def follow(self, steps: Steps) -> None:
        """From now on it gets a token in every step, having computed all known ones but the last."""
        assert self._steps is None and self._computed == self.known - 1, f"sequence {self.id} cannot decode yet"
        self._steps, self._since = steps, steps.done

    def settle(self) -> tuple[int, int]:
        """It no longer gets a token in every step. Returns what it had computed when it began to, and before which
        step that was."""
        began = self._computed, self._since
        self._unmade = self.known - len(self._tokens)
        self._spans, self._computed, self._steps = self.spans, self.computed, None
        return began

    def emit(self, token: int | None, step: int) -> None:
        """It has got a token from `step` (None: nobody computed it). One that follows the steps knows without being
        told when, so it is told only what."""
        if token is not None:
            self._tokens.append(token)
        if self._steps is None:
            self._unmade += token is None
            self._spans = self._with_span(step, step + 1)

    def _with_span(self, first: int, end: int) -> list[list[int]]:
        """The spans and another one behind them."""
        if self._spans and self._spans[-1][1] == first:
            return [*self._spans[:-1], [self._spans[-1][0], end]]
        return [*self._spans, [first, end]]

    @property
    def ended(self) -> str:
        """`length` or `stop` once the answer is complete, else the empty string."""
        if not self.generated:
            return ""
        if self.stop_ids and self.tokens[-1] in self.stop_ids:
            return "stop"
        return "length" if self.generated >= self.longest else ""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end its answer; none where its length was drawn."""
        return self.request.stop_ids if self.request.output_tokens is None else _NONE

    @property
    def longest(self) -> int:
        """Tokens of the longest answer that it can give."""
        return self.request.output_tokens or self.request.max_tokens


@dataclass(slots=True)
class Steps:
    """How many steps the engine has done; the next one has this number."""

    done: int = 0


def stand_ins(sequence: Sequence, first: int, end: int) -> range:
    """Stand for the tokens of a sequence at positions `first` to `end - 1` where none are computed: negative numbers,
    equal to no others, so that no two texts are equal by chance and one that is computed again is what it was."""
    zero = -1 - (sequence.id << 24)
    return range(zero - first, zero - end, -1)


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

    __slots__ = ("_chunks", "context", "decodes", "fresh", "moves", "step")

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
