"""Findings about machines that are not here: what hides a card, who else is on it, and what to do; and the command."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable
from dataclasses import replace

import pytest
from fakes_nvml import GIB, FakeCard, FakeNvml

from kvbench.cli import doctor
from kvbench.cli.app import main
from kvbench.engine import diagnosis
from kvbench.engine.diagnosis import NOTE, OK, WRONG, Finding, System, Torch, cards, energy, libraries
from kvbench.engine.nvml import Driver, find_driver, others_on

OWN = 77
H100 = FakeCard(uuid="GPU-aa")
CUDA = Torch("2.11.0+cu130", cuda="13.0", arches=("sm_80", "sm_90", "sm_100", "compute_120"), sees=("aa",))
BLIND = replace(CUDA, arches=(), sees=())
LINUX = System(nodes=frozenset({"/dev/nvidia0", "/dev/nvidia-uvm"}))


def driver_of(monkeypatch: pytest.MonkeyPatch, *there: FakeCard, cuda: int = 13000) -> Driver:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(list(there), cuda=cuda))
    found = find_driver()
    assert isinstance(found, Driver)
    return found


def said(findings: Iterable[Finding], state: str = WRONG) -> list[str]:
    return [f"{one.said} -> {one.mend}" for one in findings if one.state == state]


def test_a_card_that_torch_uses_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = cards(driver_of(monkeypatch, H100), CUDA, LINUX, OWN)
    assert found == Finding("GPU 0", OK, "NVIDIA H100 80GB HBM3, 79.0 of 80.0 GiB free, sm_90, driver 580.65.06")


def test_what_a_card_does_not_tell_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    shy = replace(H100, memory=None, capability=None, mig=None)
    (found,) = cards(driver_of(monkeypatch, shy), CUDA, LINUX, OWN)
    assert found.said == "NVIDIA H100 80GB HBM3, driver 580.65.06"


@pytest.mark.parametrize(
    ("torch", "system", "card", "cuda", "why", "mend"),
    [
        (Torch("2.13.0+cpu"), LINUX, H100, 13000, "is a CPU build", "install a CUDA build"),
        (Torch("2.13.0+rocm7", hip="7.0"), LINUX, H100, 13000, "built for AMD", "install a CUDA build"),
        (BLIND, LINUX, H100, 12080, "driver 580.65.06 serves 12.8 at most", "update the driver"),
        (BLIND, replace(LINUX, visible="3"), H100, 13000, "CUDA_VISIBLE_DEVICES='3' hides it", "set it to GPU-aa"),
        (BLIND, replace(LINUX, visible=""), H100, 13000, "CUDA_VISIBLE_DEVICES='' hides it", "unset it"),
        (BLIND, LINUX, replace(H100, mig=True), 13000, "instances (MIG) and none", "CUDA_VISIBLE_DEVICES=MIG-"),
        (BLIND, replace(LINUX, wsl=True), H100, 13000, "Windows does not pass it on", "wsl --update"),
        (BLIND, System(container=True), H100, 13000, "the container was not given it", "--gpus all"),
        (BLIND, System(), H100, 13000, "nvidia_uvm is not loaded", "modprobe nvidia_uvm"),
        (BLIND, LINUX, H100, 13000, "cannot use it", "reboot"),
        (CUDA, LINUX, replace(H100, capability=(6, 1)), 13000, "no kernels for sm_61", "an older one"),
        (CUDA, LINUX, replace(H100, capability=(11, 0)), 13000, "no kernels for sm_110", "a newer one"),
    ],
)
def test_what_keeps_torch_from_a_card_is_named_with_its_cure(
    torch: Torch, system: System, card: FakeCard, cuda: int, why: str, mend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = said(cards(driver_of(monkeypatch, card, cuda=cuda), torch, system, OWN))
    before, _, after = found.partition(" -> ")
    assert why in before and mend in after


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 3), (12, 0), (12, 1), (13, 0)])
def test_kernels_run_on_later_cards_of_their_generation_and_finished_ones_on_all_later(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = replace(H100, capability=capability)
    assert not said(cards(driver_of(monkeypatch, card), CUDA, LINUX, OWN))


def test_an_older_driver_of_the_same_cuda_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = replace(CUDA, cuda="12.9")
    assert not said(cards(driver_of(monkeypatch, H100, cuda=12020), torch, LINUX, OWN))


def test_who_else_is_on_a_card_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = replace(H100, processes=((OWN, "/usr/bin/python3", GIB), (8, "/opt/bin/vllm", 30 * GIB), (9, None, None)))
    (found,) = said(cards(driver_of(monkeypatch, busy), CUDA, LINUX, OWN), NOTE)
    assert found.startswith("used by vllm (pid 8, 30.0 GiB), somebody (pid 9) -> end them")
    assert [one.pid for one in others_on("aa", OWN)] == [8, 9]
    many = replace(H100, processes=[(pid, "x", GIB) for pid in range(5)])
    assert "and 2 more" in said(cards(driver_of(monkeypatch, many), CUDA, LINUX, OWN), NOTE)[0]


def test_instances_and_windows_get_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    sliced = driver_of(monkeypatch, replace(H100, mig=True))
    torch = replace(CUDA, sees=("bb",))  # the UUID of an instance
    notes = said(cards(sliced, torch, replace(LINUX, wsl=True), OWN), NOTE)
    assert "measures one of them" in notes[0] and "Sysmem Fallback" in notes[1]


@pytest.mark.parametrize(
    ("torch", "nodes", "state", "words"),
    [
        (Torch("2.13.0+cpu"), (), OK, "none"),
        (Torch("2.13.0+cpu"), ("/dev/kfd",), WRONG, "no ROCm build"),
        (Torch("2.13.0+cpu"), ("/dev/nvidia0",), WRONG, "an NVIDIA card is there"),
        (Torch("2.13.0+cpu"), ("/dev/dxg",), NOTE, "Windows passes on no NVIDIA card"),
        (replace(CUDA, sees=("aa",)), ("/dev/nvidia0",), NOTE, "cannot be asked"),
        (Torch("2.13.0+rocm7", hip="7.0", sees=("aa",)), ("/dev/kfd",), NOTE, "AMD cards are not read"),
    ],
)
def test_without_a_driver_to_ask_the_rest_is_told(
    torch: Torch, nodes: tuple[str, ...], state: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([], broken="Driver Not Loaded"))
    driver = find_driver()
    assert driver == "the NVIDIA driver cannot be asked: Driver Not Loaded"
    found = list(cards(driver, torch, System(nodes=frozenset(nodes)), OWN))
    assert any(one.state == state and words in one.said for one in found), found


def test_a_missing_library_of_the_driver_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert find_driver() == "nvidia-ml-py is not installed"
    assert others_on("aa", OWN) == ()


def test_libraries_that_are_missing_or_old_are_told_with_what_is_needed() -> None:
    there = {"torch": "2.10.1+cu128", "transformers": "5.17.0.dev0", "triton": None}
    old, fine, absent = libraries(there)
    assert (old.state, old.said, old.mend) == (WRONG, "2.10.1+cu128 is too old", "install torch >= 2.11")
    assert fine.state == OK and absent.state == NOTE
    assert [one.state for one in libraries({"torch": "2.11.0", "transformers": None, "triton": "3.6.0"})] == [
        OK,
        WRONG,
        OK,
    ]


def test_energy_that_only_root_may_read_has_its_cure() -> None:
    assert [energy(2, 2).state, energy(0, 2).state, energy(0, 0).state] == [OK, NOTE, NOTE]
    assert "chmod" in energy(0, 2).mend and not energy(0, 0).mend


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[object, str]:
    with pytest.raises(SystemExit) as end:
        main(["doctor", *args])
    return end.value.code, capsys.readouterr().out


def test_the_command_looks_at_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "--format", "json")
    rows = json.loads(text)
    assert {"torch", "CPU", "model"} <= {row["topic"] for row in rows}
    assert (code or 0) == int(any(row["state"] == WRONG for row in rows))


def test_what_is_wrong_ends_with_1_in_every_format(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two = [
        Finding("GPU 0", WRONG, "an | odd\x1b[31m card " + "long " * 40, "sudo modprobe nvidia_uvm"),
        Finding("CPU", OK, "a"),
    ]
    monkeypatch.setattr(doctor, "findings", lambda: iter(two))
    code, text = run(capsys)
    assert code == 1 and text.startswith("✗ GPU 0  an | odd") and "\n         → sudo modprobe nvidia_uvm\n" in text
    assert "\x1b" not in text and all(len(line) <= 120 for line in text.splitlines())
    assert "an \\| odd" in run(capsys, "--format", "markdown")[1]
    (first, _) = csv.DictReader(io.StringIO(run(capsys, "--format", "csv")[1]))
    assert (first["topic"], first["state"], first["mend"]) == ("GPU 0", WRONG, "sudo modprobe nvidia_uvm")
    assert run(capsys, "--format", "yaml")[0] == 2


def test_the_first_line_of_a_sweep_is_the_card_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([H100]))
    monkeypatch.setattr(diagnosis, "this_torch", lambda: Torch("2.13.0+cpu"))
    found = diagnosis.unusable_gpu()
    assert found is not None and "H100" in found and "CPU build; install a CUDA build of torch" in found
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([], broken="no"))
    monkeypatch.setattr(diagnosis, "this_system", System)
    assert diagnosis.unusable_gpu() is None
