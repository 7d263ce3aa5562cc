"""The seams of the engine: five small protocols, and three that add verbs to one of them.

| protocol  | implementations                             | what may go wrong                                  |
| Allocator | contiguous.Slots, paged.BlockPool           | shortage is False; all else is a fault             |
| Retiring  | contiguous.Slots                            | (an Allocator for static batches)                  |
| Paging    | paged.BlockPool                             | (an Allocator whose rows can be shared and moved)  |
| Cache     | contiguous.SlotCache, paged.BlockCache      | nothing: the allocator has already said yes        |
| Executor  | runner.ModelRunner                          | CellError: out of memory, logits that are NaN      |
| Foresight | planner's SimExecutor                       | (an Executor on virtual time)                      |
| Clock     | clock.WallClock, clock.VirtualClock         | nothing                                            |
| Load      | workloads.ClosedLoop, workloads.OpenLoop    | nothing                                            |

The oracle boundary: scheduler and allocator see a request's declared `max_tokens`, never its true `output_tokens`. The
policies `pow2` and `oracle` of `contiguous` are the two named exceptions.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvbench.engine.types import Batch, Holding, Move, Request, Sampled, Sequence, Ticket, Usage
from kvbench.metrics.records import RequestRecord

if TYPE_CHECKING:
    from torch import Tensor


class Allocator(Protocol):
    """Who holds which rows of the arena: host bookkeeping, no tensors, no clock. Placement stays in here."""

    @property
    def pool_tokens(self) -> int:
        """Rows of the pool, held or free; the padding rows lie outside it."""

    @property
    def external_fragmentation_events(self) -> int:
        """Admissions that failed although at least the rounded need was free, each stay in the queue counted once."""

    def could_hold(self, sequence: Sequence, rows: int) -> bool:
        """Whether an empty pool could make the sequence's first `rows` positions addressable."""

    def reserve(self, sequence: Sequence, rows: int) -> bool:
        """Make the first `rows` positions addressable, all or nothing; False on shortage, and nothing has changed.

        The call that gives a sequence its first rows may find some of them filled already: it then raises
        `sequence.computed`, to known - 1 at most, since the last token must run. A sequence whose rows were put aside
        comes back with them."""

    def room(self, sequence: Sequence) -> int:
        """Of a sequence that holds rows, how many of its first positions it can write to without reserving more."""

    def could_grow(self, sequences: int, rows: int) -> bool:
        """Whether it is sure that so many of those that hold rows can each get so many more, one after the other, and
        nobody else is touched by it."""

    def grow(self, sequences: Ordered[Sequence]) -> int:
        """Rows for the next token of each of these, which decode and have filled all they hold: `reserve` for those of
        whom it is sure that they can grow, all at once. Returns how many more rows each now has."""

    def commit(self, sequence: Sequence) -> None:
        """The rows below `sequence.computed` hold data now, which others may be given to read. Of a sequence that
        decodes this is said when it stops to, and `reserve` sees it whenever rows are full."""

    def free(self, sequence: Sequence) -> None:
        """Give back all rows of the sequence; nothing if it holds none."""

    def usage(self) -> Usage:
        """Filled, held and free rows at this moment; a row counts once, however many sequences hold it. Filled are
        those that were committed."""

    def take_holdings(self) -> list[Holding]:
        """What changed hands since the last call, in order; the engine turns it into ranges of steps."""


class Retiring(Allocator, Protocol):
    """What request-level batching asks of an allocator on top."""

    def retire(self, sequence: Sequence) -> None:
        """The sequence has ended but keeps its rows until `free`: from now on none of them counts as filled."""


class Paging(Allocator, Protocol):
    """What can be done with rows that need not lie side by side."""

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child, which holds nothing, reads the rows that the parent has filled; whoever writes first into a row
        of both is given a copy by `reserve`. It takes no memory."""

    def swap_out(self, sequence: Sequence) -> bool:
        """Put the filled rows aside into host memory and give all rows back; False where there is no room, and nothing
        has changed."""

    def take_moves(self) -> list[Move]:
        """The copies of rows that are owed since the last call; they run before anything else is written."""


class Cache(Protocol):
    """The device half of a backend: where the rows lie, and attention over them."""

    def begin(self, batch: Batch) -> None:
        """Once a step, before the first layer: the moves run, this batch's offsets or block tables go to the device."""

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store k and v [T, Hkv, D] of the batch's T tokens, return causal attention of q [T, Hq, D] over each
        token's own sequence as [T, Hq, D]. `window`: a query sees its own and the `window - 1` keys before it.
        `softcap` c: scores become c tanh(score / c). `sinks` [Hq]: one extra logit a head that takes weight only."""


class Executor(Protocol):
    """Runs batches, one in flight at a time."""

    def launch(self, batch: Batch, now_s: float) -> Ticket:
        """Start the batch."""

    def collect(self, ticket: Ticket) -> Sampled:
        """The batch's new tokens; on a real device this waits until it is done."""


@runtime_checkable
class Foresight(Executor, Protocol):
    """An Executor that knows how long a batch takes without running it."""

    def ahead(self, batch: Batch, now_s: float, steps: int, until_s: float) -> list[float]:
        """Seconds of each of the `steps` steps that follow the batch from `now_s` on, in which the same sequences
        decode and nothing else happens; none of those that would begin at `until_s` or later."""


class Clock(Protocol):
    """The run's time in seconds. Only `serve` moves it."""

    def now(self) -> float: ...
    def wait_until(self, at_s: float) -> float:
        """Wait; returns the time at which waiting really ended."""

    def after(self, done_s: float | None) -> float:
        """The time after a collected batch: now on a real clock, `done_s` on a virtual one."""


class Load(Protocol):
    """What is asked, and when. The same load drives an engine here or a server elsewhere."""

    def due(self, now_s: float) -> list[Request]:
        """Requests whose time has come, each handed out once."""

    def next_s(self) -> float | None:
        """When the next request is due, or None if that depends on one that is still running (or none is left)."""

    def on_done(self, record: RequestRecord, now_s: float) -> None:
        """A request ended, also by failure or rejection: a closed loop's slot is free again. The record has the
        answer's ids, from which the next turn of a conversation goes on."""
