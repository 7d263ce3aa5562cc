"""Where a batch's tokens lie: built once a step by a backend's cache, read by every attention path in every layer."""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass
from operator import is_
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kvbench.engine.arena import Arena
from kvbench.engine.types import Batch

Counts = np.ndarray[tuple[int], np.dtype[np.int64]]
"""One number a sequence (or a token) of the batch."""


@dataclass(frozen=True, slots=True)
class Layout:
    """S sequences and T new tokens, flat in the batch. On the device: `starts` int32 [S + 1], the first query of each
    sequence; `ends` int32 [S], its keys, the last query's own included; `writes` int64 [T], the arena row of each new
    token.

    The address map is one of two: `bases` int64 [S] (position p lies in row `base + p`), or `tables` int32 [S, width]
    with a `block_size` (in row `table[p // block_size] * block_size + p % block_size`; entries behind a sequence's last
    block may be anything).

    `queries` and `keys` [S] are what the host knows of them, so no path has to ask the device."""

    starts: Tensor
    ends: Tensor
    writes: Tensor
    queries: Counts
    keys: Counts
    longest_queries: int
    longest_keys: int
    bases: Tensor | None = None
    tables: Tensor | None = None
    block_size: int = 1

    @property
    def sequences(self) -> int:
        return len(self.keys)

    @property
    def tokens(self) -> int:
        return len(self.writes)


class Path(Protocol):
    """A way to compute attention over an arena. One that exists for a device is chosen once, for both backends."""

    def attend(
        self,
        layout: Layout,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Store k and v where the layout says and attend, as `interfaces.Cache.attend`."""


class PathMaker(Protocol):
    """Makes a path over an arena in which no sequence has more than `longest` rows."""

    def __call__(self, arena: Arena, longest: int) -> Path: ...


@dataclass(frozen=True, slots=True)
class Extents:
    """What a batch computes of each sequence: `queries` tokens, the last of which is the `keys`-th; and the `position`
    of every token, beside the `sequence` (its place in the batch) that it belongs to."""

    queries: Counts
    keys: Counts
    position: Counts
    sequence: Counts

    @classmethod
    def of(cls, batch: Batch) -> Extents:
        fresh = batch.fresh
        keys = np.array([*batch.positions, *(chunk.end - 1 for chunk in fresh)], dtype=np.int64) + 1
        queries = np.ones(len(keys), dtype=np.int64)
        if not fresh:
            return cls(queries, keys, keys - 1, np.arange(len(keys)))
        queries[len(batch.decodes) :] = [chunk.length for chunk in fresh]
        sequence = np.arange(len(keys)).repeat(queries)
        position = np.arange(len(sequence)) + (keys - queries.cumsum())[sequence]
        return cls(queries, keys, position, sequence)

    def layout(self, rows: Counts, device: torch.device, **address_map: Any) -> Layout:
        """The layout of such a batch; `rows` [T] is where its tokens go."""
        starts = np.zeros(len(self.keys) + 1, dtype=np.int32)
        self.queries.cumsum(out=starts[1:])
        return Layout(
            starts=torch.from_numpy(starts).to(device),
            ends=torch.from_numpy(self.keys.astype(np.int32)).to(device),
            writes=torch.from_numpy(rows).to(device),
            queries=self.queries,
            keys=self.keys,
            longest_queries=int(self.queries.max()),
            longest_keys=int(self.keys.max()),
            **address_map,
        )


def contiguous(batch: Batch, bases: Listing[int], device: torch.device) -> Layout:
    """The layout over ranges of rows, each sequence's beginning at its base."""
    extents = Extents.of(batch)
    host = np.array(bases, dtype=np.int64)
    rows = host[extents.sequence] + extents.position
    return extents.layout(rows, device, bases=torch.from_numpy(host).to(device))


def paged(batch: Batch, tables: BlockTables, blocks: Listing[list[int]]) -> Layout:
    """The layout over blocks: `blocks` are each sequence's, in order of position."""
    extents = Extents.of(batch)
    size = tables.block_size
    on_device = tables.update(blocks)
    number, within = np.divmod(extents.position, size)
    rows = tables.host[extents.sequence, number] * np.int64(size) + within
    return extents.layout(rows, on_device.device, tables=on_device, block_size=size)


class BlockTables:
    """Block tables of the running batch, one row a sequence in the batch's order, kept from step to step: only what is
    new is written. A sequence is known again by its list of blocks, which the allocator only extends. On a CPU `host`
    and device are one memory."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.host = np.zeros((1, 1), dtype=np.int32)
        self._device = torch.from_numpy(self.host).to(device)
        self._lists: list[list[int]] = []
        self._filled = np.zeros(0, dtype=np.int64)

    def update(self, lists: Listing[list[int]]) -> Tensor:
        """Tables int32 [S, width] of these sequences; valid until the next call."""
        filled = np.fromiter(map(len, lists), np.int64, len(lists))
        kept = len(lists) == len(self._lists) and all(map(is_, lists, self._lists))
        roomy = self._room_for(len(lists), int(filled.max()))
        if not kept:
            self._rearrange(lists)
        grown = np.flatnonzero(filled != self._filled)
        ends = self._filled[grown]
        single = filled[grown] == ends + 1
        rows, columns = grown[single], ends[single]
        self.host[rows, columns] = [lists[row][-1] for row in rows.tolist()]
        for row, end in zip(grown[~single].tolist(), ends[~single].tolist(), strict=True):
            self.host[row, end : filled[row]] = lists[row][end:]
        self._filled = filled
        if self._device.device.type != "cpu":
            self._upload(len(lists), rows, columns, kept and roomy and bool(single.all()))
        return self._device[: len(lists)]

    def _room_for(self, rows: int, width: int) -> bool:
        """Whether there was room for so many; there is now."""
        if rows <= self.host.shape[0] and width <= self.host.shape[1]:
            return True
        larger = np.zeros((_larger(self.host.shape[0], rows), _larger(self.host.shape[1], width)), dtype=np.int32)
        larger[: self.host.shape[0], : self.host.shape[1]] = self.host
        self.host, self._device = larger, torch.from_numpy(larger).to(self._device.device)
        return False

    def _rearrange(self, lists: Listing[list[int]]) -> None:
        """Move the rows that are known to their new places; the others begin empty."""
        places = {id(blocks): row for row, blocks in enumerate(self._lists)}  # held, so an id names one list
        known = np.array([places.get(id(blocks), -1) for blocks in lists])
        filled = np.where(known < 0, 0, self._filled[known] if len(self._filled) else 0)
        width = int(filled.max())
        self.host[: len(lists), :width] = self.host[known, :width]
        self._lists, self._filled = list(lists), filled

    def _upload(self, rows: int, changed: Counts, columns: Counts, little: bool) -> None:
        """To a device with memory of its own: the entries that changed, or all where those are more than one a row."""
        if not little:
            self._device[:rows].copy_(torch.from_numpy(self.host[:rows]))
        elif len(changed):
            values = torch.from_numpy(self.host[changed, columns]).to(self._device.device)
            where = torch.from_numpy(np.stack([changed, columns])).to(self._device.device)
            self._device[where[0], where[1]] = values


def _larger(size: int, needed: int) -> int:
    return size if needed <= size else max(needed, 2 * size)
