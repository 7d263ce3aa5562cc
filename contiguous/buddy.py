"""A buddy allocator over ranges of rows (Knuth, The Art of Computer Programming 1, section 2.5)."""

from __future__ import annotations


class BuddyChunks:
    """Power-of-two ranges inside chunks of `chunk_tokens` rows (itself a power of two).

    The pool holds as many whole chunks as fit; what is left at its end stays free for ever. Among the free ranges of a
    size the lowest is taken first, so a seed fixes every placement.
    """

    def __init__(self, pool_tokens: int, chunk_tokens: int) -> None:
        assert chunk_tokens & (chunk_tokens - 1) == 0, "a chunk is a power of two of rows"
        self._chunk_tokens = chunk_tokens
        chunks = pool_tokens // chunk_tokens
        self.largest = chunk_tokens if chunks else 0
        self._free: dict[int, set[int]] = {chunk_tokens: {chunk * chunk_tokens for chunk in range(chunks)}}

    def rounded(self, rows: int) -> int:
        """The size of the range that serves `rows`."""
        return 1 << (rows - 1).bit_length()

    def take(self, size: int) -> int | None:
        """First row of a free range of `size` rows, splitting a larger one where needed; None where there is none."""
        have = size
        while not self._free.get(have):
            have *= 2
            if have > self._chunk_tokens:
                return None
        base = min(self._free[have])
        self._free[have].remove(base)
        while have > size:
            have //= 2
            self._free.setdefault(have, set()).add(base + have)
        return base

    def give_back(self, base: int, size: int) -> None:
        """Return a range, joining it with its buddy as far up as that one is free."""
        while size < self._chunk_tokens:
            buddy = base ^ size  # chunks start at multiples of their size, so the buddy differs in one bit
            peers = self._free.setdefault(size, set())
            if buddy not in peers:
                break
            peers.remove(buddy)
            base = min(base, buddy)
            size *= 2
        self._free.setdefault(size, set()).add(base)
