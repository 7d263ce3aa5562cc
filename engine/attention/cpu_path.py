"""Attention over an arena by a C++ kernel (`cpu_kernel.cpp`): on a CPU, where a compiler is found."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.arena import Arena
from kvbench.engine.attention.build import kernels
from kvbench.engine.attention.layout import Layout

DTYPES = (torch.float32, torch.bfloat16)
LARGEST_HEAD = 256


class Call(ctypes.Structure):
    """`struct Call` of the kernel, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "out", "arena_k", "arena_v", "sinks")),
        *((name, c_void_p) for name in ("starts", "ends", "writes", "bases", "tables")),
        *((name, c_int64) for name in ("table_stride", "block_size")),
        *((name, c_int64) for name in ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head")),
        *((name, c_int64) for name in ("sequences", "tokens", "query_heads", "kv_heads", "dim")),
        *((name, c_int64) for name in ("window", "longest_keys", "threads", "bfloat16")),
        *((name, c_float) for name in ("scale", "softcap")),
    )


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the kernel cannot be used for such a model here; None where it can. The first call may build it."""
    if device.type != "cpu":
        return f"it runs on CPUs, not on {device.type}"
    if dtype not in DTYPES:
        return f"it computes float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if head_dim > LARGEST_HEAD:
        return f"it takes heads of at most {LARGEST_HEAD}, not {head_dim}"
    found = kernels()
    return found if isinstance(found, str) else None


class CppPath:
    """A `layout.Path` for CPUs. Nothing is staged, so `longest` does not matter."""

    def __init__(self, arena: Arena, longest: int) -> None:
        library = kernels()
        assert not isinstance(library, str), library
        self._attend: Any = library.kvbench_attend
        self._attend.argtypes, self._attend.restype = [POINTER(Call)], ctypes.c_int
        self._arena = arena
        dtype = arena.k[0].dtype
        assert why_not(arena.k[0].device, dtype, arena.shape.head_dim) is None
        self._call = Call(kv_heads=arena.shape.kv_heads, dim=arena.shape.head_dim, bfloat16=dtype == torch.bfloat16)
        self._reference = ctypes.byref(self._call)
        self._layout: Layout | None = None

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
        if layout is not self._layout:
            self._begin(layout)
        q, k, v = _rows(q), _rows(k), _rows(v)
        arena, call = self._arena, self._call
        dtype = arena.k[layer].dtype
        assert q.dtype == k.dtype == v.dtype == dtype and len(q) == len(k) == len(v) == call.tokens
        assert k.shape[1:] == v.shape[1:] == arena.k[layer].shape[1:] and q.shape[2] == call.dim
        out = torch.empty(q.shape, dtype=dtype)
        sinks = None if sinks is None else sinks.float().contiguous()
        call.q, call.k, call.v, call.out = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        call.arena_k, call.arena_v = arena.k[layer].data_ptr(), arena.v[layer].data_ptr()
        call.sinks = None if sinks is None else sinks.data_ptr()
        call.q_token, call.q_head, _ = q.stride()
        call.k_token, call.k_head, _ = k.stride()
        call.v_token, call.v_head, _ = v.stride()
        call.query_heads = q.shape[1]
        call.scale, call.softcap, call.window = scale, softcap or 0.0, window or 0
        status = self._attend(self._reference)
        assert status == 0, "the kernel refused what it was given"
        return out

    def _begin(self, layout: Layout) -> None:
        """What all layers of a step share. The layout is held, so its memory stays."""
        call, self._layout = self._call, layout
        call.starts, call.ends, call.writes = (part.data_ptr() for part in (layout.starts, layout.ends, layout.writes))
        call.sequences, call.tokens, call.longest_keys = layout.sequences, layout.tokens, layout.longest_keys
        call.threads = torch.get_num_threads()
        if layout.tables is None:
            assert layout.bases is not None
            call.bases, call.tables = layout.bases.data_ptr(), None
        else:
            call.bases, call.tables = None, layout.tables.data_ptr()
            call.table_stride, call.block_size = layout.tables.stride(0), layout.block_size


def _rows(x: Tensor) -> Tensor:
    """x [T, H, D] with each head in one piece."""
    return x if x.stride(2) == 1 else x.contiguous()
