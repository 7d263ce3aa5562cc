"""How fast attention is on a device: both address maps beside torch's own ways, against what the device can do at best.

Decode reads every key and value once, so it is held against the measured read bandwidth; a prompt multiplies, so it is
held against the measured multiplications. The device's caches are emptied before each repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.engine.ceilings import Ceilings, Timing, cache_flush, timed

if TYPE_CHECKING:
    import torch

    from kvbench.engine.attention.layout import PathMaker

DECODE, PREFILL = "decode", "prefill"
MEMORY_SHARE = 0.3
"""Of the free memory a problem takes at most this share."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, key heads, and their size."""

    heads: int
    kv_heads: int
    dim: int


@dataclass(frozen=True, slots=True)
class Problem:
    """`batch` sequences with `context` keys each: one new token of each (decode), or all of them new (prefill)."""

    kind: str
    batch: int
    context: int

    @property
    def queries(self) -> int:
        return 1 if self.kind == DECODE else self.context

    def kv_bytes(self, heads: Heads, itemsize: int) -> int:
        """Keys and values of one layer."""
        return 2 * self.batch * self.context * heads.kv_heads * heads.dim * itemsize

    def flops(self, heads: Heads) -> int:
        """Of the two products over the (query, key) pairs that a causal mask leaves."""
        pairs = self.context if self.kind == DECODE else self.context * (self.context + 1) // 2
        return 4 * self.batch * pairs * heads.heads * heads.dim


@dataclass(frozen=True, slots=True)
class Measured:
    """A way (`contiguous`, `paged`, `torch sdpa` …) on a problem. Without a timing `reason` says why."""

    problem: Problem
    way: str
    block_size: int | None
    timing: Timing | None
    reason: str = ""

    def share(self, heads: Heads, itemsize: int, ceilings: Ceilings) -> float | None:
        """Of the device's ceiling: bytes read a second (decode) or multiplications a second (prefill)."""
        if self.timing is None:
            return None
        if self.problem.kind == DECODE:
            return self.problem.kv_bytes(heads, itemsize) / self.timing.median_s / ceilings.read_bytes_per_s
        return self.problem.flops(heads) / self.timing.median_s / ceilings.flops_per_s


def measure(
    problem: Problem,
    heads: Heads,
    dtype: torch.dtype,
    device: torch.device,
    path: PathMaker,
    block_sizes: list[int],
    repeats: int,
) -> Iterator[Measured]:
    """Every way on a problem, one after the other."""
    from kvbench.engine.environment import available_bytes

    room = available_bytes(device) * MEMORY_SHARE
    flush = cache_flush(device)
    ways: list[tuple[str, int | None, Callable[[], Callable[[], object]]]] = [
        ("contiguous", None, lambda: _ours(problem, heads, dtype, device, path, None)),
        *(("paged", size, lambda size=size: _ours(problem, heads, dtype, device, path, size)) for size in block_sizes),
        ("torch sdpa", None, lambda: _sdpa(problem, heads, dtype, device)),
    ]
    if device.type == "cuda":
        ways.append(("torch flex", None, lambda: _flex(problem, heads, dtype, device)))
        ways.append(("torch varlen", None, lambda: _varlen(problem, heads, dtype, device)))
    for way, size, ready in ways:
        needed = 2 * problem.kv_bytes(heads, dtype.itemsize)
        if needed > room:
            reason = f"{needed:,} bytes, and {room:,.0f} of memory may be used"
            yield Measured(problem, way, size, None, reason)
            continue
        try:
            yield Measured(problem, way, size, timed(ready(), device, repeats=repeats, before=flush))
        except Exception as error:
            yield Measured(problem, way, size, None, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


def _ours(
    problem: Problem, heads: Heads, dtype: torch.dtype, device: torch.device, make: PathMaker, block_size: int | None
) -> Callable[[], object]:
    """One layer's attention through a path, its keys and values written too."""
    import torch

    from kvbench.engine.arena import Arena, KVShape
    from kvbench.engine.attention.drawn import draw_layout

    count = problem.batch
    drawn = draw_layout(device, [problem.context] * count, [problem.queries] * count, block_size)
    arena = Arena(KVShape(1, heads.kv_heads, heads.dim), drawn.rows, dtype, device, fill=0.01)
    path = make(arena, problem.context + (block_size or 0))
    q = torch.randn(count * problem.queries, heads.heads, heads.dim, dtype=dtype, device=device)
    k, v = (torch.randn(len(q), heads.kv_heads, heads.dim, dtype=dtype, device=device) for _ in range(2))
    how = {"scale": heads.dim**-0.5, "window": None, "softcap": None, "sinks": None}
    return lambda: path.attend(drawn.layout, 0, q, k, v, **how)


def _batch(
    problem: Problem, heads: Heads, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [B, Hq, n, D], k and v [B, Hkv, L, D], as torch likes them best: nothing is looked up."""
    import torch

    q = torch.randn(problem.batch, heads.heads, problem.queries, heads.dim, dtype=dtype, device=device)
    size = (problem.batch, heads.kv_heads, problem.context, heads.dim)
    k, v = (torch.randn(size, dtype=dtype, device=device) for _ in range(2))
    return q, k, v


def _sdpa(problem: Problem, heads: Heads, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = _batch(problem, heads, dtype, device)
    if problem.kind == DECODE:  # a group's queries side by side: each key is read once
        q = q.reshape(problem.batch, heads.kv_heads, -1, heads.dim)
        return lambda: scaled_dot_product_attention(q, k, v)
    return lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads.heads != heads.kv_heads)


def _flex(problem: Problem, heads: Heads, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = _batch(problem, heads, dtype, device)
    compiled = torch.compile(flex_attention)
    mask = None
    if problem.kind == PREFILL:
        sizes = (problem.context, problem.context)
        mask = create_block_mask(lambda b, h, query, key: query >= key, None, None, *sizes, device=str(device))
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=heads.heads != heads.kv_heads)


def _varlen(problem: Problem, heads: Heads, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    from kvbench.engine.attention.varlen_path import VarlenPath, why_not

    if obstacle := why_not(device, dtype, heads.dim):
        raise RuntimeError(obstacle)
    return _ours(problem, heads, dtype, device, VarlenPath, None)
