"""Attention by the Triton kernels: on CUDA and ROCm cards, and for tests in Triton's interpreter."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kvbench.engine.arena import Arena
from kvbench.engine.attention import kernels
from kvbench.engine.attention.configuration import (
    Asked,
    Target,
    attention_constants,
    configuration,
    reduce_constants,
    segments,
    write_constants,
)
from kvbench.engine.attention.layout import Layout

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
BYTES = (torch.uint8, torch.float8_e4m3fn)


def target_of(device: torch.device) -> Target:
    """What kernels for this device are compiled for; of a CPU, where only the interpreter runs, any will do."""
    if device.type != "cuda":
        return Target("cuda", 80)
    if torch.version.hip is not None:
        return Target("hip", torch.cuda.get_device_properties(device).gcnArchName.split(":")[0])
    major, minor = torch.cuda.get_device_capability(device)
    return Target("cuda", 10 * major + minor)


class TritonPath:
    """A `layout.Path` over an arena. With 8-bit keys and values `k_scales` and `v_scales` [Hkv] (float32; None: 1) say
    what a head's stored numbers are multiplied with."""

    def __init__(
        self, arena: Arena, longest: int, *, k_scales: Tensor | None = None, v_scales: Tensor | None = None
    ) -> None:
        shape, device = arena.shape, arena.k[0].device
        self._arena = arena
        self._target = target_of(device)
        self._bytes = arena.k[0].dtype in BYTES
        one = torch.ones(shape.kv_heads, dtype=torch.float32, device=device)
        self._k_scales = one if k_scales is None else k_scales
        self._v_scales = one if v_scales is None else v_scales
        for scales in (self._k_scales, self._v_scales):
            assert scales.shape == (shape.kv_heads,) and scales.dtype == torch.float32 and scales.device == device
        self._nothing = torch.zeros(1, dtype=torch.float32, device=device)
        self._tiles: tuple[Layout, int, Tensor] | None = None

    @cached_property
    def _rows(self) -> tuple[list[Tensor], list[Tensor]]:
        """The arena, 8-bit floats as bytes."""
        k, v = self._arena.k, self._arena.v
        if not self._bytes:
            return list(k), list(v)
        return [one.view(torch.uint8) for one in k], [one.view(torch.uint8) for one in v]

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
        self._check(layout, q, k, v, window, softcap, sinks)
        self._write(layout, layer, k, v)
        return self._attend(layout, layer, q, scale, window, softcap, sinks)

    def _check(
        self,
        layout: Layout,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> None:
        """What the kernels take for granted."""
        shape, stored = self._arena.shape, self._arena.k[0].dtype
        tokens, heads, dim = q.shape
        assert q.dtype in DTYPES and k.dtype == v.dtype == q.dtype, (
            "queries, keys and values of one 16 or 32-bit format"
        )
        assert stored == q.dtype or self._bytes, f"keys and values are stored as {stored}"
        assert tokens == layout.tokens and k.shape == v.shape == (tokens, shape.kv_heads, shape.head_dim)
        assert dim == shape.head_dim and heads % shape.kv_heads == 0
        assert q.stride(2) == k.stride(2) == v.stride(2) == 1, "numbers of a head lie side by side"
        assert all(
            one.device == self._arena.k[0].device for one in (q, k, v, layout.starts, layout.ends, layout.writes)
        )
        assert (layout.bases is None) != (layout.tables is None), "one address map"
        assert layout.tables is None or layout.tables.stride(1) == 1
        assert int(layout.keys.min()) >= 1 and bool((layout.queries <= layout.keys).all())
        assert window is None or window >= 1
        assert softcap is None or softcap > 0
        assert sinks is None or sinks.shape == (heads,)

    def _asked(self, layout: Layout, heads: int, itemsize: int, **weighing: bool) -> Asked:
        shape = self._arena.shape
        return Asked(
            heads=heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            itemsize=itemsize,
            decode=layout.longest_queries == 1,
            paged=layout.tables is not None,
            block_size=layout.block_size,
            eight=self._bytes,
            **weighing,
        )

    def _write(self, layout: Layout, layer: int, k: Tensor, v: Tensor) -> None:
        rows_k, rows_v = self._rows
        asked = self._asked(layout, k.shape[1], k.dtype.itemsize)
        kernels.write_kernel[(layout.tokens, k.shape[1])](
            k,
            v,
            rows_k[layer],
            rows_v[layer],
            layout.writes,
            self._k_scales,
            self._v_scales,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            rows_k[layer].stride(0),
            **write_constants(asked),
        )

    def _attend(
        self,
        layout: Layout,
        layer: int,
        q: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        tokens, heads, dim = q.shape
        weighing = {"window": window is not None, "softcap": softcap is not None, "sinks": sinks is not None}
        asked = self._asked(layout, heads, q.dtype.itemsize, **weighing)
        chosen = configuration(asked, self._target)
        tiles, places = self._tiled(layout, chosen.queries(asked.group), asked.decode)
        reach = layout.longest_keys if window is None else min(layout.longest_keys, window + layout.longest_queries)
        pieces = segments(tiles, asked.kv_heads, reach, chosen.tile_n, self._target.backend)
        out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
        into, tops, sums = out, self._nothing, self._nothing
        if pieces > 1:
            into = torch.empty((tokens, heads, pieces, dim), dtype=torch.float32, device=q.device)
            tops, sums = torch.empty((2, tokens, heads, pieces), dtype=torch.float32, device=q.device)
        rows_k, rows_v = self._rows
        sinks = self._nothing if sinks is None else sinks
        kernels.attention_kernel[(tiles, asked.kv_heads, pieces)](
            q,
            rows_k[layer],
            rows_v[layer],
            into,
            tops,
            sums,
            layout.starts,
            layout.ends,
            places,
            layout.starts if layout.bases is None else layout.bases,
            layout.starts if layout.tables is None else layout.tables,
            sinks,
            self._k_scales,
            self._v_scales,
            0 if layout.tables is None else layout.tables.stride(0),
            q.stride(0),
            q.stride(1),
            rows_k[layer].stride(0),
            scale,
            0 if window is None else window,
            1.0 if softcap is None else softcap,
            **attention_constants(asked, self._target, pieces),
        )
        if pieces > 1:
            kernels.reduce_kernel[(tokens, heads)](into, tops, sums, sinks, out, **reduce_constants(asked, pieces))
        return out

    def _tiled(self, layout: Layout, queries: int, decode: bool) -> tuple[int, Tensor]:
        """How many tiles there are, and sequence and first query of each; all layers of a step share them."""
        if decode:
            return layout.sequences, layout.starts
        if self._tiles is None or self._tiles[0] is not layout or self._tiles[1] != queries:
            counts = -(-layout.queries // queries)
            sequence = np.arange(layout.sequences).repeat(counts)
            first = (np.arange(len(sequence)) - (counts.cumsum() - counts)[sequence]) * queries
            table = torch.from_numpy(np.stack([sequence, first], axis=1).astype(np.int32))
            self._tiles = (layout, queries, table.to(layout.starts.device))
        return len(self._tiles[2]), self._tiles[2]
