"""The paged policy: rows in blocks of a few tokens, taken when a sequence grows into them (PagedAttention, SOSP'23,
arXiv 2309.06180). A sequence wastes at most the unfilled part of its last block, and shares what it has in common with
others: a prompt with the other samples of its request, and with `prefix_caching` the full blocks of any equal
beginning."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

from kvbench.engine.accounts import Accounts
from kvbench.engine.sequence import Sequence
from kvbench.engine.types import COPY, Holding, Move, Usage
from kvbench.errors import KvbenchError
from kvbench.paged.holders import Holders
from kvbench.paged.prefix import PrefixCache
from kvbench.paged.swap import SwapSpace


def most_at_once(pool_tokens: int, block_size: int, prompt_tokens: int, output_tokens: int) -> int:
    """How many equal sequences, none of which shares anything, a pool holds at once when all have their last token."""
    return pool_tokens // block_size // -(-(prompt_tokens + output_tokens - 1) // block_size)


class BlockPool:
    """Allocator of blocks. `table(sequence)` lists its blocks in order of position.

    Block 0 is where padding may point; it lies outside the pool and is never handed out. Rows that fill no whole block
    stay free for ever. The block given back last is taken first: it is the one most likely still in a cache. A block
    whose content could be reused is taken when no other is left, the least recently used first. `swap_tokens` rows of
    host memory take what makes room.
    """

    external_fragmentation_events = 0  # any free block serves any sequence

    def __init__(
        self, pool_tokens: int, block_size: int, *, prefix_caching: bool = False, swap_tokens: int = 0
    ) -> None:
        if block_size < 1:
            raise KvbenchError(f"block size must be at least 1, not {block_size}")
        self.block_size = block_size
        self.blocks = pool_tokens // block_size
        self._accounts = Accounts(pool_tokens)
        self._free = list(range(self.blocks, 0, -1))
        self._tables: dict[int, list[int]] = {}
        self._samples: dict[int, list[Sequence]] = {}  # of each request that asks for several, those that hold blocks
        self._holders = Holders(self._accounts, self.blocks, block_size)
        self._prefixes = PrefixCache(block_size) if prefix_caching else None
        self._swap = SwapSpace(swap_tokens, block_size)
        self._copies: dict[int, Move] = {}  # owed, by the blocks that they go to

    @property
    def pool_tokens(self) -> int:
        return self._accounts.pool_tokens

    def table(self, sequence: Sequence) -> list[int]:
        """The sequence's blocks: position p lies in block `table[p // block_size]`. Another list once a block of it is
        another; a list only grows."""
        return self._tables[sequence.id]

    def could_hold(self, sequence: Sequence, rows: int) -> bool:
        return self._count(rows) <= self.blocks

    def reserve(self, sequence: Sequence, rows: int) -> bool:
        table = self._tables.get(sequence.id)
        if table is None:
            return self._begin(sequence, rows)
        more = max(0, self._count(rows) - len(table))
        copied = bool(self._holders.partial) and self._to_be_copied(sequence, table, rows)
        if more + copied > len(self._free) and more + copied > self._available([]):
            return False
        if self._prefixes is not None and sequence.decodes:
            self._prefixes.keep(sequence, table)
        if not (more or copied):
            return True
        shared = (0, 0)
        if copied:
            shared = self._copy_on_write(sequence, table)
            table = self._tables[sequence.id]
        table += self._take(more, sequence)
        self._accounts.hold(sequence, len(table) * self.block_size, rows, *shared)
        return True

    def _begin(self, sequence: Sequence, rows: int) -> bool:
        """The first rows of a sequence, with what the pool or the host memory holds of it."""
        hits = self._hits(sequence, rows)
        more = self._count(max(rows, sequence.computed)) - len(hits)
        if more > self._available(hits):
            return False
        found = len(hits) * self.block_size
        if self._prefixes is not None:
            self._prefixes.take(hits)
        shared = self._holders.join(hits, sequence.id, found)
        table = self._enter(sequence, [*hits, *self._take(more, sequence)])
        self._accounts.hold(sequence, len(table) * self.block_size, rows, *shared)
        sequence.computed = max(found, self._swap.take(sequence.id, table, len(hits)))
        self._accounts.fill(sequence)
        return True

    def _enter(self, sequence: Sequence, table: list[int]) -> list[int]:
        """The sequence's table from now on."""
        self._tables[sequence.id] = table
        if sequence.request.n > 1:
            self._samples.setdefault(sequence.request.id, []).append(sequence)
        return table

    def _count(self, rows: int) -> int:
        """Blocks that so many rows take."""
        return -(-rows // self.block_size)

    def _hits(self, sequence: Sequence, rows: int) -> list[int]:
        """Full blocks that hold the beginning of a sequence which holds nothing, those of another sample's prompt or
        what the prefix cache has, whichever is more; its last token must run, so never all."""
        most = min(rows, sequence.known - 1) // self.block_size
        found = [] if self._prefixes is None else self._prefixes.find(sequence, most)
        for other in self._samples.get(sequence.request.id, ()):
            common = min(sequence.prompt_tokens, other.prompt_tokens, other.computed) // self.block_size
            if (count := min(most, common)) > len(found):
                found = self._tables[other.id][:count]
        return found

    def _available(self, hits: list[int]) -> int:
        """Blocks that could be handed out while the hits are held."""
        if self._prefixes is None:
            return len(self._free)
        return len(self._free) + self._prefixes.idle - sum(map(self._prefixes.is_idle, hits))

    def _take(self, count: int, sequence: Sequence) -> list[int]:
        """So many blocks that nobody holds, for this sequence."""
        blocks: list[int] = []
        while len(blocks) < count:
            if not self._free:
                assert self._prefixes is not None
                self._free.extend(self._prefixes.evict())
            last = self._free[len(blocks) - count :]
            del self._free[len(blocks) - count :]
            blocks += reversed(last)
        self._holders.own(blocks, sequence.id)
        return blocks

    def _to_be_copied(self, sequence: Sequence, table: list[int], rows: int) -> bool:
        """Whether the sequence is about to write into a block that others read."""
        if sequence.computed >= min(rows, len(table) * self.block_size):
            return False
        return table[sequence.computed // self.block_size] in self._holders.partial

    def _copy_on_write(self, sequence: Sequence, table: list[int]) -> tuple[int, int]:
        """Give the sequence a block of its own to write into; returns what changes in its sharing (rows, filled)."""
        number, filled = divmod(sequence.computed, self.block_size)
        old, (new,) = table[number], self._take(1, sequence)
        self._tables[sequence.id] = [*table[:number], new, *table[number + 1 :]]
        self._copies[new] = Move(COPY, old * self.block_size, new * self.block_size, filled)
        self._holders.leave([old], sequence.id)
        return -self.block_size, -filled

    def fork(self, parent: Sequence, child: Sequence) -> None:
        assert child.id not in self._tables and child.computed == parent.computed > 0, (parent.id, child.id)
        table = self._enter(child, self._tables[parent.id][: self._count(parent.computed)])
        shared = self._holders.join(table, child.id, parent.computed)
        self._accounts.hold(child, len(table) * self.block_size, parent.computed, *shared)
        self._accounts.fill(child)

    def room(self, sequence: Sequence) -> int:
        table = self._tables[sequence.id]
        shared = self._holders.partial and self._to_be_copied(sequence, table, sequence.computed + 1)
        return sequence.computed if shared else len(table) * self.block_size

    def could_grow(self, sequences: int, rows: int) -> bool:
        return sequences * self._count(rows) <= len(self._free) and not self._holders.partial

    def grow(self, sequences: Ordered[Sequence]) -> int:
        holders = [sequence.id for sequence in sequences]
        if self._prefixes is not None:
            for sequence in sequences:
                self._prefixes.keep(sequence, self._tables[sequence.id])
        blocks = self._free[: -len(holders) - 1 : -1]
        del self._free[-len(holders) :]
        for holder, block in zip(holders, blocks, strict=True):
            self._tables[holder].append(block)
        self._holders.own_each(blocks, holders)
        self._accounts.grow(holders, self.block_size)
        return self.block_size

    def commit(self, sequence: Sequence) -> None:
        self._accounts.fill(sequence)
        if self._prefixes is not None:
            self._prefixes.keep(sequence, self._tables[sequence.id])

    def swap_out(self, sequence: Sequence) -> bool:
        blocks = self._tables[sequence.id][: self._count(sequence.computed)]
        assert not self._copies.keys() & set(blocks), "a copy that is still owed cannot go out"
        if not blocks or not self._swap.put(sequence.id, blocks, sequence.computed):
            return False
        self._give_back(sequence)
        return True

    def free(self, sequence: Sequence) -> None:
        if sequence.id in self._tables:
            self._give_back(sequence)
        else:
            self._swap.drop(sequence.id)

    def _give_back(self, sequence: Sequence) -> None:
        self._accounts.release(sequence)
        if sequence.request.n > 1:
            self._samples[sequence.request.id].remove(sequence)
            if not self._samples[sequence.request.id]:
                del self._samples[sequence.request.id]
        left = self._holders.leave(self._tables.pop(sequence.id)[::-1], sequence.id)
        for owed in self._copies.keys() & left:
            del self._copies[owed]
        self._swap.forget(left)
        if self._prefixes is None:
            self._free.extend(left)
            return
        self._free.extend(block for block in left if not self._prefixes.give_back(block))
        self._prefixes.leave(sequence)

    def take_moves(self) -> list[Move]:
        out, back = self._swap.moves()
        copies, self._copies = list(self._copies.values()), {}
        return [*out, *copies, *back]

    def usage(self) -> Usage:
        cached = 0 if self._prefixes is None else self._prefixes.idle * self.block_size
        return self._accounts.usage(cached, self._swap.rows)

    def take_holdings(self) -> list[Holding]:
        return self._accounts.take()
