"""The ways to compute attention, and which of them a device gets. Chosen once, for both backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.errors import KvbenchError

if TYPE_CHECKING:
    import torch

    from kvbench.engine.attention.layout import PathMaker

AUTO = "auto"
PATHS = ("torch", "cpp", "triton", "varlen")
FASTEST = {"cpu": "cpp", "cuda": "triton"}
"""What each kind of device gets, where it can be had."""
RANGES_ONLY = frozenset({"varlen"})
"""Paths that need a sequence's rows side by side."""
WORDS = {
    "torch": "torch's own operations",
    "cpp": "a C++ kernel built for this CPU",
    "triton": "a Triton kernel built for this card",
    "varlen": "torch's kernel for sequences of different lengths",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """A path by name, how to make it over an arena, and `why` it is this one."""

    name: str
    make: PathMaker
    why: str


def choose(asked: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Choice:
    """The path asked for, or the fastest there is. KvbenchError where the one asked for cannot be had."""
    name = FASTEST.get(device.type, "torch") if asked == AUTO else asked
    found = make_path(name, device, dtype, head_dim)
    if not isinstance(found, str):
        return Choice(name, found, WORDS[name] if asked == AUTO else "asked for")
    if asked != AUTO:
        raise KvbenchError(f"--attention {asked} cannot be had: {found}; mend that or set --attention auto")
    torch_path = make_path("torch", device, dtype, head_dim)
    assert not isinstance(torch_path, str)
    return Choice("torch", torch_path, f"{WORDS[name]} cannot be had: {found}")


def make_path(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> PathMaker | str:
    """How to make a path over an arena on this device, or why it cannot be had. The first call may build it."""
    return _MAKERS[name](device, dtype, head_dim)


def _torch(device: torch.device, dtype: torch.dtype, head_dim: int) -> PathMaker | str:
    from kvbench.engine.attention.torch_path import TorchPath

    return TorchPath


def _cpp(device: torch.device, dtype: torch.dtype, head_dim: int) -> PathMaker | str:
    from kvbench.engine.attention.cpu_path import CppPath, why_not

    return why_not(device, dtype, head_dim) or CppPath


def _triton(device: torch.device, dtype: torch.dtype, head_dim: int) -> PathMaker | str:
    if device.type != "cuda":
        return f"Triton's kernels run on GPUs, not on {device.type}"
    try:
        from kvbench.engine.attention.triton_path import DTYPES, TritonPath
    except ImportError:
        return "triton is not installed"
    if dtype not in DTYPES:
        return f"it computes float16, bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    return TritonPath


def _varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> PathMaker | str:
    from kvbench.engine.attention.varlen_path import VarlenPath, why_not

    return why_not(device, dtype, head_dim) or VarlenPath


_MAKERS: dict[str, Callable[[torch.device, torch.dtype, int], PathMaker | str]] = {
    "torch": _torch,
    "cpp": _cpp,
    "triton": _triton,
    "varlen": _varlen,
}
