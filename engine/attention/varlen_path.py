"""Attention by torch's own kernel for sequences of different lengths (FlashAttention's), over ranges of rows: a second
way for the contiguous backend on a GPU, so that nobody need take ours on trust."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.engine.arena import Arena
from kvbench.engine.attention.layout import Layout

DTYPES = (torch.float16, torch.bfloat16)


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why it cannot be used for such a model here; None where it can."""
    if device.type != "cuda":
        return f"torch's varlen attention runs on GPUs, not on {device.type}"
    if dtype not in DTYPES:
        return f"it computes float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if head_dim > 256:
        return f"it takes heads of at most 256, not {head_dim}"
    try:
        import torch.nn.attention.varlen
    except ImportError:
        return f"torch {torch.__version__} has no varlen attention"
    return None


class VarlenPath:
    """A `layout.Path` over ranges of rows. Soft caps and sinks are not among what torch's kernel knows."""

    def __init__(self, arena: Arena, longest: int) -> None:
        self._arena = arena

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
        from torch.nn.attention.varlen import varlen_attn

        assert layout.bases is not None, "it reads ranges of rows"
        assert softcap is None and sinks is None, "torch's varlen attention has no soft caps and no sinks"
        self._arena.write(layer, layout.writes, k, v)
        # where each sequence's keys begin, wherever that is; how many there are says `seqused_k`
        begins = torch.cat([layout.bases, layout.bases[-1:]]).int()
        found = varlen_attn(
            q.contiguous(),
            self._arena.k[layer],
            self._arena.v[layer],
            layout.starts,
            begins,
            layout.longest_queries,
            layout.longest_keys,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=q.shape[1] != k.shape[1],
            seqused_k=layout.ends,
        )
        assert isinstance(found, Tensor)
        return found
