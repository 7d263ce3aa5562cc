"""What the machine has: devices by name, and the memory that is really free."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvbench
from kvbench.engine.environment import _container_bytes, available_bytes, find_device, versions
from kvbench.errors import KvbenchError


def test_the_cpu_is_found_and_described() -> None:
    device = find_device("cpu")
    assert device.kind == "cpu" and device.torch == torch.device("cpu")
    assert device.name and device.cores >= 1 and device.memory_bytes >= available_bytes(device.torch) > 0


@pytest.mark.parametrize("wanted", ["tpu", "cuda:x", "cpu:0", "", "CUDA"])
def test_an_unknown_device_is_refused(wanted: str) -> None:
    with pytest.raises(KvbenchError, match="unknown --device"):
        find_device(wanted)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(KvbenchError, match="sees no GPU"):
        find_device("cuda")


def test_a_container_leaves_what_is_not_used_or_only_cached(tmp_path: Path) -> None:
    assert _container_bytes(tmp_path) == sys.maxsize
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 400\n")
    assert _container_bytes(tmp_path) == sys.maxsize
    (tmp_path / "memory.max").write_text("1000\n")
    assert _container_bytes(tmp_path) == 1000 - 700 + 400


def test_versions_name_what_decides_a_measurement() -> None:
    found = versions()
    assert found["torch"] == torch.__version__.split("+")[0] or found["torch"] == torch.__version__
    assert found["python"] and found["kvbench"]


def test_uncommitted_changes_have_a_commit_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a run is not resumed with other code than it was begun with."""
    if shutil.which("git") is None:
        pytest.skip("no git")
    source = tmp_path / "kvbench" / "__init__.py"
    source.parent.mkdir()
    source.write_text("one")
    monkeypatch.setattr(kvbench, "__file__", str(source))
    assert versions()["commit"] is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    clean = versions()["commit"]
    assert clean is not None and "+" not in clean
    changed = []
    for text in ("two", "three"):
        source.write_text(text)
        changed.append(versions()["commit"])
    assert all(commit is not None and commit.startswith(f"{clean}+") for commit in changed)
    assert changed[0] != changed[1]
    (tmp_path / "notes").write_text("belongs to nobody")
    assert versions()["commit"] == changed[1]
