"""What a step has to do, whatever it runs on."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.engine.types import COPY, IN, OUT, Batch


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step has to do, in tokens: one each for `decodes` sequences, `prefill_tokens` of prompts, attention over
    `attended_pairs` (query, key) pairs with `context_tokens` keys and values to read, `sampled_tokens` drawn. Before it
    `copied_tokens` rows are copied on the card and `swapped_tokens` come from or go to host memory."""

    decodes: int
    prefill_tokens: int
    attended_pairs: int
    context_tokens: int
    sampled_tokens: int
    copied_tokens: int = 0
    swapped_tokens: int = 0

    @classmethod
    def of(cls, batch: Batch) -> StepWork:
        """The work of a batch; a decode is the one new token of a sequence that has answered before, as in the record
        of a step."""
        chunks, count = batch.fresh, len(batch.decodes)
        if not chunks and not batch.moves:
            return cls(count, 0, batch.context, batch.context, count)
        decodes = count + sum(c.length == 1 and c.samples and c.sequence.generated > 0 for c in chunks)
        return cls(
            decodes=decodes,
            prefill_tokens=batch.tokens - decodes,
            attended_pairs=batch.context + sum((c.start + 1 + c.end) * c.length // 2 for c in chunks),
            context_tokens=batch.context + sum(c.end for c in chunks),
            sampled_tokens=count + sum(c.draws for c in chunks),
            copied_tokens=batch.moved(COPY),
            swapped_tokens=batch.moved(OUT) + batch.moved(IN),
        )
