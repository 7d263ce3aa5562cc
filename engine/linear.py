"""Matrix products with weights in the layout that the device's matrix library likes best, made once at load.

On a CPU oneDNN reads weights that it has packed itself several times as fast as plain ones; elsewhere, and for number
formats it does not pack, the weights stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

PACKED_DTYPES = (torch.float32, torch.bfloat16)


def packable(weight: Tensor) -> bool:
    """Whether this device's matrix library packs weights of this kind."""
    return weight.device.type == "cpu" and weight.dtype in PACKED_DTYPES and _packs(weight.dtype)


@cache
def _packs(dtype: torch.dtype) -> bool:
    """Whether this build of torch packs, tried on a small product: the operations are its own, not part of its API."""
    if not torch.backends.mkldnn.is_available():
        return False
    x, weight = torch.ones(2, 16, dtype=dtype), torch.eye(16, dtype=dtype)
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        return bool((_product(x, _pack(weight), None) == 1).all() and (_sum(x, x, _pack(weight), None) == 2).all())
    except (AttributeError, RuntimeError, TypeError):
        return False


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 32)  # whatever the number of rows will be
    return packed


def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y


def _sum(x: Tensor, to: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, to, packed, bias, "add")
    return y


class Linear(nn.Module):
    """y = x Wᵀ + b for x [..., in], as of several linear layers that read the same x: their outputs side by side.

    What it is made from gives up its weights, so that none is there twice; but a weight that somebody else reads too
    (a head tied to the embedding) stays, and the packed one is a copy.
    """

    def __init__(self, parts: Sequence[nn.Linear], *, shared: bool = False) -> None:
        super().__init__()
        first = parts[0].weight
        self.in_features = first.shape[1]
        self.out_features = sum(part.out_features for part in parts)
        self._packed = packable(first)
        self.bias = _joined([part.bias for part in parts], self.out_features)
        whole = first.detach() if len(parts) == 1 else torch.cat([part.weight.detach() for part in parts])
        self._copied = whole.nbytes if shared and self._packed else 0
        if not shared:
            for part in parts:
                part.weight = nn.Parameter(first.new_empty(0, self.in_features), requires_grad=False)
        self._weight = _pack(whole) if self._packed else whole

    @property
    def copied_bytes(self) -> int:
        """What the weights take beside those they were made from."""
        return self._copied

    def forward(self, x: Tensor) -> Tensor:
        """[..., out]."""
        if not self._packed:
            return nn.functional.linear(x, self._weight, self.bias)
        return _product(x, self._weight, self.bias)

    def added(self, x: Tensor, to: Tensor) -> Tensor:
        """The product, added to `to` of its shape."""
        if not self._packed:
            return to + nn.functional.linear(x, self._weight, self.bias)
        return _sum(x, to, self._weight, self.bias)


def _joined(biases: Sequence[Tensor | None], out_features: int) -> Tensor | None:
    """The biases side by side: all of them or none."""
    there = [bias.detach() for bias in biases if bias is not None]
    assert len(there) in (0, len(biases)), "some of the layers that are joined have a bias and some have none"
    return torch.cat(there) if there else None


def pack(module: nn.Module, keep: Tensor | None) -> int:
    """Put a packed layer into the place of each linear one, where that is faster; returns the bytes that this adds. The
    weight `keep` is read by others too."""
    added = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and packable(child.weight):
                packed = Linear([child], shared=child.weight is keep)
                added += packed.copied_bytes
                setattr(parent, name, packed)
    return added
