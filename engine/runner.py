"""Runs batches on a device: token ids in, sampled tokens out."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from kvbench.engine.arena import out_of_memory
from kvbench.engine.interfaces import Cache
from kvbench.engine.model import BoundModel
from kvbench.engine.sampling import next_tokens
from kvbench.engine.types import Batch, Sampled, Ticket
from kvbench.errors import CellError


class ModelRunner:
    """Executor over a real model and a backend's cache."""

    def __init__(self, model: BoundModel, cache: Cache) -> None:
        self._model = model
        self._cache = cache
        self._device = model.device

    def launch(self, batch: Batch, now_s: float) -> Ticket:
        with out_of_memory(f"step of {batch.tokens} tokens"):
            inputs = self._prepare(batch)
            started_s = time.perf_counter()
            tokens = self._run(batch, *inputs)
        return Ticket(batch, pending=(tokens, started_s))

    def collect(self, ticket: Ticket) -> Sampled:
        assert isinstance(ticket.pending, tuple)
        tokens, started_s = ticket.pending
        with out_of_memory(f"step of {ticket.batch.tokens} tokens"):
            found = tokens.tolist()  # waits for the device
        if -1 in found:
            raise CellError(f"step {ticket.batch.step} gave logits that are NaN or infinite")
        return Sampled(found, time.perf_counter() - started_s)

    def _prepare(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The host's part of a step: token ids [T], positions [T], and the indices [samples] to sample after."""
        ids = [sequence.tokens[-1] for sequence in batch.decodes]
        positions = [*batch.positions]
        keep = list(range(len(ids)))
        for chunk in batch.fresh:
            ids.extend(chunk.sequence.tokens[chunk.start : chunk.end])
            positions.extend(range(chunk.start, chunk.end))
            keep.extend([len(ids) - 1] * chunk.draws)
        return self._tensor(ids), self._tensor(positions), self._tensor(keep)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _run(self, batch: Batch, ids: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        """Launch what the cache has to do first, one forward pass and sampling; the new tokens [samples], -1 where the
        logits are no numbers."""
        self._cache.begin(batch)
        logits = self._model.forward(ids, positions, keep, self._cache)
        return next_tokens(logits, batch.drawn())
