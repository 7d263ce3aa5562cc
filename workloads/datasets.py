"""What a data set is to the rest of kvbench, and the simplest one: random tokens.

`jsonl.py` and `sharegpt.py` read texts of your own, `support.py` brings a support desk's chats along, `traces.py` reads
recorded traffic.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, ClassVar, Protocol

from kvbench.errors import KvbenchError
from kvbench.workloads.lengths import Distribution, zipf_ranks
from kvbench.workloads.streams import stream

if TYPE_CHECKING:
    import numpy as np

    Ids = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Turn:
    """What is asked after an answer: its own token ids, which follow on that answer, how many tokens its answer has
    where the request ignores end-of-sequence, and the `limit` that this one request declares where the data set knows
    one."""

    prompt: tuple[int, ...]
    output_tokens: int
    limit: int | None = None

    def __post_init__(self) -> None:
        assert self.prompt, "a data set refuses an empty prompt before it makes a row of it"
        assert self.output_tokens >= 1, "a data set refuses an empty answer before it makes a row of it"


@dataclass(frozen=True, slots=True)
class Drawn(Turn):
    """A whole prompt, with the `later` turns where it opens a conversation."""

    later: tuple[Turn, ...] = ()


Segment = tuple[Hashable, int]


@dataclass(frozen=True, slots=True)
class Outline:
    """A request without its ids: lengths, and of what its prompt is made as far as others may have the same.

    The prompt begins with `segments`, each a key and so many tokens: after equal keys, in equal places, the tokens are
    equal as far as both go. Behind them nothing is shared. `answer` is the key under which the answer stands in the
    next turn's prompt, None where nothing follows.
    """

    input_tokens: int
    output_tokens: int
    segments: tuple[Segment, ...] = ()
    answer: Hashable = None
    turn: int = 0


class Dataset(Protocol):
    """Where prompts and the lengths of their answers come from."""

    @property
    def name(self) -> str:
        """As in `--dataset`."""

    @property
    def longest_input(self) -> int:
        """Tokens of the longest prompt that any seed can draw, with all earlier turns and their longest answers."""

    @property
    def longest_output(self) -> int:
        """Tokens of the longest answer that any seed can draw."""

    def draw(self, count: int, seed: int) -> list[Drawn]:
        """Conversations with `count` requests in all, the last one cut short where need be; the same for the same seed.
        A longer draw begins with the shorter one's."""

    def outline(self, count: int, seed: int) -> list[Outline]:
        """The same requests as `draw` gives, one by one and without their ids."""


@dataclass(frozen=True, slots=True)
class Groups:
    """How many different prefixes there are, and who has which: all as likely, or the k-th most popular in proportion
    to k ** -alpha."""

    count: int = 1
    alpha: float | None = None

    def draw(self, count: int, seed: int) -> list[int]:
        """The group of each conversation, from 0."""
        rng = stream(seed, "groups")
        if self.alpha is not None:
            return [rank - 1 for rank in zipf_ranks(self.alpha, self.count, count, rng)]
        groups: list[int] = rng.integers(0, self.count, size=count).tolist()
        return groups


