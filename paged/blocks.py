"""The paged policy: rows in blocks of a few tokens, taken when a sequence grows into them (PagedAttention, SOSP'23,
arXiv 2309.06180). A sequence wastes at most the unfilled part of its last block, and with `prefix_caching` it shares
the full blocks at its beginning with all that begin alike."""

from __future__ import annotations

from collections import Counter

from kvbench.engine.accounts import Accounts
from kvbench.engine.types import Holding, Sequence, Usage
from kvbench.errors import KvbenchError
from kvbench.paged.prefix import PrefixCache


class BlockPool:
    """Allocator of blocks. `table(sequence)` lists its blocks in order of position.

    Block 0 is where padding may point; it lies outside the pool and is never handed out. Rows that fill no whole block
    stay free for ever. The block given back last is taken first: it is the one most likely still in a cache. A block
    whose content could be reused is taken when no other is left, the least recently used first.
    """

    external_fragmentation_events = 0  # any free block serves any sequence

    def __init__(self, pool_tokens: int, block_size: int, *, prefix_caching: bool = False) -> None:
        if block_size < 1:
            raise KvbenchError(f"block size must be at least 1, not {block_size}")
        self.block_size = block_size
        self.blocks = pool_tokens // block_size
        self._accounts = Accounts(pool_tokens)
        self._free = list(range(self.blocks, 0, -1))
        self._tables: dict[int, list[int]] = {}
        self._holders: dict[int, set[int]] = {}  # of each block that is held, the ids of the sequences that do
        self._prefixes = PrefixCache(block_size) if prefix_caching else None

    @property
    def pool_tokens(self) -> int:
        return self._accounts.pool_tokens

    def table(self, sequence: Sequence) -> list[int]:
        """The sequence's blocks: position p lies in block `table[p // block_size]`."""
        return self._tables[sequence.id]

    def could_hold(self, sequence: Sequence, rows: int) -> bool:
        return -(-rows // self.block_size) <= self.blocks

    def reserve(self, sequence: Sequence, rows: int) -> bool:
        if rows <= self._accounts.held(sequence):
            return True
        table = self._tables.get(sequence.id)
        hits = self._hits(sequence, rows) if table is None else []
        need = -(-rows // self.block_size) - len(hits if table is None else table)
        if need > self._available(hits):
            return False
        if table is None:
            table = self._tables[sequence.id] = list(hits)
        shared = self._share(sequence, hits)
        fresh = [self._take() for _ in range(need)]
        self._holders.update((block, {sequence.id}) for block in fresh)
        table.extend(fresh)
        self._accounts.hold(sequence, len(table) * self.block_size, rows, shared)
        if hits:
            sequence.computed = len(hits) * self.block_size
            self._accounts.fill(sequence)
        return True

    def _hits(self, sequence: Sequence, rows: int) -> list[int]:
        """Blocks that hold the beginning of a sequence which holds nothing; its last token must run, so never all."""
        if self._prefixes is None:
            return []
        return self._prefixes.find(sequence, min(rows, sequence.known - 1) // self.block_size)

    def _available(self, hits: list[int]) -> int:
        """Blocks that could be handed out while the hits are held."""
        if self._prefixes is None:
            return len(self._free)
        return len(self._free) + self._prefixes.idle - sum(map(self._prefixes.is_idle, hits))

    def _share(self, sequence: Sequence, hits: list[int]) -> int:
        """Hold the hits too; how many of their rows others hold. Whoever held one alone no longer does."""
        met = Counter[int]()
        shared = 0
        for block in hits:
            assert self._prefixes is not None
            self._prefixes.take(block)
            holders = self._holders.setdefault(block, set())
            shared += bool(holders)
            if len(holders) == 1:
                met.update(holders)
            holders.add(sequence.id)
        self._settle(met, 1)
        return shared * self.block_size

    def _settle(self, met: Counter[int], sign: int) -> None:
        """So many blocks of each sequence in `met` are now shared (+1), or its own again (-1)."""
        for other, blocks in met.items():
            self._accounts.share(other, sign * blocks * self.block_size)
        self._accounts.common(sign * met.total() * self.block_size)

    def _take(self) -> int:
        if not self._free:
            assert self._prefixes is not None
            self._free.extend(self._prefixes.evict())
        return self._free.pop()

    def commit(self, sequence: Sequence) -> None:
        self._accounts.fill(sequence)
        if self._prefixes is not None:
            self._prefixes.keep(sequence, self._tables[sequence.id])

    def free(self, sequence: Sequence) -> None:
        if sequence.id not in self._tables:
            return
        left = Counter[int]()
        for block in reversed(self._tables.pop(sequence.id)):
            holders = self._holders[block]
            holders.remove(sequence.id)
            if len(holders) == 1:
                left.update(holders)
            elif not holders:
                del self._holders[block]
                if self._prefixes is None or not self._prefixes.give_back(block):
                    self._free.append(block)
        if self._prefixes is not None:
            self._prefixes.leave(sequence)
        self._accounts.release(sequence)
        self._settle(left, -1)

    def usage(self) -> Usage:
        return self._accounts.usage(0 if self._prefixes is None else self._prefixes.idle * self.block_size)

    def take_holdings(self) -> list[Holding]:
        return self._accounts.take()
