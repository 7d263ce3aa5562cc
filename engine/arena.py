"""The memory both backends share: keys and values of every layer, one row a token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

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
    them `host_rows` rows of host memory take what is moved out.

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
        self._host_k, self._host_v = _rows("swap space", shape, host_rows, dtype, torch.device("cpu"), fill)

    def write(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [T, kv_heads, head_dim] in `rows` [T]."""
        self.k[layer].index_copy_(0, rows, k)
        self.v[layer].index_copy_(0, rows, v)

    def move(self, moves: Sequence[Move]) -> None:
        """Copy rows, each way as one batched copy a layer: first what goes out, then within, then what comes in. No two
        moves of one way may have a target in common. Between a GPU and the host rows pass through pinned buffers."""
        if not moves:
            return
        device, host = (*self.k, *self.v), (*self._host_k, *self._host_v)
        self._move_out([move for move in moves if move.way == OUT], device, host)
        self._move_in([move for move in moves if move.way == COPY], device, device)
        self._move_in([move for move in moves if move.way == IN], host, device)

    def _move_out(self, moves: list[Move], device: tuple[Tensor, ...], host: tuple[Tensor, ...]) -> None:
        if moves:
            taken, given = _indices(moves)
            taken = taken.to(device[0].device)
            landing = [source.index_select(0, taken).to("cpu", non_blocking=True) for source in device]
            if device[0].is_cuda:
                torch.cuda.current_stream(device[0].device).synchronize()
            for target, rows in zip(host, landing, strict=True):
                target.index_copy_(0, given, rows)

    def _move_in(self, moves: list[Move], sources: tuple[Tensor, ...], device: tuple[Tensor, ...]) -> None:
        """From the host, or from the device itself."""
        if moves:
            taken, given = _indices(moves)
            taken, given = taken.to(sources[0].device), given.to(device[0].device)
            for source, target in zip(sources, device, strict=True):
                pinned = target.is_cuda and not source.is_cuda
                rows = torch.empty((len(taken), *source.shape[1:]), dtype=source.dtype, device=source.device,
                                   pin_memory=pinned)  # fmt: skip
                torch.index_select(source, 0, taken, out=rows)
                target.index_copy_(0, given, rows.to(target.device, non_blocking=True))


def _rows(
    what: str,
    shape: KVShape,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    fill: float,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Keys and values of every layer, written once."""
    nbytes = rows * shape.bytes_per_token(dtype.itemsize)
    if rows and nbytes > (available := available_bytes(device)):
        raise CellOutOfMemory(f"{what} of {nbytes:,} bytes does not fit in {available:,} bytes free")
    size = (shape.layers, rows, shape.kv_heads, shape.head_dim)
    with out_of_memory(f"{what} of {nbytes:,} bytes"):
        k, v = (torch.full(size, fill, dtype=dtype, device=device) for _ in range(2))
    return k.unbind(0), v.unbind(0)


def _indices(moves: list[Move]) -> tuple[Tensor, Tensor]:
    """The rows that all moves take and give, in order, int64 [n] each."""
    source, target, rows = torch.tensor([(move.source, move.target, move.rows) for move in moves]).unbind(1)
    within = torch.arange(int(rows.sum())) - (rows.cumsum(0) - rows).repeat_interleave(rows)
    return source.repeat_interleave(rows) + within, target.repeat_interleave(rows) + within
