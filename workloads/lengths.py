"""How many tokens a prompt or an answer has: one number, or a range around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.errors import KvbenchError

if TYPE_CHECKING:
    from numpy.random import Generator


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths in tokens: uniform over the whole numbers from `shortest` to `longest`, both included.

    `range_ratio` r is vLLM's `--range-ratio`: the bounds are mean (1 - r) and mean (1 + r), rounded, and never below
    one token. With r = 0 every length is exactly `mean`.
    """

    mean: int
    range_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.mean < 1:
            raise KvbenchError(f"--input-len and --output-len must be at least 1 token, not {self.mean}")
        if not 0 <= self.range_ratio < 1:  # NaN fails this too
            raise KvbenchError(f"--range-ratio must be at least 0 and below 1, not {self.range_ratio}")

    @property
    def shortest(self) -> int:
        return max(1, round(self.mean * (1 - self.range_ratio)))

    @property
    def longest(self) -> int:
        return max(1, round(self.mean * (1 + self.range_ratio)))

    def draw(self, count: int, rng: Generator) -> list[int]:
        """`count` lengths; a longer draw from an equal generator begins with the shorter one's."""
        lengths: list[int] = rng.integers(self.shortest, self.longest, size=count, endpoint=True).tolist()
        return lengths
