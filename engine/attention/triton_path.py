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
        self._begun: _Begun | None = None

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
        self._begin(layout)
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
        shape, arena = self._arena.shape, self._arena.k[0]
        tokens, heads, dim = q.shape
        assert q.dtype in DTYPES and k.dtype == v.dtype == q.dtype, "q, k and v of one 16 or 32-bit format"
        assert arena.dtype == q.dtype or self._bytes, f"keys and values are stored as {arena.dtype}"
        assert tokens == layout.tokens and k.shape == v.shape == (tokens, shape.kv_heads, shape.head_dim)
        assert dim == shape.head_dim and heads % shape.kv_heads == 0
        assert q.stride(2) == k.stride(2) == v.stride(2) == 1, "numbers of a head lie side by side"
        assert q.device == k.device == v.device == arena.device
        assert window is None or window >= 1
        assert softcap is None or softcap > 0
        assert sinks is None or sinks.shape == (heads,)

    def _begin(self, layout: Layout) -> _Begun:
        """What all layers of a step share, made and checked by the first of them."""
        if self._begun is None or self._begun.layout is not layout:
            device = self._arena.k[0].device
            assert all(one.device == device for one in (layout.starts, layout.ends, layout.writes))
            assert (layout.bases is None) != (layout.tables is None), "one address map"
            assert layout.tables is None or layout.tables.stride(1) == 1
            assert int(layout.keys.min()) >= 1 and int(layout.queries.min()) >= 1
            assert bool((layout.queries <= layout.keys).all())
            self._begun = _Begun(layout)
        return self._begun

    def _asked(self, layout: Layout, heads: int, itemsize: int, decode: bool = False, **weighing: bool) -> Asked:
        shape = self._arena.shape
        return Asked(
            heads=heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            itemsize=itemsize,
            decode=decode,
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
        """The sequences at the front that decode in one launch, whose tiles are small, and the others in another."""
        begun = self._begin(layout)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for decode, there in ((True, begun.decodes), (False, layout.sequences - begun.decodes)):
            if there:
                self._launch(begun, decode, layer, q, out, scale, window, softcap, sinks)
        return out

    def _launch(
        self,
        begun: _Begun,
        decode: bool,
        layer: int,
        q: Tensor,
        out: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> None:
        layout = begun.layout
        tokens, heads, dim = q.shape
        weighing = {"window": window is not None, "softcap": softcap is not None, "sinks": sinks is not None}
        asked = self._asked(layout, heads, q.dtype.itemsize, decode, **weighing)
        chosen = configuration(asked, self._target)
        tiles, places = (begun.decodes, layout.starts) if decode else begun.tiles(chosen.queries(asked.group))
        reach = layout.longest_keys if window is None else min(layout.longest_keys, window + layout.longest_queries)
        pieces = segments(tiles, asked.kv_heads, reach, chosen.tile_n, self._target.backend)
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
        if pieces > 1:  # the tokens of those that decode come first, one each
            first, count = (0, begun.decodes) if decode else (begun.decodes, tokens - begun.decodes)
            constants = reduce_constants(asked, pieces)
            kernels.reduce_kernel[(count, heads)](into, tops, sums, sinks, out, first, **constants)


class _Begun:
    """Of a layout: of how many sequences at the front one token is computed (`decodes`), and how the others are cut
    into tiles."""

    def __init__(self, layout: Layout) -> None:
        more = np.flatnonzero(layout.queries > 1)
        self.layout = layout
        self.decodes = int(more[0]) if len(more) else layout.sequences
        self._tiles: dict[int, Tensor] = {}

    def tiles(self, queries: int) -> tuple[int, Tensor]:
        """How many tiles of so many queries, and int32 [tiles, 2]: the sequence and the first query of each."""
        if queries not in self._tiles:
            rest = self.layout.queries[self.decodes :]
            counts = -(-rest // queries)
            sequence = np.arange(len(rest)).repeat(counts)
            first = (np.arange(len(sequence)) - (counts.cumsum() - counts)[sequence]) * queries
            table = torch.from_numpy(np.stack([sequence + self.decodes, first], axis=1).astype(np.int32))
            self._tiles[queries] = table.to(self.layout.starts.device)
        return len(self._tiles[queries]), self._tiles[queries]
