"""What the NVIDIA driver says of its cards, whatever torch makes of them. Facts only; nothing is ever set.

Through the driver's own library by way of `nvidia-ml-py`. Whatever a card, a driver or a virtual machine does not tell
is None: a consumer card has no energy counter, WSL names no processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Answer = TypeVar("Answer")

THROTTLED = {0x08: "hardware slowdown", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}
"""Bits of NVML's clock event reasons in which a card is slower than it should be, and what they mean."""
CAPPED = {0x04: "power limit"}
"""The same, where it is as fast as its power limit allows: everyday life for a card at full work."""


@dataclass(frozen=True, slots=True)
class Process:
    """Somebody on a card. The driver may know neither the name (a container) nor the bytes (Windows)."""

    pid: int
    name: str | None
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class DriverCard:
    """One card. `capability` is its compute capability, `mig`: it is cut into instances."""

    index: int
    name: str
    uuid: str
    memory_bytes: int | None
    free_bytes: int | None
    capability: tuple[int, int] | None
    mig: bool
    processes: tuple[Process, ...]


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver's version, the newest CUDA it serves as (major, minor), and its cards."""

    version: str | None
    cuda: tuple[int, int] | None
    cards: tuple[DriverCard, ...]


def find_driver() -> Driver | str:
    """The driver and its cards, or why it cannot be asked."""
    library = _library()
    if isinstance(library, str):
        return library
    newest = _ask(library.nvmlSystemGetCudaDriverVersion)
    count = _ask(library.nvmlDeviceGetCount) or 0
    return Driver(
        version=_ask(library.nvmlSystemGetDriverVersion),
        cuda=None if newest is None else (newest // 1000, newest % 1000 // 10),
        cards=tuple(card for index in range(count) if (card := _card(library, index)) is not None),
    )


def driver_version() -> str | None:
    """The driver's version; None where it cannot be asked."""
    library = _library()
    return None if isinstance(library, str) else _ask(library.nvmlSystemGetDriverVersion)


def handle_of(uuid: str) -> Any | None:
    """NVML's handle of the card that torch knows by this UUID; None where the driver cannot be asked."""
    library = _library()
    if isinstance(library, str):
        return None
    return _ask(library.nvmlDeviceGetHandleByUUID, uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")


def others_on(uuid: str, own_pid: int) -> tuple[Process, ...]:
    """Who else uses the card."""
    handle, library = handle_of(uuid), _library()
    if handle is None or isinstance(library, str):
        return ()
    return tuple(one for one in _processes(library, handle) if one.pid != own_pid)


def energy_j(handle: Any) -> float | None:
    """Joules since the driver was loaded; from Volta on."""
    found = _ask(_nvml().nvmlDeviceGetTotalEnergyConsumption, handle)
    return None if found is None else found / 1e3


def power_w(handle: Any) -> float | None:
    """The board's draw."""
    found = _ask(_nvml().nvmlDeviceGetPowerUsage, handle)
    return None if found is None else found / 1e3


def clock_hz(handle: Any) -> float | None:
    """Of the multiprocessors, now."""
    library = _nvml()
    found = _ask(library.nvmlDeviceGetClockInfo, handle, library.NVML_CLOCK_SM)
    return None if found is None else found * 1e6


def temperature_c(handle: Any) -> float | None:
    """Of the chip."""
    library = _nvml()
    found = _ask(library.nvmlDeviceGetTemperature, handle, library.NVML_TEMPERATURE_GPU)
    return None if found is None else float(found)


def clock_reasons(handle: Any) -> int | None:
    """Why its clock is what it is: bits, of which those above are told apart here."""
    library = _nvml()
    ask = getattr(library, "nvmlDeviceGetCurrentClocksEventReasons", None)
    return _ask(ask or library.nvmlDeviceGetCurrentClocksThrottleReasons, handle)


def _library() -> Any | str:
    """The library, ready to be asked; or why it is not."""
    try:
        import pynvml
    except ImportError:
        return "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"the NVIDIA driver cannot be asked: {error}"
    return pynvml


def _nvml() -> Any:
    """The library, which has given a handle already."""
    import pynvml

    return pynvml


def _ask(question: Callable[..., Answer], *of: Any) -> Answer | None:
    """The driver's answer; None where it has none."""
    from pynvml import NVMLError

    try:
        return question(*of)
    except NVMLError:
        return None


def _card(library: Any, index: int) -> DriverCard | None:
    handle = _ask(library.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return None
    memory = _ask(library.nvmlDeviceGetMemoryInfo, handle)
    capability = _ask(library.nvmlDeviceGetCudaComputeCapability, handle)
    mig = _ask(library.nvmlDeviceGetMigMode, handle)
    return DriverCard(
        index=index,
        name=_ask(library.nvmlDeviceGetName, handle) or "a card without a name",
        uuid=_ask(library.nvmlDeviceGetUUID, handle) or "",
        memory_bytes=None if memory is None else int(memory.total),
        free_bytes=None if memory is None else int(memory.free),
        capability=None if capability is None else (int(capability[0]), int(capability[1])),
        mig=mig is not None and mig[0] == library.NVML_DEVICE_MIG_ENABLE,
        processes=_processes(library, handle),
    )


def _processes(library: Any, handle: Any) -> tuple[Process, ...]:
    return tuple(
        Process(one.pid, _ask(library.nvmlSystemGetProcessName, one.pid), one.usedGpuMemory)
        for one in _ask(library.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    )
