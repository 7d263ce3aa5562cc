"""How far a fit reaches: the largest steps among the runs that the parameters of an engine generation were fitted to.
Beyond them a cost model still gives a number, but nobody has held it against anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvbench.metrics.records import StepRecord
from kvbench.planner.predict import replayed

if TYPE_CHECKING:
    from kvbench.planner.fit import Case

Numbers = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Reach:
    """The most of a step: `sequences`, computed tokens read (`context_tokens`), prompts' tokens (`prefill_tokens`)."""

    sequences: int
    context_tokens: int
    prefill_tokens: int

    def beyond(self, steps: Sequence[StepRecord]) -> list[str]:
        """What of a run's largest steps goes further, in words."""
        most = {
            "sequences": max((step.sequences for step in steps), default=0),
            "context_tokens": max((step.context_tokens for step in steps), default=0),
            "prefill_tokens": max((step.prefill_tokens for step in steps), default=0),
        }
        nouns = {"sequences": "sequences at once", "context_tokens": "tokens read", "prefill_tokens": "prompt tokens"}
        known = asdict(self)
        return [
            f"{number:,} {nouns[name]} in a step (fitted up to {known[name]:,})"
            for name, number in most.items()
            if number > known[name]
        ]


def reach_of(cases: Iterable[Case]) -> dict[str, Reach]:
    """By engine generation, of the cases whose steps are known without their times: all at once, by concurrency, or
    single batches."""
    found: dict[str, Numbers] = {}
    for case in cases:
        generation = case.situation.engine.generation
        pairs = zip(found.get(generation, (0, 0, 0)), _largest(case), strict=True)
        sequences, context_tokens, prefill_tokens = (max(pair) for pair in pairs)
        found[generation] = sequences, context_tokens, prefill_tokens
    return {generation: Reach(*numbers) for generation, numbers in sorted(found.items()) if all(numbers)}


def _largest(case: Case) -> Numbers:
    """The most of each in any step."""
    asked = case.configuration
    prompt, output = round(asked.input_tokens or 0), round(asked.output_tokens or 0)
    if asked.load == "batch":
        batch = round(asked.load_value or 1)
        return batch, batch * (prompt + output), batch * prompt
    if asked.load not in ("closed", "offline"):
        return 0, 0, 0
    steps = replayed(asked, case.settings, case.situation.limits)
    decodes, prefill_tokens, _, context_tokens, _ = (
        max(int(first.max()), int(last.max())) for first, last in zip(steps.first, steps.last, strict=True)
    )
    return decodes, context_tokens, prefill_tokens
