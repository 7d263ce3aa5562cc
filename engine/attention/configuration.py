"""The compile-time shapes of the attention kernels: pure functions, which the runtime asks and `make check` compiles
for all cards. Standard library only."""

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
class Asked:
    """What a launch is for: heads and their size, bytes of an activation, and how keys are found and weighed. `eight`:
    they are stored as 8-bit floats."""

    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    decode: bool
    paged: bool
    block_size: int = 1
    eight: bool = False
    window: bool = False
    softcap: bool = False
    sinks: bool = False

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


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


def configuration(asked: Asked, target: Target) -> Configuration:
    """The tile of a launch."""
    dim_pad, least = padded(asked.head_dim), max(16, _power(asked.group))
    if asked.decode:
        tile_m, tile_n, warps, stages = least, 64, 4, 3
    else:
        tile_m, tile_n, warps, stages = max(64, least), 64, 4, 2
        if dim_pad == 128 and target.backend == "cuda":  # with 4 warps, and with 128 rows, sm_80 spills
            tile_m, warps = max(64 if int(target.arch) < 90 else 128, least), 8
    if asked.itemsize == 4:
        tile_m, tile_n, warps, stages = max(least, min(tile_m, 32)), 32, 4, 2
    if dim_pad >= 256:
        tile_n = 32 if asked.itemsize == 2 else 16
        tile_m = max(least, min(tile_m, 32 if asked.itemsize == 2 else 16))
    if target.backend == "hip":
        stages = min(stages, 2)
    while stages > 1 and _shared_bytes(tile_m, tile_n, dim_pad, stages, asked.itemsize) > target.shared_bytes:
        stages -= 1
    return Configuration(tile_m, tile_n, dim_pad, warps, stages)


def attention_constants(asked: Asked, target: Target, pieces: int) -> dict[str, int | bool | str]:
    """All that is constant in `attention_kernel`, warps and stages included, where keys are cut into `pieces`."""
    chosen = configuration(asked, target)
    return {
        "HEADS": asked.heads,
        "GROUP": asked.group,
        "DIM": asked.head_dim,
        "DIM_PAD": chosen.dim_pad,
        "TILE_M": chosen.tile_m,
        "TILE_N": chosen.tile_n,
        "BLOCK": asked.block_size,
        "SEGMENTS": pieces,
        "DECODE": asked.decode,
        "PAGED": asked.paged,
        "BYTES": asked.eight,
        "WINDOW": asked.window,
        "SOFTCAP": asked.softcap,
        "SINKS": asked.sinks,
        "PRECISION": "ieee" if asked.itemsize == 4 else "tf32",  # float32 as it is, not in the shorter format
        "num_warps": chosen.warps,
        "num_stages": chosen.stages,
    }


def write_constants(asked: Asked) -> dict[str, int | bool | str]:
    """All that is constant in `write_kernel`."""
    dim = asked.head_dim
    return {"HEADS": asked.kv_heads, "DIM": dim, "DIM_PAD": padded(dim), "BYTES": asked.eight, "num_warps": 1}


def reduce_constants(asked: Asked, pieces: int) -> dict[str, int | bool | str]:
    """All that is constant in `reduce_kernel`."""
    dim = asked.head_dim
    found = {"HEADS": asked.heads, "DIM": dim, "DIM_PAD": padded(dim), "SEGMENTS": pieces, "SINKS": asked.sinks}
    return {**found, "num_warps": 4}


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


def padded(head_dim: int) -> int:
    """The width of a tile that holds a head: a power of two."""
    return max(16, _power(head_dim))


def _power(number: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << (number - 1).bit_length()
