"""Attention by its definition, in float64 and one token at a time. Shares no code with what it checks."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The last n tokens of one sequence, q [n, Hq, D], over all its keys and values k, v [L, Hkv, D]; float64 out."""
    n, heads, _ = q.shape
    length, kv_heads, dim = k.shape
    out = torch.zeros(n, heads, dim, dtype=torch.float64)
    for i in range(n):
        position = length - n + i
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(heads):
            key_head = head * kv_heads // heads
            scores = []
            for j in range(first, position + 1):
                score = float(torch.dot(q[i, head].double(), k[j, key_head].double())) * scale
                scores.append(score if softcap is None else softcap * math.tanh(score / softcap))
            extra = [] if sinks is None else [float(sinks[head])]
            top = max(scores + extra)
            weights = [math.exp(score - top) for score in scores]
            total = sum(weights) + sum(math.exp(score - top) for score in extra)
            for weight, j in zip(weights, range(first, position + 1), strict=True):
                out[i, head] += weight / total * v[j, key_head].double()
    return out
