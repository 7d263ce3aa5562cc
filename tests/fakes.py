"""What stands in for a device where a test is about scheduling and memory: no tensors, no time that really passes.

`FakeExecutor` stores every token in the row the allocator gave it and reads a sequence back from its rows to make the
next token. So a row that two sequences share, that moves or is given away too early changes the answer, and a
recomputation after a preemption must give the same one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import NamedTuple

from kvbench.contiguous.slots import Slots
from kvbench.engine.clock import VirtualClock
from kvbench.engine.engine import Engine, serve
from kvbench.engine.interfaces import Allocator, Load
from kvbench.engine.scheduler import Limits, Scheduler
from kvbench.engine.static import StaticScheduler
from kvbench.engine.types import (
    COPY,
    IN,
    OUT,
    Batch,
    Holding,
    Move,
    Request,
    Sampled,
    Sequence,
    Ticket,
    Usage,
)
from kvbench.metrics.records import Run
from kvbench.paged.blocks import BlockPool

Pool = Slots | BlockPool
Token = Callable[[Ordered[int], int], int]
KINDS = ("paged-1", "paged-3", "paged-16", "paged-256", "max", "declared", "pow2", "oracle")
CACHED_KINDS = ("cached-1", "cached-3", "cached-16")
SWAPPING_KINDS = ("swapping-1", "swapping-16", "cached_swapping-3", "cached_swapping-16")
VOCABULARY = 50


def make_pool(kind: str, pool_tokens: int, max_model_len: int) -> Pool:
    """The allocator that a name of `KINDS`, `CACHED_KINDS` or `SWAPPING_KINDS` stands for."""
    name, _, size = kind.partition("-")
    if size:
        swap_tokens = pool_tokens // 2 if "swapping" in name else 0
        return BlockPool(pool_tokens, int(size), prefix_caching="cached" in name, swap_tokens=swap_tokens)
    return Slots(pool_tokens, max_model_len, kind)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`, counted out."""
    power = 1
    while power < n:
        power *= 2
    return power


