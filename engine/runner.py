"""Runs batches on a device: token ids in, sampled tokens out."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from kvbench.engine.interfaces import Cache
from kvbench.engine.model import BoundModel
from kvbench.engine.sampling import next_tokens
from kvbench.engine.types import Batch, Sampled, Ticket
from kvbench.errors import CellError, CellOutOfMemory


class ModelRunner:
    """Executor over a real model and a backend's cache."""

    def __init__(self, model: BoundModel, cache: Cache) -> None:
        self._model = model
        self._cache = cache
        self._device = model.device

    def launch(self, batch: Batch, now_s: float) -> Ticket:
        started_s = time.perf_counter()
        try:
            tokens = self._run(batch)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise CellOutOfMemory(f"step of {batch.tokens} tokens: {str(error).splitlines()[0]}") from error
        return Ticket(batch, pending=(tokens, started_s))

    def collect(self, ticket: Ticket) -> Sampled:
        assert isinstance(ticket.pending, tuple)
        tokens, started_s = ticket.pending
        found = tokens.tolist()  # waits for the device
        if -1 in found:
            raise CellError(f"step {ticket.batch.step} gave logits that are NaN or infinite")
        return Sampled(found, time.perf_counter() - started_s)

    def _run(self, batch: Batch) -> Tensor:
        """Launch one forward pass and sampling; the new tokens [samples], -1 where the logits are no numbers."""
        ids: list[int] = []
        positions: list[int] = []
        keep: list[int] = []
        for chunk in batch.chunks:
            ids.extend(chunk.sequence.tokens[chunk.start : chunk.end])
            positions.extend(range(chunk.start, chunk.end))
            if chunk.samples:
                keep.append(len(ids) - 1)
        self._cache.begin(batch)
        flat, at, kept = (
            torch.tensor(values, dtype=torch.int64, device=self._device) for values in (ids, positions, keep)
        )
        logits = self._model.forward(flat, at, kept, self._cache)
        if not keep:  # transformers reads an empty index as "all"
            return flat[:0]
        return next_tokens(logits, [chunk for chunk in batch.chunks if chunk.samples])
