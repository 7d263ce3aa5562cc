"""The traditional policy: every request holds one contiguous range of rows from admission to its end.

How long a range is decides everything. `max` reserves the model's longest request in equal slots, as
FasterTransformer and the baselines of the paged-attention paper do; `declared` reserves prompt + max_tokens; `pow2`
(prompt + the next power of two of the true answer) and `oracle` (exactly the rows that will be filled) know the future
and bound what any reservation could reach. All but `max` place their ranges in a buddy allocator, as the paper's
baselines did (SOSP'23, arXiv 2309.06180, section 6.1).
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered

from kvbench.contiguous.buddy import BuddyChunks
from kvbench.engine.accounts import Accounts
from kvbench.engine.types import Holding, Sequence, Usage
from kvbench.errors import KvbenchError

POLICIES = ("max", "declared", "pow2", "oracle")


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


def rows_asked(policy: str, max_model_len: int, prompt_tokens: int, max_tokens: int, output_tokens: int | None) -> int:
    """Rows that a policy asks for on behalf of a sequence, before its allocator rounds up."""
    if policy == "max":
        return max_model_len
    if policy == "declared":
        return prompt_tokens + max_tokens
    assert output_tokens is not None, f"{policy} needs the answer's length beforehand"
    if policy == "oracle":
        return prompt_tokens + output_tokens - 1
    return min(prompt_tokens + power_of_two(output_tokens), max_model_len)


def most_at_once(pool_tokens: int, max_model_len: int, policy: str, prompt_tokens: int, output_tokens: int) -> int:
    """How many equal sequences, each to its last token and declared as it is, an empty pool holds at once."""
    if prompt_tokens + output_tokens > max_model_len:
        return 0
    if policy == "max":
        return pool_tokens // max_model_len
    chunk = power_of_two(max_model_len)
    size = power_of_two(rows_asked(policy, max_model_len, prompt_tokens, output_tokens, output_tokens))
    return pool_tokens // chunk * (chunk // size)


class Slots:
    """Allocator of contiguous ranges. `base(sequence)` is the row of its first token."""

    def __init__(self, pool_tokens: int, max_model_len: int, policy: str = "max") -> None:
        if policy not in POLICIES:
            raise KvbenchError(f"unknown reservation policy {policy!r}; choose from {', '.join(POLICIES)}")
        assert pool_tokens >= 0 and max_model_len >= 1, (pool_tokens, max_model_len)
        self.policy = policy
        self.max_model_len = max_model_len
        self.external_fragmentation_events = 0
        self._accounts = Accounts(pool_tokens)
        self._placed: dict[int, int] = {}
        self._refused: int | None = None
        self._ranges: EqualSlots | BuddyChunks
        if policy == "max":
            self._ranges = EqualSlots(pool_tokens, max_model_len)
        else:
            self._ranges = BuddyChunks(pool_tokens, power_of_two(max_model_len))

    @property
    def pool_tokens(self) -> int:
        return self._accounts.pool_tokens

    def base(self, sequence: Sequence) -> int:
        """Row of the sequence's first token."""
        return self._placed[sequence.id]

    def asked(self, sequence: Sequence) -> int:
        """Rows the policy asks for on behalf of a sequence, before the allocator rounds up."""
        request = sequence.request
        return rows_asked(
            self.policy, self.max_model_len, sequence.prompt_tokens, request.max_tokens, request.output_tokens
        )

    def could_hold(self, sequence: Sequence, rows: int) -> bool:
        size = self._ranges.rounded(self.asked(sequence))
        return rows <= size <= self._ranges.largest

    def reserve(self, sequence: Sequence, rows: int) -> bool:
        if held := self._accounts.held(sequence):
            return rows <= held
        asked = self.asked(sequence)
        size = self._ranges.rounded(asked)
        if rows > size:
            return False
        base = self._ranges.take(size)
        if base is None:
            if self._refused != sequence.id and self._accounts.usage().free >= size:
                self.external_fragmentation_events += 1
                self._refused = sequence.id
            return False
        self._refused = None
        self._placed[sequence.id] = base
        self._accounts.hold(sequence, size, asked)
        return True

    def room(self, sequence: Sequence) -> int:
        return self._accounts.held(sequence)

    def could_grow(self, sequences: int, rows: int) -> bool:
        return True  # within their ranges, and nobody goes beyond

    def grow(self, sequences: Ordered[Sequence]) -> int:
        raise AssertionError(f"sequence {sequences[0].id} went beyond its range")

    def commit(self, sequence: Sequence) -> None:
        self._accounts.fill(sequence)

    def retire(self, sequence: Sequence) -> None:
        self._accounts.retire(sequence)

    def free(self, sequence: Sequence) -> None:
        if size := self._accounts.held(sequence):
            self._ranges.give_back(self._placed.pop(sequence.id), size)
            self._accounts.release(sequence)

    def usage(self) -> Usage:
        return self._accounts.usage()

    def take_holdings(self) -> list[Holding]:
        return self._accounts.take()


class EqualSlots:
    """The pool cut into slots of one size; what is left at its end stays free for ever."""

    def __init__(self, pool_tokens: int, slot_tokens: int) -> None:
        self._slot_tokens = slot_tokens
        slots = pool_tokens // slot_tokens
        self.largest = slot_tokens if slots else 0
        self._free = [slot * slot_tokens for slot in reversed(range(slots))]

    def rounded(self, rows: int) -> int:
        """The size of the range that serves `rows`, which a slot does."""
        return self._slot_tokens

    def take(self, size: int) -> int | None:
        """First row of a free slot."""
        return self._free.pop() if self._free else None

    def give_back(self, base: int, size: int) -> None:
        self._free.append(base)
