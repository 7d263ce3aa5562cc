"""Which blocks hold which beginnings of texts, so that a sequence can read what another has computed.

A text is a chain of full blocks. The index is a tree of them, exact by construction: a block hangs under its parent's
serial number (at the root under the cache salt) and is found there by its tokens, so nothing is trusted to a hash
alone. Serial numbers are never used again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvbench.engine.sequence import Sequence

Parent = int | str
"""What a block follows: the serial of the block before it, or a salt where it begins a text."""

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Node:
    serial: int
    block: int


class PrefixCache:
    """The index, and the blocks in it that nobody holds, the least recently used first.

    A block without its parent could never be found, so both leave the index together. A table gives its blocks back
    from its end, so children are evicted before their parents as long as somebody held the parent with them.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._children: dict[Parent, dict[Tokens, _Node]] = {}  # an entry for each node, and each salt in use
        self._places: dict[int, tuple[Parent, Tokens]] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._ends: dict[int, tuple[Parent, int]] = {}  # how far a sequence's blocks have been followed: node, count
        self._serials = 0

    @property
    def idle(self) -> int:
        """Blocks that could be reused and that nobody holds."""
        return len(self._idle)

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def find(self, sequence: Sequence, most: int) -> list[int]:
        """The blocks of the longest known beginning of the sequence's text, `most` at most."""
        parent: Parent = sequence.request.cache_salt
        found: list[int] = []
        while len(found) < most:
            node = self._children.get(parent, {}).get(self._tokens(sequence, len(found)))
            if node is None:
                break
            found.append(node.block)
            parent = node.serial
        return found

    def take(self, blocks: list[int]) -> None:
        """Somebody holds the blocks that were found."""
        for block in blocks:
            self._idle.pop(block, None)

    def keep(self, sequence: Sequence, table: list[int]) -> None:
        """Index the blocks of the sequence that have become full. One whose content is known already stays out, but the
        blocks after it follow the one that is in."""
        full = sequence.computed // self._size
        parent, count = self._ends.get(sequence.id, (sequence.request.cache_salt, 0))
        if count == full:
            return
        if parent not in self._children:  # it left the index: what the sequence holds may bring it back
            parent, count = sequence.request.cache_salt, 0
        for number in range(count, full):
            parent = self._follow(parent, self._tokens(sequence, number), table[number])
        self._ends[sequence.id] = parent, full

    def _follow(self, parent: Parent, tokens: Tokens, block: int) -> int:
        """The serial of what holds `tokens` after `parent`: `block` itself unless another does."""
        siblings = self._children.setdefault(parent, {})
        if tokens not in siblings:
            assert block not in self._places and len(tokens) == self._size, f"block {block} cannot hold {tokens}"
            self._serials += 1
            siblings[tokens] = _Node(self._serials, block)
            self._children[self._serials] = {}
            self._places[block] = parent, tokens
        return siblings[tokens].serial

    def leave(self, sequence: Sequence) -> None:
        """The sequence gives its blocks back."""
        self._ends.pop(sequence.id, None)

    def give_back(self, block: int) -> bool:
        """Nobody holds the block any more; whether it stays, since its content could be reused."""
        if block not in self._places:
            return False
        self._idle[block] = None
        return True

    def evict(self) -> list[int]:
        """Forget the least recently used of the idle blocks and all that follow it; those of them nobody holds."""
        assert self._idle, "there is nothing to evict"
        block = next(iter(self._idle))
        parent, tokens = self._places[block]
        lost = [self._children[parent].pop(tokens)]
        if isinstance(parent, str) and not self._children[parent]:
            del self._children[parent]
        for node in lost:  # grows while its descendants are found
            lost.extend(self._children.pop(node.serial).values())
            del self._places[node.block]
        idle = [node.block for node in lost if node.block in self._idle]
        for each in idle:
            del self._idle[each]
        return idle

    def _tokens(self, sequence: Sequence, number: int) -> Tokens:
        """What the sequence's block of this number holds once it is full."""
        return tuple(sequence.tokens[number * self._size : (number + 1) * self._size])
