"""How a device fared while a cell ran on it: energy, power, clocks, heat, and whether it had to slow down.

A thread looks now and then and costs the run next to nothing. Where the device keeps a counter of its energy the
difference is exact, else its power is added up. What a device does not tell is None, never 0.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvbench.engine import nvml

if TYPE_CHECKING:
    import torch

PERIOD_S = 1.0
CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
"""The kernel's drivers of sensors in a CPU."""

_POWERCAP = Path("/sys/class/powercap")
_CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class Reading:
    """A device at one moment. `energy_j` counts from some beginning. `slowed` by what it is slower than it should be,
    `capped` by what it is as fast as it may be; None where it does not tell."""

    at_s: float
    energy_j: float | None = None
    power_w: float | None = None
    clock_hz: float | None = None
    temperature_c: float | None = None
    slowed: tuple[str, ...] | None = None
    capped: tuple[str, ...] = ()


Gauge = Callable[[], Reading]


class Telemetry:
    """A context in which a device is watched. After it `read` says how it fared."""

    def __init__(self, gauge: Gauge, period_s: float = PERIOD_S) -> None:
        self._gauge = gauge
        self._period_s = period_s
        self._readings: list[Reading] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="telemetry", daemon=True)

    def __enter__(self) -> Self:
        self._readings.append(self._gauge())
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._readings.append(self._gauge())

    def _watch(self) -> None:
        while not self._over.wait(self._period_s):
            self._readings.append(self._gauge())

    def read(self, output_tokens: object = None) -> dict[str, float | int | str | None]:
        """The columns of a cell that gave so many output tokens, each None where the device does not tell."""
        found = summed_up(self._readings)
        return found | {"joules_per_output_token": joules_per_output_token(found["energy_j"], output_tokens)}


def summed_up(readings: list[Reading]) -> dict[str, float | int | str | None]:
    """`energy_j` between the first and the last reading and what it is from (`counter` or `power`), the mean and the
    peak of power, the mean and the lowest clock, the highest temperature, `throttled` (1 or 0) where the device was
    slower than it should be at any moment, and why, with the share of the readings."""
    energy_j, source = _energy(readings)
    duration_s = readings[-1].at_s - readings[0].at_s
    powers = [one.power_w for one in readings if one.power_w is not None]
    clocks = [one.clock_hz for one in readings[1:-1] or readings if one.clock_hz is not None]  # at both ends it rests
    heat = [one.temperature_c for one in readings if one.temperature_c is not None]
    told = [one for one in readings if one.slowed is not None]
    why = Counter(word for one in told for word in (*(one.slowed or ()), *one.capped))
    return {
        "energy_j": energy_j,
        "energy_source": source,
        "power_mean_w": energy_j / duration_s if energy_j is not None and duration_s > 0 else None,
        "power_peak_w": max(powers, default=None),
        "clock_mean_hz": math.fsum(clocks) / len(clocks) if clocks else None,
        "clock_min_hz": min(clocks, default=None),
        "temperature_peak_c": max(heat, default=None),
        "throttled": int(any(one.slowed for one in told)) if told else None,
        "throttle_reasons": ", ".join(f"{word} {n / len(told):.0%}" for word, n in why.most_common()) if told else None,
    }


def _energy(readings: list[Reading]) -> tuple[float | None, str | None]:
    first, last = readings[0].energy_j, readings[-1].energy_j
    if first is not None and last is not None and last >= first:
        return last - first, "counter"
    if any(one.power_w is None for one in readings):
        return None, None
    pieces = [
        ((before.power_w or 0.0) + (after.power_w or 0.0)) / 2 * (after.at_s - before.at_s)
        for before, after in pairwise(readings)
    ]
    return math.fsum(pieces), "power"


def joules_per_output_token(energy_j: object, output_tokens: object) -> float | None:
    """Energy of the whole cell, idle moments and prompts included / its output tokens; None without either."""
    if not isinstance(energy_j, float) or not isinstance(output_tokens, int) or output_tokens < 1:
        return None
    return energy_j / output_tokens


def gauge_of(device: torch.device, uuid: str | None) -> Gauge | None:
    """What can be read of a device; None where nothing can."""
    if device.type == "cpu":
        return CpuGauge()
    handle = nvml.handle_of(uuid) if uuid else None
    return None if handle is None else partial(_of_card, handle)


def _of_card(handle: object) -> Reading:
    bits = nvml.clock_reasons(handle)
    return Reading(
        at_s=time.monotonic(),
        energy_j=nvml.energy_j(handle),
        power_w=nvml.power_w(handle),
        clock_hz=nvml.clock_hz(handle),
        temperature_c=nvml.temperature_c(handle),
        slowed=None if bits is None else _words(bits, nvml.THROTTLED),
        capped=() if bits is None else _words(bits, nvml.CAPPED),
    )


def _words(bits: int, meanings: Mapping[int, str]) -> tuple[str, ...]:
    return tuple(meaning for bit, meaning in meanings.items() if bits & bit)


class CpuGauge:
    """All packages of this machine's CPU: RAPL's energy counters, where they may be read (they count up to a limit and
    begin again), clock, temperature, and the kernel's count of how often a core was too hot."""

    def __init__(self, powercap: Path = _POWERCAP, cpus: Path = _CPUS) -> None:
        self._domains = rapl_domains(powercap)
        self._limits_uj = [_number(domain / "max_energy_range_uj") for domain in self._domains]
        self._last_uj: list[int | None] = [None] * len(self._domains)
        self._counted_j = 0.0
        self._hot = sorted(cpus.glob("cpu[0-9]*/thermal_throttle/core_throttle_count"))
        self._was_hot = sum(_number(path) or 0 for path in self._hot)

    def __call__(self) -> Reading:
        import psutil

        clock = psutil.cpu_freq()
        hot = sum(_number(path) or 0 for path in self._hot)
        slowed, self._was_hot = hot > self._was_hot, hot
        return Reading(
            at_s=time.monotonic(),
            energy_j=self._energy_j(),
            clock_hz=clock.current * 1e6 if clock else None,
            temperature_c=max(_temperatures_c(), default=None),
            slowed=(("heat",) if slowed else ()) if self._hot else None,
        )

    def _energy_j(self) -> float | None:
        if not self._domains:
            return None
        for place, (domain, limit) in enumerate(zip(self._domains, self._limits_uj, strict=True)):
            now = _number(domain / "energy_uj")
            if now is None:
                return None
            last, self._last_uj[place] = self._last_uj[place], now
            if last is not None:
                self._counted_j += (now - last if now >= last else now - last + (limit or 0)) / 1e6
        return self._counted_j


def rapl_domains(powercap: Path = _POWERCAP) -> list[Path]:
    """One folder a CPU package, of those that may be read; their parts would count twice."""
    return [path for path in packages(powercap) if _number(path / "energy_uj") is not None]


def packages(powercap: Path = _POWERCAP) -> list[Path]:
    """The CPU packages that RAPL knows, readable or not."""
    return [path for path in sorted(powercap.glob("intel-rapl:*")) if path.name.count(":") == 1]


def _temperatures_c() -> list[float]:
    """Of the CPU's own sensors."""
    import psutil

    read = getattr(psutil, "sensors_temperatures", None)  # not on every system
    found = read() if read else {}
    return [sensor.current for name in CPU_SENSORS for sensor in found.get(name, ())]


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
