"""The memory both backends share: keys and values of every layer, one row a token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvbench.engine.environment import available_bytes
from kvbench.engine.types import COPY, IN, OUT, Move
from kvbench.errors import CellOutOfMemory


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token's keys and values take: `layers` x `kv_heads` x `head_dim`, twice."""

    layers: int
    kv_heads: int
    head_dim: int

    def bytes_per_token(self, itemsize: int) -> int:
        """2 x layers x kv_heads x head_dim x bytes of an element."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


@contextmanager
def out_of_memory(what: str) -> Iterator[None]:
    """Raise CellOutOfMemory, naming `what`, for whatever torch raises when memory runs out: on a CPU a RuntimeError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        message = " ".join(str(error).split())
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in message:
            raise CellOutOfMemory(f"{what}: {message or 'out of memory'}") from error
        raise


class Arena:
    """`k[layer]` and `v[layer]` are [rows, kv_heads, head_dim]. What a row means is the backend's address map. Beside
    them `host_rows` rows of host memory, pinned where the device is CUDA, take what is moved out.

    Every row is written once at the start (`fill`), so no page of memory is first touched inside a measurement. Raises
    CellOutOfMemory where the device has no room.
    """

    def __init__(
        self,
        shape: KVShape,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        host_rows: int = 0,
        fill: float = 0.0,
    ) -> None:
        self.shape = shape
        self.rows = rows
        self.nbytes = rows * shape.bytes_per_token(dtype.itemsize)
        self.k, self.v = _rows("KV arena", shape, rows, dtype, device, fill)
        pinned = device.type == "cuda" and host_rows > 0
        host = _rows("swap space", shape, host_rows, dtype, torch.device("cpu"), fill, pinned=pinned)
        self._host_k, self._host_v = host

    def write(self, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [T, kv_heads, head_dim] in `rows` [T]."""
        self.k[layer].index_copy_(0, rows, k)
        self.v[layer].index_copy_(0, rows, v)

    def move(self, moves: Sequence[Move]) -> None:
        """Copy rows, each way as one batched copy a layer: first what goes out, then within, then what comes in. No two
        moves of one way may have a target in common."""
        if not moves:
            return
        device, host = (self.k, self.v), (self._host_k, self._host_v)
        for way, sources, targets in ((OUT, device, host), (COPY, device, device), (IN, host, device)):
            chosen = [move for move in moves if move.way == way]
            if not chosen:
                continue
            taken = _indices((move.source, move.rows) for move in chosen).to(sources[0][0].device)
            given = _indices((move.target, move.rows) for move in chosen).to(targets[0][0].device)
            for source, target in zip((*sources[0], *sources[1]), (*targets[0], *targets[1]), strict=True):
                target.index_copy_(0, given, source.index_select(0, taken).to(target.device))


def _rows(
    what: str,
    shape: KVShape,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    fill: float,
    *,
    pinned: bool = False,
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Keys and values of every layer, written once."""
    nbytes, available = rows * shape.bytes_per_token(dtype.itemsize), available_bytes(device)
    if nbytes > available:
        raise CellOutOfMemory(f"{what} of {nbytes:,} bytes does not fit in {available:,} bytes free")
    size = (shape.layers, rows, shape.kv_heads, shape.head_dim)
    with out_of_memory(f"{what} of {nbytes:,} bytes"):
        k, v = (torch.full(size, fill, dtype=dtype, device=device, pin_memory=pinned) for _ in range(2))
    return k.unbind(0), v.unbind(0)


def _indices(ranges: Iterable[tuple[int, int]]) -> torch.Tensor:
    """The rows of all ranges (first, count) in order [n]."""
    return torch.tensor([row for first, count in ranges for row in range(first, first + count)], dtype=torch.int64)
