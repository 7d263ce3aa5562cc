"""A cell's memory seen from outside: its own peaks, never an earlier cell's, and nothing of CUDA on a CPU."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import kvbench.cli.stack as stack
from kvbench.cli.app import main
from kvbench.engine import footprint
from kvbench.engine.arena import Arena
from kvbench.engine.footprint import FIGURES, Footprint, device_figures, peak_memory_bytes
from kvbench.errors import CellOutOfMemory
from kvbench.metrics.store import RunFolder

CPU = torch.device("cpu")
BIG, SMALL = 256 << 20, 64 << 20
SLACK = 24 << 20  # what the interpreter itself may take or give back meanwhile


def touch(size: int) -> None:
    """Have so many bytes resident for a moment; the system takes them back at once."""
    with mmap.mmap(-1, size) as pages:
        for at in range(0, size, mmap.PAGESIZE):
            pages[at] = 1


class FakeCuda:
    """The four functions of `torch.cuda` that the footprint may use, over one number for each figure."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allocator: str = "native") -> None:
        self.now = dict.fromkeys(FIGURES, 0)
        self.peak = dict(self.now)
        self.devices: list[object] = []
        for name in ("memory_stats", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: allocator)

    def set(self, **now: int) -> None:
        self.now |= now
        self.peak = {name: max(self.peak[name], self.now[name]) for name in FIGURES}

    def reset_peak_memory_stats(self, device: object) -> None:
        self.devices.append(device)
        self.peak = dict(self.now)

    def memory_stats(self, device: object) -> dict[str, int]:
        self.devices.append(device)
        kinds = {"current": self.now, "peak": self.peak}
        whole = {f"{name}_bytes.all.{kind}": found[name] for kind, found in kinds.items() for name in FIGURES}
        return whole | {f"{name}_bytes.small_pool.peak": 5 for name in FIGURES} | {"num_ooms": 0}


def test_torchs_figures_are_the_cells_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, device = FakeCuda(monkeypatch), torch.device("cuda", 1)
    cuda.set(requested=900, allocated=1024, active=1024, reserved=2048, inactive_split=512)  # an earlier, larger cell
    cuda.set(requested=100, allocated=128, active=128, reserved=2048, inactive_split=0)
    seen = Footprint(device)
    cuda.set(requested=300, allocated=384, active=400, reserved=2048, inactive_split=64)
    cuda.set(requested=100, allocated=128, active=128, reserved=256, inactive_split=0)
    found = seen.read()
    assert {name: value for name, value in found.items() if name.startswith("device_")} == {
        "device_requested_bytes_peak": 300,
        "device_allocated_bytes_peak": 384,
        "device_active_bytes_peak": 400,
        "device_reserved_bytes_peak": 2048,
        "device_inactive_split_bytes_peak": 64,
        "device_requested_bytes": 100,
        "device_allocated_bytes": 128,
        "device_active_bytes": 128,
        "device_reserved_bytes": 256,
        "device_inactive_split_bytes": 0,
    }
    assert cuda.devices == [device, device]


def test_what_another_allocator_does_not_count_is_unknown_and_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch, "cudaMallocAsync")
    seen = Footprint(torch.device("cuda", 0))
    cuda.set(allocated=128, reserved=256)
    found = seen.read()
    assert (found["device_allocated_bytes_peak"], found["device_reserved_bytes_peak"]) == (128, 256)
    assert found["device_inactive_split_bytes_peak"] is found["device_requested_bytes"] is None


def test_figures_that_torch_lacks_are_unknown() -> None:
    assert set(device_figures({}).values()) == {None}
    assert device_figures({"active_bytes.all.peak": 7})["device_active_bytes_peak"] == 7


def test_a_process_peak_is_that_of_its_own_cell() -> None:
    if Footprint(CPU).read()["host_rss_bytes_peak"] is None:
        pytest.skip("this system cannot start a process's peak anew")
    touch(BIG)
    seen = Footprint(CPU)
    touch(SMALL)
    mine = seen.read()["host_rss_bytes_peak"]
    idle = Footprint(CPU).read()["host_rss_bytes_peak"]
    assert mine is not None and idle is not None
    assert SMALL - SLACK < mine - idle < SMALL + SLACK


def test_the_runs_peak_outlives_that_of_its_cells() -> None:
    touch(BIG)
    whole = peak_memory_bytes()
    Footprint(CPU)
    assert peak_memory_bytes() >= whole


@pytest.mark.parametrize("missing", ["_CLEAR", "_STATUS"])
def test_where_a_peak_cannot_be_told_there_is_none(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(footprint, missing, tmp_path / "no" / "such")
    assert Footprint(CPU).read()["host_rss_bytes_peak"] is None
    assert peak_memory_bytes() > 0


def test_a_status_without_a_peak_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, clear = tmp_path / "status", tmp_path / "clear"
    monkeypatch.setattr(footprint, "_STATUS", status)
    monkeypatch.setattr(footprint, "_CLEAR", clear)
    status.write_text("Name:\tpython: 3\nVmHWM:\t   12 kB\n")
    seen = Footprint(CPU)
    assert clear.read_text() == "5"
    assert seen.read()["host_rss_bytes_peak"] == 12 * 1024
    status.write_text("Name:\tpython\n")
    assert seen.read()["host_rss_bytes_peak"] is None


def sweep(path: Path, *args: str) -> list[dict[str, Any]]:
    quick = ("--model", "tiny", "--dtype", "float32", "--input-len", "12", "--output-len", "8", "--repeats", "1")
    with pytest.raises(SystemExit):
        main(["sweep", "--output", str(path), *quick, "--device", "cpu", "--concurrency", "3", *args])
    return RunFolder.open(path).rows()


def test_a_sweep_on_a_cpu_notes_its_memory_and_calls_nothing_of_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("CUDA was called on a CPU")

    for name in ("memory_stats", "reset_peak_memory_stats", "get_allocator_backend", "empty_cache", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    made: list[int] = []

    class Weighed(Arena):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            made.append(self.nbytes)

    monkeypatch.setattr("kvbench.engine.arena.Arena", Weighed)
    rows = sweep(tmp_path / "out")
    assert [row["status"] for row in rows] == ["ok", "ok"]
    can = os.access("/proc/self/clear_refs", os.W_OK)
    for row in rows:
        assert {row[f"device_{name}_bytes_peak"] for name in FIGURES} == {None}
        assert {row["kv_arena_bytes"]} == set(made)
        assert (row["host_rss_bytes_peak"] is not None) == can
        assert not can or row["host_rss_bytes_peak"] > row["kv_arena_bytes"]


def test_a_cell_that_cannot_run_has_its_memory_noted_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise CellOutOfMemory("KV arena of 9 bytes does not fit in 8 bytes free")

    monkeypatch.setattr(stack.Stack, "run", no_room)
    rows = sweep(tmp_path / "out")
    assert {row["status"] for row in rows} == {"oom"}
    assert all(row["kv_arena_bytes"] > 0 and "host_rss_bytes_peak" in row for row in rows)
