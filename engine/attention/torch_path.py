"""Attention over an arena through torch alone: runs anywhere torch does.

One call a sequence. The query heads of a group are packed into the query length, so each key and value is read once
for its whole group. Both backends copy a sequence's keys and values into one small buffer first and attend to that:
torch reads heads that lie side by side in a cache much faster than strided ones in a large arena, so this is the
fastest way for the contiguous backend too, and only the copy differs between the two.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvbench.engine.arena import Arena
from kvbench.engine.attention.layout import Layout


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence of a batch: its `queries` tokens start at `first` in the flat batch and see `keys` tokens, the last
    of which is the last query's own. `masks` keeps the masks built for it, by window: layers share them."""

    number: int
    first: int
    queries: int
    keys: int
    masks: dict[int | None, Tensor] = field(default_factory=dict)


class TorchPath:
    """A `layout.Path` for any device."""

    def __init__(self, arena: Arena, longest: int) -> None:
        self._arena = arena
        self._staging = Staging(arena, longest)
        self._layout: Layout | None = None
        self._spans: list[Span] = []
        self._bases: list[int] = []

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
        self._arena.write(layer, layout.writes, k, v)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for span in self._spans:
            skip = 0 if window is None else max(0, span.keys - span.queries + 1 - window)
            k, v = self._rows(layout, layer, span, skip)
            mine = slice(span.first, span.first + span.queries)
            if softcap is None and sinks is None:
                out[mine] = _fused(q[mine], k, v, span, skip, scale, window)
            else:
                out[mine] = _explicit(q[mine], k, v, span, skip, scale, window, softcap, sinks)
        return out

    def _begin(self, layout: Layout) -> None:
        queries, keys = layout.queries.tolist(), layout.keys.tolist()
        firsts = (layout.queries.cumsum() - layout.queries).tolist()
        self._layout = layout
        self._spans = [Span(number, *span) for number, span in enumerate(zip(firsts, queries, keys, strict=True))]
        self._bases = [] if layout.bases is None else layout.bases.tolist()

    def _rows(self, layout: Layout, layer: int, span: Span, skip: int) -> tuple[Tensor, Tensor]:
        """Keys and values [keys - skip, Hkv, D] of a span without its first `skip` positions."""
        if layout.tables is None:
            base = self._bases[span.number]
            return self._staging.copy_rows(layer, base + skip, base + span.keys)
        size = layout.block_size
        first = skip // size
        blocks = layout.tables[span.number, first : -(-span.keys // size)]
        keys, values = self._staging.copy_blocks(layer, blocks, size)
        mine = slice(skip - first * size, span.keys - first * size)
        return keys[mine], values[mine]


class Staging:
    """One buffer for keys and one for values, [tokens, Hkv, D], that all sequences and layers of an arena reuse."""

    def __init__(self, arena: Arena, tokens: int) -> None:
        self._arena = arena
        size = (tokens, arena.shape.kv_heads, arena.shape.head_dim)
        self._k = torch.zeros(size, dtype=arena.k[0].dtype, device=arena.k[0].device)
        self._v = torch.zeros_like(self._k)

    def copy_rows(self, layer: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Rows `first` to `end - 1` of the arena."""
        k, v = self._k[: end - first], self._v[: end - first]
        k.copy_(self._arena.k[layer][first:end])
        v.copy_(self._arena.v[layer][first:end])
        return k, v

    def copy_blocks(self, layer: int, blocks: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """The rows of `blocks`, each of `size` rows, in the order given."""
        whole = self._arena.rows // size * size
        found = []
        for arena, buffer in ((self._arena.k[layer], self._k), (self._arena.v[layer], self._v)):
            staged = buffer[: len(blocks) * size]
            torch.index_select(arena[:whole].view(whole // size, -1), 0, blocks, out=staged.view(len(blocks), -1))
            found.append(staged)
        return found[0], found[1]


def _grouped(q: Tensor, kv_heads: int) -> Tensor:
    """q [n, Hq, D] as [Hkv, G, n, D]: head h belongs to key head h // G."""
    n, heads, dim = q.shape
    return q.view(n, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)


def _ungrouped(out: Tensor, n: int) -> Tensor:
    """[Hkv, G, n, D] back to [n, Hq, D]."""
    return out.permute(2, 0, 1, 3).reshape(n, -1, out.shape[-1])


def _fused(q: Tensor, k: Tensor, v: Tensor, span: Span, skip: int, scale: float, window: int | None) -> Tensor:
    n, kv_heads = q.shape[0], k.shape[1]
    grouped = _grouped(q, kv_heads)
    groups = grouped.shape[1]
    k, v = k.transpose(0, 1).unsqueeze(1), v.transpose(0, 1).unsqueeze(1)  # [Hkv, 1, L, D]
    if n == 1:
        out = scaled_dot_product_attention(grouped.transpose(1, 2), k, v, scale=scale)
        return out.reshape(1, -1, out.shape[-1])
    if n == span.keys and (window is None or window >= n):  # a fresh prompt: torch's own causal path skips half
        out = scaled_dot_product_attention(
            grouped, k.expand(-1, groups, -1, -1), v.expand(-1, groups, -1, -1), is_causal=True, scale=scale
        )
        return _ungrouped(out, n)
    mask = _mask(span, skip, window, q.device).repeat(groups, 1)
    packed = grouped.reshape(kv_heads, 1, groups * n, -1)
    out = scaled_dot_product_attention(packed, k, v, attn_mask=mask, scale=scale)
    return _ungrouped(out.view(kv_heads, groups, n, -1), n)


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Span,
    skip: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Soft caps and sinks, which torch's fused attention does not know, in float32."""
    n, kv_heads = q.shape[0], k.shape[1]
    grouped = _grouped(q, kv_heads).float()
    scores = grouped @ k.permute(1, 2, 0).unsqueeze(1).float() * scale  # [Hkv, G, n, L]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~_mask(span, skip, window, q.device), float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(kv_heads, -1, 1, 1).expand(-1, -1, n, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return _ungrouped(weights @ v.transpose(0, 1).unsqueeze(1).float(), n).to(q.dtype)


def _mask(span: Span, skip: int, window: int | None, device: torch.device) -> Tensor:
    """[n, keys - skip] of bool: which keys each query sees."""
    if window not in span.masks:
        query = torch.arange(span.keys - span.queries, span.keys, device=device).unsqueeze(1)
        key = torch.arange(skip, span.keys, device=device)
        seen = key <= query
        if window is not None:
            seen &= key > query - window
        span.masks[window] = seen
    return span.masks[window]
