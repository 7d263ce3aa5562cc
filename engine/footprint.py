"""What one cell took of the machine's memory, seen from outside its pool: torch's own books of a GPU, and the most that
the process had resident. torch keeps no books of a CPU's memory, so there the process's figure stands alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FIGURES = ("requested", "allocated", "active", "reserved", "inactive_split")
"""torch's figures, each in bytes: asked for by code; the same in whole blocks; allocated, or freed but still awaited by
a stream; taken from the device; free parts of split blocks, which cannot be given back to it."""

NATIVE = "native"

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc_pid_clear_refs(5): VmHWM becomes what is resident now

_earlier_peak_bytes = 0  # of this process, before the kernel's mark was last reset


class Footprint:
    """Begins with its making, which starts all peaks anew; on a CPU it touches nothing of CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(device)
        self._peak_is_own = _restart_peak()

    def read(self) -> dict[str, int | None]:
        """`device_<figure>_bytes_peak` since the beginning and `device_<figure>_bytes` now, None on a CPU, and
        `host_rss_bytes_peak`, None where the system cannot start a process's peak anew."""
        figures = _unknown() if self._device.type != "cuda" else _torch_figures(self._device)
        return figures | {"host_rss_bytes_peak": _peak_bytes() if self._peak_is_own else None}


def _torch_figures(device: torch.device) -> dict[str, int | None]:
    import torch

    return device_figures(torch.cuda.memory_stats(device), torch.cuda.get_allocator_backend())


def device_figures(stats: Mapping[str, int], allocator: str = NATIVE) -> dict[str, int | None]:
    """Ours of torch's `memory_stats`. Other allocators than its native one count only some, and say 0 for the rest:
    None here."""
    found = _unknown()
    for name in FIGURES:
        for column, kind in ((f"device_{name}_bytes_peak", "peak"), (f"device_{name}_bytes", "current")):
            value = stats.get(f"{name}_bytes.all.{kind}")
            found[column] = value if allocator == NATIVE else value or None
    return found


def _unknown() -> dict[str, int | None]:
    return {f"device_{name}_bytes{kind}": None for kind in ("_peak", "") for name in FIGURES}


def peak_memory_bytes() -> int:
    """The most memory this process had resident so far, whatever a Footprint started anew meanwhile."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(_earlier_peak_bytes, peak if sys.platform == "darwin" else peak * 1024)


def _restart_peak() -> bool:
    """Let the process's peak begin at what is resident now; whether the system can. getrusage's peak follows it."""
    global _earlier_peak_bytes  # noqa: PLW0603
    so_far = peak_memory_bytes()
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return False
    _earlier_peak_bytes = so_far
    return _peak_bytes() is not None


def _peak_bytes() -> int | None:
    """Since the last restart; not getrusage's, which also remembers the program that started this one."""
    try:
        lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
        return int(lines["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
