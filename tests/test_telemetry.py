"""Energy, clocks and heat: exact sums of what a device tells, and nothing of what it does not."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes_nvml import FakeCard, FakeNvml

from kvbench.cli.app import main
from kvbench.engine.telemetry import CpuGauge, Reading, Telemetry, gauge_of, joules_per_output_token, summed_up
from kvbench.metrics.store import RunFolder

HEAT = ("heat",)


def test_a_counter_gives_exact_energy_and_mean_power() -> None:
    readings = [Reading(10.0, 5_000.0, 300.0), Reading(11.0, 5_350.0, 700.0), Reading(14.0, 6_200.0, 100.0)]
    found = summed_up(readings)
    assert (found["energy_j"], found["energy_source"]) == (1_200.0, "counter")
    assert (found["power_mean_w"], found["power_peak_w"]) == (300.0, 700.0)


def test_power_is_added_up_where_there_is_no_counter_or_it_began_anew() -> None:
    for first, last in ((None, None), (9e9, 3.0)):
        readings = [Reading(0.0, first, 100.0), Reading(1.0, None, 300.0), Reading(3.0, last, 100.0)]
        found = summed_up(readings)
        assert (found["energy_j"], found["energy_source"]) == (200.0 + 400.0, "power")
        assert found["power_mean_w"] == 200.0


def test_what_a_device_does_not_tell_is_none() -> None:
    assert set(summed_up([Reading(0.0), Reading(2.0)]).values()) == {None}
    assert summed_up([Reading(0.0, power_w=5.0), Reading(2.0)])["energy_j"] is None


def test_slow_moments_are_flagged_and_a_power_limit_is_named_only() -> None:
    calm = [Reading(float(at), slowed=(), capped=("power limit",) if at < 2 else ()) for at in range(4)]
    found = summed_up(calm)
    assert (found["throttled"], found["throttle_reasons"]) == (0, "power limit 50%")
    found = summed_up([*calm, Reading(4.0, slowed=HEAT)])
    assert (found["throttled"], found["throttle_reasons"]) == (1, "power limit 40%, heat 20%")


def test_clocks_are_those_between_the_ends_where_the_device_rests() -> None:
    clocks = (2.1e8, 1.9e9, 1.7e9, 2.1e8)
    found = summed_up([Reading(float(at), clock_hz=hz) for at, hz in enumerate(clocks)])
    assert (found["clock_mean_hz"], found["clock_min_hz"]) == (1.8e9, 1.7e9)
    assert summed_up([Reading(0.0, clock_hz=1e9), Reading(0.5, clock_hz=2e9)])["clock_min_hz"] == 1e9


@pytest.mark.parametrize(("energy", "tokens"), [(None, 5), (5.0, None), (5.0, 0)])
def test_energy_a_token_needs_both(energy: object, tokens: object) -> None:
    assert joules_per_output_token(energy, tokens) is None
    assert joules_per_output_token(8.0, 4) == 2.0


def test_a_thread_looks_while_the_context_lasts() -> None:
    seen: list[float] = []

    def gauge() -> Reading:
        seen.append(time.monotonic())
        return Reading(seen[-1], energy_j=float(len(seen)))

    with Telemetry(gauge, period_s=0.001) as watching:
        while len(seen) < 4:
            time.sleep(0.001)
    count = len(seen)
    time.sleep(0.01)
    assert len(seen) == count, "it looks on after the end"
    assert watching.read(2) == summed_up([Reading(at, energy_j=n + 1.0) for n, at in enumerate(seen)]) | {
        "joules_per_output_token": (count - 1) / 2
    }


def package(folder: Path, name: str, energy_uj: int, limit_uj: int = 1_000_000) -> Path:
    domain = folder / name
    domain.mkdir(parents=True)
    (domain / "energy_uj").write_text(f"{energy_uj}\n")
    (domain / "max_energy_range_uj").write_text(f"{limit_uj}\n")
    return domain


def test_rapl_counts_each_package_once_and_beyond_its_limit(tmp_path: Path) -> None:
    power, cpus = tmp_path / "power", tmp_path / "cpus"
    first, second = (package(power, f"intel-rapl:{n}", 900_000) for n in range(2))
    package(power, "intel-rapl:0:0", 5)  # a part of package 0
    gauge = CpuGauge(power, cpus)
    assert gauge().energy_j == 0.0
    (first / "energy_uj").write_text("950000")
    (second / "energy_uj").write_text("100000")  # it began again
    assert gauge().energy_j == pytest.approx(0.05 + 0.2, rel=1e-12)
    (second / "energy_uj").unlink()
    assert gauge().energy_j is None
    assert CpuGauge(tmp_path / "nowhere", cpus)().energy_j is None


def test_a_hot_core_is_noticed_when_it_happens(tmp_path: Path) -> None:
    counter = tmp_path / "cpu0" / "thermal_throttle" / "core_throttle_count"
    counter.parent.mkdir(parents=True)
    counter.write_text("7\n")
    gauge = CpuGauge(tmp_path, tmp_path)
    assert gauge().slowed == ()
    counter.write_text("8\n")
    assert gauge().slowed == HEAT
    assert gauge().slowed == ()
    assert CpuGauge(tmp_path, tmp_path / "nowhere")().slowed is None


def test_a_gpu_is_read_through_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    card = FakeCard(uuid="GPU-a", energy_mj=5_000, power_mw=250_000, sm_mhz=1_410, celsius=61, reasons=0x40 | 0x04)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([card]))
    gauge = gauge_of(torch.device("cuda", 0), "a")  # torch says it without the prefix
    assert gauge is not None
    now = gauge()
    assert (now.energy_j, now.power_w, now.clock_hz, now.temperature_c) == (5.0, 250.0, 1.41e9, 61.0)
    assert (now.slowed, now.capped) == (("heat (hardware)",), ("power limit",))
    assert gauge_of(torch.device("cuda", 0), "b") is None
    assert gauge_of(torch.device("cuda", 0), None) is None


def test_a_card_that_tells_nothing_is_read_as_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([FakeCard(uuid="GPU-a")]))
    gauge = gauge_of(torch.device("cuda", 0), "a")
    assert gauge is not None
    with Telemetry(gauge) as watching:
        pass
    assert set(watching.read(7).values()) == {None}


def test_a_sweep_notes_energy_and_flags_a_cell_that_was_slowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    joules = iter(range(0, 10**9, 50))

    def gauge(*_: Any) -> Any:
        return lambda: Reading(time.monotonic(), float(next(joules)), slowed=HEAT)

    monkeypatch.setattr("kvbench.engine.telemetry.gauge_of", gauge)
    quick = ("--model", "tiny", "--dtype", "float32", "--input-len", "12", "--output-len", "8", "--repeats", "1")
    with pytest.raises(SystemExit) as end:
        main(["sweep", "--output", str(tmp_path / "run"), *quick, "--device", "cpu", "--concurrency", "3"])
    assert end.value.code in (0, None)
    for row in RunFolder.open(tmp_path / "run").rows():
        assert row["joules_per_output_token"] == row["energy_j"] / row["output_tokens_total"] > 0
        assert (row["throttled"], row["throttle_reasons"]) == (1, "heat 100%")
    said = capsys.readouterr()
    assert "slowed down: heat 100%" in said.err
    assert "the device slowed down in 2 of 2 cells" in said.out + said.err
    page = (tmp_path / "run" / "report.html").read_text()
    assert "How the device fared" in page and "J/out tok" in page
