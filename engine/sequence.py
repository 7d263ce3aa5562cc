"""A sample of a request being served: the engine's one mutable object for it, from arrival to metrics."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from kvbench.engine.types import SAMPLE, Request

_NONE: frozenset[int] = frozenset()


class Sequence:
    """A sample of a request being served. `tokens` is everything known (prompt, then output), `computed` how many of
    them have their keys and values stored. A step moves `computed` towards `known`; nothing else distinguishes a
    prefill from a decode.

    One that decodes gets a token in every step, so it only follows the steps of the engine (`follow`): what it knows
    and has computed is worked out when it is asked for, and it costs nothing in between. Where nobody computes tokens
    (on virtual time) they are made then, too: `stand_in`s.

    `forks` are the request's other samples while this one computes the prompt for them; they start with its end.
    `spans` keeps when output tokens appeared, as half-open ranges of steps with one token in each step.
    `cached_tokens` of the prompt were found in memory when the sequence was first admitted. In `swaps` of its
    `preemptions` its rows went to host memory, in the others they were given up. `place` orders those that run, the
    first admitted first; `due_step` and `end_step` are the steps in which it needs memory and completes its answer.
    """

    __slots__ = (
        *("request", "prompt_tokens", "truncated_tokens", "sample", "id", "sampling", "forks", "preemptions", "swaps"),
        *("admitted_s", "cached_tokens", "place", "due_step", "end_step"),
        *("_tokens", "_unmade", "_computed", "_spans", "_steps", "_since"),
    )

    def __init__(
        self, request: Request, tokens: list[int], prompt_tokens: int, truncated_tokens: int = 0, sample: int = 0
    ) -> None:
        self.request = request
        self.prompt_tokens = prompt_tokens
        self.truncated_tokens = truncated_tokens
        self.sample = sample
        self.id = request.id + sample * SAMPLE
        self.sampling = request.sampling_of(sample)
        self.forks: list[Sequence] = []
        self.preemptions = 0
        self.swaps = 0
        self.admitted_s: float | None = None
        self.cached_tokens = 0
        self.place = 0
        self.due_step = -1
        self.end_step = -1
        self._tokens = tokens
        self._unmade = 0  # of those known, the stand-ins that nobody asked for yet
        self._computed = 0
        self._spans: list[list[int]] = []
        self._steps: Steps | None = None  # followed since step `_since`, where `_computed` was right
        self._since = 0

    @classmethod
    def of(cls, request: Request, prompt: Iterable[int] | None = None, sample: int = 0) -> Sequence:
        """A sample of a request that has just arrived; `prompt` where it was cut to fit."""
        tokens = list(request.prompt if prompt is None else prompt)
        return cls(request, tokens, len(tokens), len(request.prompt) - len(tokens), sample)

    @property
    def computed(self) -> int:
        return self._computed if self._steps is None else self._computed + self._steps.done - self._since

    @computed.setter
    def computed(self, rows: int) -> None:
        assert self._steps is None, f"sequence {self.id} decodes: it computes one token a step"
        self._computed = rows

    @property
    def known(self) -> int:
        return len(self._tokens) + self._unmade if self._steps is None else self.computed + 1

    @property
    def tokens(self) -> list[int]:
        if len(self._tokens) < (known := self.known):
            self._tokens.extend(stand_ins(self, len(self._tokens), known))
            self._unmade = 0
        return self._tokens

    @property
    def spans(self) -> list[list[int]]:
        if self._steps is not None and self._steps.done > self._since:
            return self._with_span(self._since, self._steps.done)
        return self._spans

    @property
    def output(self) -> Ordered[int]:
        if len(self._tokens) == self.prompt_tokens < (known := self.known):
            return stand_ins(self, self.prompt_tokens, known)
        return self.tokens[self.prompt_tokens :]

    @property
    def generated(self) -> int:
        return self.known - self.prompt_tokens

    @property
    def decodes(self) -> bool:
        """Whether it gets a token in every step."""
        return self._steps is not None

    def follow(self, steps: Steps) -> None:
        """From now on it gets a token in every step, having computed all known ones but the last."""
        assert self._steps is None and self._computed == self.known - 1, f"sequence {self.id} cannot decode yet"
        self._steps, self._since = steps, steps.done

    def settle(self) -> tuple[int, int]:
        """It no longer gets a token in every step. Returns what it had computed when it began to, and before which
        step that was."""
        began = self._computed, self._since
        self._unmade = self.known - len(self._tokens)
        self._spans, self._computed, self._steps = self.spans, self.computed, None
        return began

    def emit(self, token: int | None, step: int) -> None:
        """It has got a token from `step` (None: nobody computed it). One that follows the steps knows without being
        told when, so it is told only what."""
        if token is not None:
            self._tokens.append(token)
        if self._steps is None:
            self._unmade += token is None
            self._spans = self._with_span(step, step + 1)

    def _with_span(self, first: int, end: int) -> list[list[int]]:
        """The spans and another one behind them."""
        if self._spans and self._spans[-1][1] == first:
            return [*self._spans[:-1], [self._spans[-1][0], end]]
        return [*self._spans, [first, end]]

    @property
    def ended(self) -> str:
        """`length` or `stop` once the answer is complete, else the empty string."""
        if not self.generated:
            return ""
        if self.stop_ids and self.tokens[-1] in self.stop_ids:
            return "stop"
        return "length" if self.generated >= self.longest else ""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end its answer; none where its length was drawn."""
        return self.request.stop_ids if self.request.output_tokens is None else _NONE

    @property
    def longest(self) -> int:
        """Tokens of the longest answer that it can give."""
        return self.request.output_tokens or self.request.max_tokens


@dataclass(slots=True)
class Steps:
    """How many steps the engine has done; the next one has this number."""

    done: int = 0


def stand_ins(sequence: Sequence, first: int, end: int) -> range:
    """Stand for the tokens of a sequence at positions `first` to `end - 1` where none are computed: negative numbers,
    equal to no others, so that no two texts are equal by chance and one that is computed again is what it was."""
    zero = -1 - (sequence.id << 24)
    return range(zero - first, zero - end, -1)
