"""The paged policy: rows in blocks of a few tokens, taken when a sequence grows into them (PagedAttention, SOSP'23,
arXiv 2309.06180). A sequence wastes at most the unfilled part of its last block."""

from __future__ import annotations

from kvbench.engine.accounts import Accounts
from kvbench.engine.types import Holding, Sequence, Usage
from kvbench.errors import KvbenchError


class BlockPool:
    """Allocator of blocks. `table(sequence)` lists its blocks in order of position.

    Block 0 is where padding may point; it lies outside the pool and is never handed out. Rows that fill no whole block
    stay free for ever. The block given back last is taken first: it is the one most likely still in a cache.
    """

    external_fragmentation_events = 0  # any free block serves any sequence

    def __init__(self, pool_tokens: int, block_size: int) -> None:
        if block_size < 1:
            raise KvbenchError(f"block size must be at least 1, not {block_size}")
        self.block_size = block_size
        self.blocks = pool_tokens // block_size
        self._accounts = Accounts(pool_tokens)
        self._free = list(range(self.blocks, 0, -1))
        self._tables: dict[int, list[int]] = {}

    @property
    def pool_tokens(self) -> int:
        return self._accounts.pool_tokens

    def table(self, sequence: Sequence) -> list[int]:
        """The sequence's blocks: position p lies in block `table[p // block_size]`."""
        return self._tables[sequence.id]

    def could_hold(self, sequence: Sequence, rows: int) -> bool:
        return -(-rows // self.block_size) <= self.blocks

    def reserve(self, sequence: Sequence, rows: int) -> bool:
        held = self._accounts.held(sequence)
        if rows <= held:
            return True
        need = -(-(rows - held) // self.block_size)
        if need > len(self._free):
            return False
        table = self._tables.setdefault(sequence.id, [])
        table.extend(self._free.pop() for _ in range(need))
        self._accounts.hold(sequence, len(table) * self.block_size, rows)
        return True

    def commit(self, sequence: Sequence) -> None:
        self._accounts.fill(sequence)

    def free(self, sequence: Sequence) -> None:
        if sequence.id in self._tables:
            self._free.extend(reversed(self._tables.pop(sequence.id)))
            self._accounts.release(sequence)

    def usage(self) -> Usage:
        return self._accounts.usage()

    def take_holdings(self) -> list[Holding]:
        return self._accounts.take()