@dataclass(frozen=True, slots=True)
class RandomTokens:
    """Prompts of uniformly random ids in [0, vocab_size) without the `excluded` (special) ones, in conversations of
    `turns` turns.

    Each conversation begins with `prefix` tokens, the same for all of one of the `groups`, which come on top of the
    drawn length (vLLM's `--random-prefix-len`). Behind them nothing is shared: two of n tokens are equal with
    probability (allowed ids) ** -n.
    """

    input: Distribution
    output: Distribution
    vocab_size: int
    excluded: frozenset[int] = frozenset()
    prefix: int = 0
    groups: Groups = Groups()
    turns: int = 1

    name: ClassVar[str] = "random"

    def __post_init__(self) -> None:
        allowed_ids(self.vocab_size, self.excluded)

    @property
    def longest_input(self) -> int:
        return self.prefix + self.turns * self.input.longest + (self.turns - 1) * self.output.longest

    @property
    def longest_output(self) -> int:
        return self.output.longest

    def draw(self, count: int, seed: int) -> list[Drawn]:
        """`count` requests; lengths, ids, prefixes and groups come from streams of their own."""
        inputs, outputs, groups = self._drawn_lengths(count, seed)
        allowed = allowed_ids(self.vocab_size, self.excluded)
        ids = iter(allowed[stream(seed, "tokens").integers(0, allowed.size, size=sum(inputs))].tolist())
        size = self.prefix * self.groups.count
        prefixes = allowed[stream(seed, "tokens.prefix").integers(0, allowed.size, size=size)].tolist()
        asked = [Turn(tuple(islice(ids, tokens)), out) for tokens, out in zip(inputs, outputs, strict=True)]
        rows = []
        for group, at in zip(groups, range(0, count, self.turns), strict=True):
            opening, *later = asked[at : at + self.turns]
            prefix = prefixes[group * self.prefix : (group + 1) * self.prefix]
            rows.append(Drawn((*prefix, *opening.prompt), opening.output_tokens, later=tuple(later)))
        return rows

    def outline(self, count: int, seed: int) -> list[Outline]:
        inputs, outputs, groups = self._drawn_lengths(count, seed)
        outlines = []
        for number, group in enumerate(groups):
            segments: tuple[Segment, ...] = ((("prefix", group), self.prefix),) if self.prefix else ()
            for turn, index in enumerate(range(number * self.turns, min(count, (number + 1) * self.turns))):
                if self.turns > 1:
                    segments = (*segments, (("own", index), inputs[index]))
                tokens = sum(size for _, size in segments) if self.turns > 1 else self.prefix + inputs[index]
                outlines.append(Outline(tokens, outputs[index], segments, ("answer", index), turn))
                segments = (*segments, (("answer", index), outputs[index]))
        return outlines

    def _drawn_lengths(self, count: int, seed: int) -> tuple[list[int], list[int], list[int]]:
        """Tokens in and out of each request, and the group of each conversation."""
        inputs = self.input.draw(count, stream(seed, "lengths.input"))
        outputs = self.output.draw(count, stream(seed, "lengths.output"))
        return inputs, outputs, self.groups.draw(-(-count // self.turns), seed)


def allowed_ids(vocab_size: int, excluded: frozenset[int]) -> Ids:
    """The ids that random text is made of; KvbenchError where there are none."""
    import numpy as np

    allowed = np.ones(max(vocab_size, 0), dtype=bool)
    allowed[[token for token in excluded if 0 <= token < vocab_size]] = False
    if not allowed.any():
        raise KvbenchError(f"a vocabulary of {vocab_size} leaves no id to draw; use a model with a larger one")
    return np.flatnonzero(allowed)


def cut(rows: Iterable[Drawn], count: int) -> list[Drawn]:
    """The first of `rows` that have `count` requests in all; the last one may lose turns."""
    chosen: list[Drawn] = []
    for row in rows:
        if count < 1:
            break
        kept = row.later[: count - 1]
        chosen.append(row if len(kept) == len(row.later) else Drawn(row.prompt, row.output_tokens, row.limit, kept))
        count -= 1 + len(kept)
    return chosen


def outlined(rows: Sequence[Drawn]) -> list[Outline]:
    """The outlines of rows whose ids are known: what is shared is told token by token."""
    outlines = []
    for number, row in enumerate(rows):
        segments: tuple[Segment, ...] = ()
        for turn, asked in enumerate((row, *row.later)):
            segments = (*segments, *((token, 1) for token in asked.prompt))
            tokens = sum(size for _, size in segments)
            outlines.append(Outline(tokens, asked.output_tokens, segments, ("answer", number, turn), turn))
            segments = (*segments, (("answer", number, turn), asked.output_tokens))
    return outlines


def shuffled(rows: Sequence[Drawn], count: int, seed: int) -> list[Drawn]:
    """`count` requests of `rows` in a seeded order; every row comes once before any comes again, each pass shuffled
    anew."""
    rng = stream(seed, "order")

    def passes() -> Iterable[Drawn]:
        while True:
            yield from (rows[index] for index in rng.permutation(len(rows)))

    return cut(passes(), count)
