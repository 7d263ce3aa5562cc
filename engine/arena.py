"""The memory both backends share: keys and values of every layer, one row a token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvbench.engine.environment import available_bytes
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
    """`k[layer]` and `v[layer]` are [rows, kv_heads, head_dim]. What a row means is the backend's address map.

    Every row is written once at the start (`fill`), so no page of memory is first touched inside a measurement. Raises
    CellOutOfMemory where the device has no room.
    """

    def __init__(
        self, shape: KVShape, rows: int, dtype: torch.dtype, device: torch.device, *, fill: float = 0.0
    ) -> None:
        self.shape = shape
        self.rows = rows
        self.nbytes = rows * shape.bytes_per_token(dtype.itemsize)
        available = available_bytes(device)
        if self.nbytes > available:
            raise CellOutOfMemory(f"KV arena of {self.nbytes:,} bytes does not fit in {available:,} bytes free")
        size = (shape.layers, rows, shape.kv_heads, shape.head_dim)
        with out_of_memory(f"KV arena of {self.nbytes:,} bytes"):
            self.k = torch.full(size, fill, dtype=dtype, device=device).unbind(0)
            self.v = torch.full(size, fill, dtype=dtype, device=device).unbind(0)

    def write(self, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [T, kv_heads, head_dim] in `rows` [T]."""
        self.k[layer].index_copy_(0, rows, k)
        self.v[layer].index_copy_(0, rows, v)
