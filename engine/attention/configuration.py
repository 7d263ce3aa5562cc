"""The compile-time shapes of the attention kernels: one pure function, which the runtime asks and the check of all cards
compiles. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

SEGMENTS_AT_MOST = 16
PROGRAMS_WANTED = {"cuda": 264, "hip": 304}
"""Twice the multiprocessors of a large card: with fewer tiles than that keys are cut into segments."""


@dataclass(frozen=True, slots=True)
class Target:
    """What the kernels run on: `cuda` with 80, 90, 100 …, `hip` with gfx942 …"""

    backend: str
    arch: int | str

    @property
    def shared_bytes(self) -> int:
        """Shared memory a program may have (CUDA programming guide; CDNA 3 ISA)."""
        if self.backend == "hip":
            return 64 * 1024
        known = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
        return known.get(int(self.arch), 99) * 1024


@dataclass(frozen=True, slots=True)
class Configuration:
    """`tile_m` rows (queries x group, at least 16: what a matrix instruction takes), `tile_n` keys a turn."""

    tile_m: int
    tile_n: int
    dim_pad: int
    warps: int
    stages: int

    def queries(self, group: int) -> int:
        """Queries in a tile."""
        return self.tile_m // group


def configuration(head_dim: int, group: int, itemsize: int, target: Target, *, decode: bool) -> Configuration:
    """For heads of `head_dim`, `group` query heads a key head and activations of `itemsize` bytes."""
    dim_pad = max(16, _power(head_dim))
    least = max(16, _power(group))
    if decode:
        tile_m, tile_n, warps, stages = least, 64, 4, 3
    else:
        tile_m, tile_n, warps, stages = max(64, least), 64, 4, 2
    if itemsize == 4:
        tile_m, tile_n, stages = max(least, min(tile_m, 32)), 32, 2
    if dim_pad >= 256:
        tile_n = 32 if itemsize == 2 else 16
        tile_m = max(least, min(tile_m, 32 if itemsize == 2 else 16))
    if target.backend == "hip":
        stages = min(stages, 2)
    while stages > 1 and _shared_bytes(tile_m, tile_n, dim_pad, stages, itemsize) > target.shared_bytes:
        stages -= 1
    return Configuration(tile_m, tile_n, dim_pad, warps, stages)


def segments(tiles: int, kv_heads: int, longest_keys: int, tile_n: int, backend: str) -> int:
    """Into how many pieces the keys are cut: a power of two, none of them shorter than two turns."""
    wanted = PROGRAMS_WANTED[backend] // max(1, tiles * kv_heads)
    useful = longest_keys // (2 * tile_n)
    found = 1
    while found * 2 <= min(wanted, useful, SEGMENTS_AT_MOST):
        found *= 2
    return found


def _shared_bytes(tile_m: int, tile_n: int, dim_pad: int, stages: int, itemsize: int) -> int:
    """What keys and values in flight and the queries take together, at most."""
    return (2 * stages * tile_n + tile_m) * dim_pad * itemsize


def _power(number: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << (number - 1).bit_length()
