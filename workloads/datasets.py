"""What a data set is to the rest of kvbench, and the simplest one: random tokens.

`jsonl.py` reads texts of your own, `support.py` brings a support desk's chats along.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Protocol

from kvbench.errors import KvbenchError
from kvbench.workloads.lengths import Lengths
from kvbench.workloads.streams import stream

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Drawn:
    """A prompt (token ids), how many tokens its answer has where the request ignores end-of-sequence, and the `limit`
    that this one request declares where the data set knows one."""

    prompt: tuple[int, ...]
    output_tokens: int
    limit: int | None = None

    def __post_init__(self) -> None:
        assert self.prompt, "a data set refuses an empty prompt before it makes a row of it"
        assert self.output_tokens >= 1, "a data set refuses an empty answer before it makes a row of it"


class Dataset(Protocol):
    """Where prompts and the lengths of their answers come from."""

    @property
    def name(self) -> str:
        """As in `--dataset`."""

    @property
    def longest_input(self) -> int:
        """Tokens of the longest prompt that any seed can draw."""

    @property
    def longest_output(self) -> int:
        """Tokens of the longest answer that any seed can draw."""

    def draw(self, count: int, seed: int) -> list[Drawn]:
        """`count` rows, the same for the same seed; a longer draw begins with the shorter one's rows."""


@dataclass(frozen=True, slots=True)
class RandomTokens:
    """Prompts of uniformly random ids in [0, vocab_size) without the `excluded` (special) ones.

    Each begins with the same `prefix` tokens, which come on top of the drawn length (vLLM's `--random-prefix-len`).
    Behind them nothing is shared: two of n tokens are equal with probability (allowed ids) ** -n.
    """

    input: Lengths
    output: Lengths
    vocab_size: int
    excluded: frozenset[int] = frozenset()
    prefix: int = 0

    name: ClassVar[str] = "random"

    def __post_init__(self) -> None:
        if self._allowed().size == 0:
            raise KvbenchError(f"a vocabulary of {self.vocab_size} leaves no id to draw; use a model with a larger one")

    @property
    def longest_input(self) -> int:
        return self.prefix + self.input.longest

    @property
    def longest_output(self) -> int:
        return self.output.longest

    def draw(self, count: int, seed: int) -> list[Drawn]:
        """`count` prompts; lengths, ids and the prefix come from streams of their own."""
        inputs = self.input.draw(count, stream(seed, "lengths.input"))
        outputs = self.output.draw(count, stream(seed, "lengths.output"))
        allowed = self._allowed()
        ids = allowed[stream(seed, "tokens").integers(0, allowed.size, size=sum(inputs))].tolist()
        prefix = tuple(allowed[stream(seed, "tokens.prefix").integers(0, allowed.size, size=self.prefix)].tolist())
        ends = [0]
        for length in inputs:
            ends.append(ends[-1] + length)
        return [Drawn((*prefix, *ids[a:b]), output) for (a, b), output in zip(pairwise(ends), outputs, strict=True)]

    def _allowed(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        import numpy as np

        return np.setdiff1d(np.arange(max(self.vocab_size, 0)), np.fromiter(self.excluded, np.int64))


def shuffled(rows: list[Drawn], count: int, seed: int) -> list[Drawn]:
    """`count` of `rows` in a seeded order; every row comes once before any comes again, each pass shuffled anew."""
    rng = stream(seed, "order")
    chosen: list[Drawn] = []
    while len(chosen) < count:
        chosen.extend(rows[index] for index in rng.permutation(len(rows)))
    return chosen[:count]
