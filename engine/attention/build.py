"""Builds the C++ kernels for this very CPU, once, and keeps what was built; who asks is told why where that fails."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import shutil
import subprocess
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp

SOURCES = (Path(__file__).parent / "cpu_kernel.cpp",)
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno")
COMPILERS = ("g++", "c++", "clang++")
PATIENCE_S = 120.0


class NoKernelsError(Exception):
    """Why there are none: one line."""


@cache
def kernels() -> ctypes.CDLL | str:
    """The library of kernels, or why there is none. The first call on a machine compiles for some seconds."""
    try:
        return ctypes.CDLL(str(_built()))
    except (NoKernelsError, OSError) as error:
        return " ".join(str(error).split())


def _built() -> Path:
    compiler = _compiler()
    command = [compiler, *FLAGS]
    folder = _folder()
    target = folder / f"kernels-{_key(command)}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # who comes second finds it built
        if not target.exists():
            _compile(command, target)
    return target


def _compiler() -> str:
    asked = os.environ.get("CXX")
    for name in (asked,) if asked else COMPILERS:
        if found := shutil.which(name):
            return found
    raise NoKernelsError(f"no C++ compiler: {asked or ', '.join(COMPILERS)} not found; install g++, or name one in CXX")


def _folder() -> Path:
    """Where what was built is kept: the user's own cache, or a folder of this process where there can be none."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(home) / "kvbench"
        folder.mkdir(parents=True, exist_ok=True)
        if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # no home is the latter
        pass
    return Path(mkdtemp(prefix="kvbench-"))


def _key(command: list[str]) -> str:
    """Changes with whatever changes the result: source, command, compiler, CPU."""
    version = subprocess.run([command[0], "--version"], capture_output=True, check=False).stdout
    parts = [*(source.read_bytes() for source in SOURCES), " ".join(command).encode(), version, _cpu().encode()]
    return sha256(b"\0".join(parts)).hexdigest()[:16]


def _cpu() -> str:
    """What the CPU can do, in the kernel's words."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    known = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(known)}))


def _compile(command: list[str], target: Path) -> None:
    unfinished = target.with_suffix(f".{os.getpid()}")
    whole = [*command, *map(str, SOURCES), "-o", str(unfinished)]
    try:
        done = subprocess.run(whole, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        if done.returncode != 0:
            said = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise NoKernelsError(f"{command[0]} failed: {said[0] if said else f'status {done.returncode}'}")
        unfinished.replace(target)
    except subprocess.TimeoutExpired as error:
        raise NoKernelsError(f"{command[0]} took more than {PATIENCE_S:.0f} s") from error
    finally:
        unfinished.unlink(missing_ok=True)
