"""Where a run ran: devices, versions, commit. Facts only, for `run.json` and for the choice of defaults."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import kvbench
from kvbench.engine.nvml import driver_version
from kvbench.errors import KvbenchError

if TYPE_CHECKING:
    import torch

LIBRARIES = ("torch", "transformers", "numpy", "triton")


@dataclass(frozen=True, slots=True)
class Device:
    """What a run is measured on. `bf16` and `fp16`: whether it multiplies these natively.
    `threads` is how many of a CPU's cores torch uses."""

    kind: str
    torch_name: str
    name: str
    cores: int
    memory_bytes: int
    bf16: bool
    fp16: bool
    threads: int | None = None
    driver: str | None = None
    uuid: str | None = None

    def facts(self) -> dict[str, object]:
        return asdict(self)

    @property
    def torch(self) -> torch.device:
        import torch

        return torch.device(self.torch_name)


def find_device(wanted: str | None) -> Device:
    """`cpu`, `cuda` or `cuda:N`; None takes the first GPU that torch can use, else the CPU."""
    import torch

    if wanted is None:
        wanted = "cuda:0" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return _cpu()
    name, _, index = wanted.partition(":")
    if name != "cuda" or (index and not index.isdigit()):
        raise KvbenchError(f"unknown --device {wanted!r}; use cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        from kvbench.engine.diagnosis import unusable_gpu

        raise KvbenchError(f"--device {wanted}: torch {torch.__version__} sees no GPU; {unusable_gpu() or 'use cpu'}")
    number = int(index or 0)
    if number >= torch.cuda.device_count():
        raise KvbenchError(f"--device {wanted}: there are {torch.cuda.device_count()} GPUs, counted from cuda:0")
    found = torch.cuda.get_device_properties(number)
    major = found.major
    return Device(
        kind="cuda",
        torch_name=f"cuda:{number}",
        name=found.name,
        cores=found.multi_processor_count,
        memory_bytes=found.total_memory,
        bf16=major >= 8,
        fp16=True,
        driver=driver_version(),
        uuid=str(getattr(found, "uuid", "")) or None,
    )


def _cpu() -> Device:
    import psutil
    import torch

    flags = _cpu_info("flags") or _cpu_info("Features") or ""
    words = set(flags.split())
    return Device(
        kind="cpu",
        torch_name="cpu",
        name=_cpu_info("model name") or platform.processor() or platform.machine(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=int(psutil.virtual_memory().total),
        bf16=bool(words & {"avx512_bf16", "amx_bf16", "bf16"}),
        fp16=bool(words & {"avx512_fp16", "amx_fp16", "asimdhp"}),
        threads=torch.get_num_threads(),
    )


def _cpu_info(key: str) -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), None)


def versions() -> dict[str, str | None]:
    """Python, our commit and the libraries that decide what is measured."""
    found: dict[str, str | None] = {
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "kvbench": kvbench.__version__,
        "commit": _commit(),
    }
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _commit() -> str | None:
    """The commit of the checkout we run from, where files differ from it with `+` and a digest of the difference; None
    when installed."""
    root = Path(kvbench.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    commit = _first_line("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    changes = _output("git", "-C", str(root), "diff", "HEAD")
    return f"{commit}+{sha256(changes).hexdigest()[:8]}" if commit and changes else commit


def _first_line(*command: str) -> str | None:
    return next(iter((_output(*command) or b"").decode(errors="replace").splitlines()), None)


def _output(*command: str) -> bytes | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        return subprocess.run(command, capture_output=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def available_bytes(device: torch.device) -> int:
    """Memory of the device that nobody uses now; on a CPU also within the limit of a container."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    return min(int(psutil.virtual_memory().available), _container_bytes(Path("/sys/fs/cgroup")))


def _container_bytes(group: Path) -> int:
    """What a control group (version 2) leaves: its limit less what is used and not merely a file's cached pages."""
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(stat["inactive_file"]))
    except (OSError, ValueError, KeyError):  # no such group, or "max": no limit
        return sys.maxsize


def cpu_in_use(seconds: float = 0.4) -> float:
    """The share of all cores that is busy while this process waits so long."""
    import psutil

    return float(psutil.cpu_percent(seconds)) / 100
