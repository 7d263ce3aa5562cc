"""A driver of NVIDIA cards that are not there, with the errors of the real one where a card does not tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30


class NVMLError(Exception):
    """As the library's own."""


@dataclass
class FakeCard:
    """None: it does not tell. `processes`: pid, name and bytes of each."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    memory: int | None = 80 * GIB
    free: int = 79 * GIB
    capability: tuple[int, int] | None = (9, 0)
    mig: bool | None = False
    processes: Sequence[tuple[int, str | None, int | None]] = ()
    energy_mj: int | None = None
    power_mw: int | None = None
    sm_mhz: int | None = None
    celsius: int | None = None
    reasons: int | None = None


def _told(value: Any) -> Any:
    if value is None:
        raise NVMLError("Not Supported")
    return value


class FakeNvml:
    """The part of `pynvml` that is asked here. `broken`: what its start raises."""

    NVMLError = NVMLError
    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0
    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(
        self, cards: list[FakeCard], *, version: str = "580.65.06", cuda: int = 13000, broken: str = ""
    ) -> None:
        self._cards, self._version, self._cuda, self._broken = cards, version, cuda, broken

    def nvmlInit(self) -> None:
        if self._broken:
            raise NVMLError(self._broken)

    def nvmlSystemGetDriverVersion(self) -> str:
        return self._version

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self._cuda

    def nvmlDeviceGetCount(self) -> int:
        return len(self._cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:
        return self._cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeCard:
        found: FakeCard = _told(next((card for card in self._cards if card.uuid == uuid), None))
        return found

    def nvmlDeviceGetName(self, card: FakeCard) -> str:
        return card.name

    def nvmlDeviceGetUUID(self, card: FakeCard) -> str:
        return card.uuid

    def nvmlDeviceGetMemoryInfo(self, card: FakeCard) -> Any:
        return SimpleNamespace(total=_told(card.memory), free=card.free)

    def nvmlDeviceGetCudaComputeCapability(self, card: FakeCard) -> Any:
        return _told(card.capability)

    def nvmlDeviceGetMigMode(self, card: FakeCard) -> list[int]:
        return [int(_told(card.mig))] * 2

    def nvmlDeviceGetComputeRunningProcesses(self, card: FakeCard) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, _, used in card.processes]

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        names = {one: name for card in self._cards for one, name, _ in card.processes}
        found: str = _told(names[pid])
        return found

    def nvmlDeviceGetTotalEnergyConsumption(self, card: FakeCard) -> Any:
        return _told(card.energy_mj)

    def nvmlDeviceGetPowerUsage(self, card: FakeCard) -> Any:
        return _told(card.power_mw)

    def nvmlDeviceGetClockInfo(self, card: FakeCard, kind: int) -> Any:
        assert kind == self.NVML_CLOCK_SM
        return _told(card.sm_mhz)

    def nvmlDeviceGetTemperature(self, card: FakeCard, kind: int) -> Any:
        assert kind == self.NVML_TEMPERATURE_GPU
        return _told(card.celsius)

    def nvmlDeviceGetCurrentClocksEventReasons(self, card: FakeCard) -> Any:
        return _told(card.reasons)