def rows_of(pool: Pool, sequence: Sequence, count: int) -> list[int]:
    """Where the first `count` positions of a sequence lie in the arena."""
    if isinstance(pool, Slots):
        return [pool.base(sequence) + position for position in range(count)]
    table, size = pool.table(sequence), pool.block_size
    return [table[position // size] * size + position % size for position in range(count)]


def next_token(known: Ordered[int], sample: int = 0) -> int:
    """A pure function of all known tokens and of their order, and of the sample's number."""
    return zlib.crc32(repr(list(known)).encode(), sample) % VOCABULARY


def answer(request: Request, prompt: Ordered[int] | None = None, sample: int = 0) -> list[int]:
    """What a machine without any limits answers; `prompt` where it was cut."""
    known = list(request.prompt if prompt is None else prompt)
    output: list[int] = []
    while len(output) < (request.output_tokens or request.max_tokens):
        output.append(next_token(known + output, sample))
        if output[-1] in request.stop_ids:
            break
    return output


def cost_s(batch: Batch) -> float:
    """Seconds of a step. Sums of powers of two, so times add up without rounding."""
    return 2**-7 + batch.tokens * 2**-12


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk as it was launched, in the sequence's stay of that number; `known` is what its sequence knew then."""

    id: int
    stay: int
    start: int
    end: int
    samples: bool
    known: int


class FakeExecutor:
    """Executor over simulated rows. `batches` logs what was launched; `ends_s` are recorded ends of steps to replay."""

    def __init__(self, pool: Pool, *, token: Token = next_token, ends_s: Ordered[float] = ()) -> None:
        self.batches: list[list[Piece]] = []
        self._pool = pool
        self._token = token
        self._ends_s = ends_s
        self._arena: dict[int, int] = {}
        self._host: dict[int, int] = {}

    def launch(self, batch: Batch, now_s: float) -> Ticket:
        assert batch.step == len(self.batches), "steps are numbered without a gap"
        chunks = batch.chunks
        self.batches.append(
            [Piece(c.sequence.id, c.sequence.preemptions, c.start, c.end, c.samples, c.sequence.known) for c in chunks]
        )
        self._move(batch.moves)
        for chunk in chunks:
            rows = rows_of(self._pool, chunk.sequence, chunk.end)
            tokens = chunk.sequence.tokens
            self._arena.update(zip(rows[chunk.start :], tokens[chunk.start : chunk.end], strict=True))
        found = [
            self._token([self._arena[row] for row in rows_of(self._pool, chunk.sequence, chunk.end)], drawn.sample)
            for chunk in chunks
            for drawn in Batch(batch.step, (chunk,)).drawn()
        ]
        done_s = self._ends_s[batch.step] if self._ends_s else now_s + cost_s(batch)
        return Ticket(batch, done_s, pending=Sampled(found, (done_s - now_s) / 2))

    def _move(self, moves: Ordered[Move]) -> None:
        for way, source, target in (
            (OUT, self._arena, self._host),
            (COPY, self._arena, self._arena),
            (IN, self._host, self._arena),
        ):
            mine = [(move, row) for move in moves if move.way == way for row in range(move.rows)]
            assert len({move.target + row for move, row in mine}) == len(mine), "two moves to one row"
            found = [source[move.source + row] for move, row in mine]
            target.update((move.target + row, token) for (move, row), token in zip(mine, found, strict=True))

    def collect(self, ticket: Ticket) -> Sampled:
        assert isinstance(ticket.pending, Sampled)
        return ticket.pending


class FaultyAllocator:
    """An allocator whose `reserve` says no at the calls numbered in `fails` (from 0), whatever is free. If there are
    any it is asked in every step, for it says of nobody that there is more room than was asked for.

    The cache, which asks where rows lie, is given the allocator inside. `calls` counts the reservations asked for.
    """

    def __init__(self, inner: Allocator, fails: Collection[int]) -> None:
        self.inner = inner
        self.calls = 0
        self._fails = fails
        self._asked: dict[int, int] = {}

    @property
    def pool_tokens(self) -> int:
        return self.inner.pool_tokens

    @property
    def external_fragmentation_events(self) -> int:
        return self.inner.external_fragmentation_events

    def could_hold(self, sequence: Sequence, rows: int) -> bool:
        return self.inner.could_hold(sequence, rows)

    def reserve(self, sequence: Sequence, rows: int) -> bool:
        self.calls += 1
        self._asked[sequence.id] = rows
        return self.calls - 1 not in self._fails and self.inner.reserve(sequence, rows)

    def room(self, sequence: Sequence) -> int:
        return self._asked.get(sequence.id, sequence.computed) if self._fails else self.inner.room(sequence)

    def could_grow(self, sequences: int, rows: int) -> bool:
        return not self._fails and self.inner.could_grow(sequences, rows)

    def grow(self, sequences: Ordered[Sequence]) -> int:
        return self.inner.grow(sequences)

    def commit(self, sequence: Sequence) -> None:
        self.inner.commit(sequence)

    def retire(self, sequence: Sequence) -> None:
        assert isinstance(self.inner, Slots)
        self.inner.retire(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        assert isinstance(self.inner, BlockPool)
        self.inner.fork(parent, child)

    def swap_out(self, sequence: Sequence) -> bool:
        assert isinstance(self.inner, BlockPool)
        return self.inner.swap_out(sequence)

    def take_moves(self) -> list[Move]:
        assert isinstance(self.inner, BlockPool)
        return self.inner.take_moves()

    def free(self, sequence: Sequence) -> None:
        self.inner.free(sequence)

    def usage(self) -> Usage:
        return self.inner.usage()

    def take_holdings(self) -> list[Holding]:
        return self.inner.take_holdings()


def request(id: int, prompt: int, output: int, **more: object) -> Request:
    """A request of `prompt` tokens, each its own, that declares and gives `output` tokens."""
    return asking(id, [(id * 31 + position) % VOCABULARY for position in range(prompt)], output, **more)


def asking(id: int, prompt: Ordered[int], output: int = 1, **more: object) -> Request:
    """A request of this very prompt that declares and gives `output` tokens."""
    fields: dict[str, object] = {"max_tokens": output, "output_tokens": output, **more}
    return Request(id, tuple(prompt), **fields)  # type: ignore[arg-type]


def asked_in_every_step(pool: Pool) -> Pool:
    """`pool`, but of nobody it says that there is more room than was asked for."""
    asked: dict[int, int] = {}
    reserve = pool.reserve

    def noted(sequence: Sequence, rows: int) -> bool:
        asked[sequence.id] = rows
        return reserve(sequence, rows)

    pool.reserve = noted  # type: ignore[method-assign]
    pool.could_grow = lambda sequences, rows: False  # type: ignore[method-assign]
    pool.room = lambda sequence: asked.get(sequence.id, sequence.computed)  # type: ignore[method-assign]
    return pool


class Served(NamedTuple):
    """A whole run, the batches it launched and how many reservations it asked for."""

    run: Run
    batches: list[list[Piece]]
    reservations: int


def serve_on(
    pool: Pool,
    load: Load,
    limits: Limits,
    *,
    fails: Collection[int] = (),
    token: Token = next_token,
    static: bool = False,
) -> Served:
    """A run on virtual time, its tokens kept; `fails` as in `FaultyAllocator`."""
    allocator, executor = FaultyAllocator(pool, fails), FakeExecutor(pool, token=token)
    paging = allocator if isinstance(pool, BlockPool) else None
    scheduler = StaticScheduler(allocator, limits) if static else Scheduler(allocator, limits, paging)
    run = serve(load, Engine(allocator, executor, limits, save_tokens=True, scheduler=scheduler), VirtualClock())
    return Served(run, executor.batches, allocator.calls)
