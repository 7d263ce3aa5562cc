"""What a device can do at best, measured here: bytes read and copied a second, and multiplications.

A kernel is held against these, not against a datasheet: the same memory under the same driver, clocks and neighbours.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from kvbench.engine.linear import Linear

MEMORY_SHARE = 0.05
"""Of the free memory a buffer takes at most this share."""
BUFFER_BYTES = {"cpu": 256 * 2**20, "cuda": 2 * 2**30}
"""Far beyond any cache."""
SIDE = {"cpu": 2048, "cuda": 8192}
"""Rows and columns of the matrices that are multiplied."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of each repeat of something, in order."""

    each_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return median(self.each_s)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median of the middle half of the repeats."""
        ordered = sorted(self.each_s)
        quarter = len(ordered) // 4
        middle = ordered[quarter : len(ordered) - quarter]
        return (middle[-1] - middle[0]) / self.median_s


@dataclass(frozen=True, slots=True)
class Ceilings:
    """In bytes and FLOP a second; a copied byte counts twice, read and written. `timings` by the name of each."""

    read_bytes_per_s: float
    copy_bytes_per_s: float
    flops_per_s: float
    timings: dict[str, Timing]


def timed(
    work: Callable[[], object],
    device: torch.device,
    *,
    repeats: int = 9,
    before: Callable[[], object] | None = None,
) -> Timing:
    """Run `work` twice to warm up and `repeats` times on the clock of the device; `before` each, off the clock."""
    for _ in range(2):
        work()
    if device.type == "cuda":
        return Timing(tuple(_on_gpu(work, device, before) for _ in range(repeats)))
    found = []
    for _ in range(repeats):
        if before is not None:
            before()
        started_s = time.perf_counter()
        work()
        found.append(time.perf_counter() - started_s)
    return Timing(tuple(found))


def _on_gpu(work: Callable[[], object], device: torch.device, before: Callable[[], object] | None) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if before is not None:
        before()
    torch.cuda.synchronize(device)
    first.record(torch.cuda.current_stream(device))
    work()
    last.record(torch.cuda.current_stream(device))
    torch.cuda.synchronize(device)
    return float(first.elapsed_time(last)) / 1e3


def cache_flush(device: torch.device) -> Callable[[], object]:
    """Something that drives all else out of the device's caches."""
    buffer = torch.empty(_buffer_bytes(device) // 4, dtype=torch.float32, device=device)
    return buffer.zero_


def measure_ceilings(device: torch.device, dtype: torch.dtype, *, repeats: int = 9) -> Ceilings:
    """The three ceilings, `dtype` being that of the matrices."""
    elements = _buffer_bytes(device) // 4
    read, copy = _memory(elements, device, repeats)
    side = SIDE[device.type]
    product = Linear([torch.nn.Linear(side, side, bias=False, device=device, dtype=dtype)])  # as a model's own
    x = torch.randn(side, side, dtype=dtype, device=device)
    with torch.inference_mode():
        multiply = timed(lambda: product(x), device, repeats=repeats)
    return Ceilings(
        read_bytes_per_s=4 * elements / read.median_s,
        copy_bytes_per_s=8 * elements / copy.median_s,
        flops_per_s=2 * side**3 / multiply.median_s,
        timings={"read": read, "copy": copy, "multiply": multiply},
    )


def _memory(elements: int, device: torch.device, repeats: int) -> tuple[Timing, Timing]:
    """Reading so many 4-byte numbers, and copying them."""
    source = torch.ones(elements, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return timed(source.sum, device, repeats=repeats), timed(lambda: target.copy_(source), device, repeats=repeats)


def _buffer_bytes(device: torch.device) -> int:
    from kvbench.engine.environment import available_bytes

    return min(BUFFER_BYTES[device.type], int(available_bytes(device) * MEMORY_SHARE)) // 4 * 4
