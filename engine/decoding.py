"""The sequences that decode. Each gets one token in every step, so a step costs what happens in it, not how many there
are.

A calendar says when something is to be done for one of them: memory for its next rows, the end of its answer. Sums over
all of them (the rows they filled, the context they read) follow from how many there are and how many steps are done.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from operator import attrgetter

from kvbench.engine.sequence import Sequence, Steps

NEVER = -1
"""The step of what is not expected."""


class Decoding:
    """`count` sequences follow the `steps`.

    `context` is what all of them have computed, `unnoted` the rows of it that were filled since each joined, of which
    the allocator's books do not know yet: a sequence that leaves has to be committed.
    """

    def __init__(self) -> None:
        self.steps = Steps()
        self.count = 0
        self._start = 0  # of each member what it had computed when it joined ...
        self._joined = 0  # ... and the step, added up
        self._due: defaultdict[int, list[Sequence]] = defaultdict(list)
        self._ends: defaultdict[int, list[Sequence]] = defaultdict(list)

    @property
    def unnoted(self) -> int:
        return self.count * self.steps.done - self._joined

    @property
    def context(self) -> int:
        return self._start + self.unnoted

    def join(self, sequence: Sequence, room: int) -> None:
        """From the next step on it gets a token in each; `room` of its positions are addressable."""
        sequence.follow(self.steps)
        computed, done = sequence.computed, self.steps.done
        self.count += 1
        self._start += computed
        self._joined += done
        sequence.end_step = done + sequence.longest - sequence.generated - 1
        self._ends[sequence.end_step].append(sequence)
        self.expect(sequence, room)

    def expect(self, sequence: Sequence, room: int) -> None:
        """Now `room` of its positions are addressable: it needs more when they are full, unless it ends before."""
        sequence.due_step = self.steps.done + room - sequence.computed
        if sequence.due_step <= sequence.end_step:
            self._due[sequence.due_step].append(sequence)

    def expect_later(self, sequences: list[Sequence], rows: int) -> None:
        """So many more positions are now addressable of each of these, which had filled all they had."""
        step = self.steps.done + rows
        later = [one for one in sequences if one.end_step >= step]
        for one in later:
            one.due_step = step
        if later:
            self._due[step] += later

    def leave(self, sequence: Sequence) -> bool:
        """It no longer gets a token in each step; whether it did."""
        if not sequence.decodes:
            return False
        computed, done = sequence.settle()
        sequence.due_step = sequence.end_step = NEVER
        self.count -= 1
        self._start -= computed
        self._joined -= done
        return True

    def quiet(self) -> int:
        """How many steps there are up to the next in which one ends, that one included; 0 where nobody decodes."""
        return min(self._ends) - self.steps.done + 1 if self.count else 0

    def due(self) -> list[Sequence]:
        """Those that need memory for the next step, the first admitted first. It forgets them: whoever gets some is
        expected anew. (One that left and came back at once is in the calendar twice.)"""
        step = self.steps.done
        if step not in self._due:
            return []
        return in_order([one for one in self._due.pop(step) if one.due_step == step])

    def ending(self) -> list[Sequence]:
        """Those whose longest answer is whole with the last step done."""
        step = self.steps.done - 1
        if step not in self._ends:
            return []
        return in_order([one for one in self._ends.pop(step) if one.end_step == step])


def in_order(sequences: Iterable[Sequence]) -> list[Sequence]:
    """Each once, the first admitted first."""
    if isinstance(sequences, list) and len(sequences) < 2:
        return sequences
    found = list(dict.fromkeys(sequences))
    found.sort(key=_place)
    return found


_place = attrgetter("place")
