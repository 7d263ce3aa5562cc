"""Host memory for the rows of sequences that had to make room."""

from __future__ import annotations

from collections.abc import Iterable

from kvbench.engine.types import IN, OUT, Move


class SwapSpace:
    """Blocks of host memory, and the copies from and to them that are owed.

    A block that was read back is free for others only once its copy has been handed out: until then it is still needed.
    """

    def __init__(self, swap_tokens: int, block_size: int) -> None:
        self._size = block_size
        self._free = list(reversed(range(swap_tokens // block_size)))
        self._kept: dict[int, tuple[list[int], int]] = {}
        self._out: dict[int, Move] = {}  # by their targets
        self._in: dict[int, Move] = {}
        self._read: list[int] = []
        self.rows = 0

    def put(self, sequence: int, blocks: list[int], rows: int) -> bool:
        """Keep the first `rows` rows of these blocks; False where there is no room."""
        if len(blocks) > len(self._free):
            return False
        assert not self._in.keys() & set(blocks), "what is still to come in cannot go out"
        kept = [self._free.pop() for _ in blocks]
        for number, target in enumerate(kept):
            self._out[target] = self._move(OUT, blocks[number], target, number, rows)
        self._kept[sequence] = kept, rows
        self.rows += rows
        return True

    def take(self, sequence: int, blocks: list[int], known: int) -> int:
        """Bring back what was kept of the sequence into its blocks, but for the first `known` blocks, which hold it
        already. Returns the rows it had; 0 where nothing was kept."""
        if sequence not in self._kept:
            return 0
        kept, rows = self._kept.pop(sequence)
        for number in range(known, len(kept)):
            self._in[blocks[number]] = self._move(IN, kept[number], blocks[number], number, rows)
        self._read.extend(kept)
        self.rows -= rows
        return rows

    def drop(self, sequence: int) -> None:
        """What was kept of the sequence is not needed any more."""
        kept, rows = self._kept.pop(sequence, ([], 0))
        for block in kept:
            self._out.pop(block, None)
        self._free.extend(reversed(kept))
        self.rows -= rows

    def forget(self, blocks: Iterable[int]) -> None:
        """Nobody holds these blocks of the pool any more: nothing needs to come in there."""
        for block in self._in.keys() & blocks:
            del self._in[block]

    def moves(self) -> tuple[list[Move], list[Move]]:
        """The copies owed, out and in."""
        found = list(self._out.values()), list(self._in.values())
        self._free.extend(reversed(self._read))
        self._out, self._in, self._read = {}, {}, []
        return found

    def _move(self, way: str, source: int, target: int, number: int, rows: int) -> Move:
        """Block `number` of a sequence that has so many rows."""
        return Move(way, source * self._size, target * self._size, min(self._size, rows - number * self._size))
