"""Files that a kill at any moment leaves whole, the old content or the new, and a lock that lets one writer in.

What is written lies beside its place under a hidden name until it is complete and on disk.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvbench.errors import KvbenchError

LOCK = ".lock"
PATIENCE_S = 5.0
"""How long a lock is waited for whose holder has ended."""

_TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Whatever the file system refuses becomes a KvbenchError about `path`."""
    try:
        yield
    except OSError as error:
        raise KvbenchError(f"cannot write {path}: {error.strerror or error}; choose another --output") from error


def write_file(path: Path, text: str) -> None:
    """Put `text` in the place of the file, and on disk."""
    aside = path.with_name(f".{path.name}")
    with aside.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    flush_folder(path.parent)


def make_folder(path: Path) -> None:
    """Make the folder and those above it that are missing; their names are on disk when this returns."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        flush_folder(folder.parent)


def flush_folder(path: Path) -> None:
    """Put the names in a folder on disk: what was made, renamed or removed there."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def take_lock(folder: Path) -> int | None:
    """A handle that keeps every other writer out of the folder until it is closed, or None where another has one.

    The kernel closes it with the process, however that ends, so a killed writer blocks nobody, but for the moment in
    which a program that it was just starting (git, say) still has its files: that is waited for. On a file system that
    knows no locks there is always a handle, and no protection.
    """
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        until_s = time.monotonic() + PATIENCE_S
        while not _locked(handle):
            if not _holder_is_gone(folder) or time.monotonic() > until_s:
                os.close(handle)
                return None
            time.sleep(0.02)
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {platform.node()}".encode())
    except BaseException:
        os.close(handle)
        raise
    return handle


def _locked(handle: int) -> bool:
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        if error.errno not in _NO_LOCKS_HERE:
            raise
    return True


def _holder_is_gone(folder: Path) -> bool:
    """Whether the lock file names a process of this machine that has ended."""
    found = re.fullmatch(r"process (\d+) on (.*)", lock_holder(folder))
    if found is None or found[2] != platform.node():
        return False
    try:
        os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def lock_holder(folder: Path) -> str:
    """Who wrote last, in the words of the lock file."""
    with suppress(OSError):
        return (folder / LOCK).read_text(encoding="utf-8") or "another process"
    return "another process"
