"""The ways to compute attention, and which of them a device gets. Chosen once, for both backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.errors import KvbenchError

if TYPE_CHECKING:
    import torch

    from kvbench.engine.attention.layout import PathMaker

AUTO = "auto"
PATHS = ("torch", "cpp")


@dataclass(frozen=True, slots=True)
class Choice:
    """A path by name, how to make it over an arena, and `why` it is this one."""

    name: str
    make: PathMaker
    why: str


def choose(asked: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Choice:
    """The path asked for, or the fastest there is. KvbenchError where the one asked for cannot be had."""
    from kvbench.engine.attention import cpu_path
    from kvbench.engine.attention.torch_path import TorchPath

    if asked == "torch":
        return Choice("torch", TorchPath, "asked for")
    obstacle = cpu_path.why_not(device, dtype, head_dim)
    if obstacle is None:
        why = "a C++ kernel built for this CPU" if asked == AUTO else "asked for"
        return Choice("cpp", cpu_path.CppPath, why)
    if asked != AUTO:
        raise KvbenchError(f"--attention {asked} cannot be had: {obstacle}; mend that or set --attention auto")
    return Choice("torch", TorchPath, f"the C++ kernel cannot be had: {obstacle}")
