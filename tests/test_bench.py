"""`make bench` says what it measured; what it measured is nothing that a test could hold it to."""

from __future__ import annotations

import sys

import bench_client
import bench_simulator
import pytest


def test_the_bench_of_the_client_runs_and_reports(capsys: pytest.CaptureFixture[str]) -> None:
    bench_client.main(["--rate", "100", "--seconds", "0.3", "--repeats", "2"])
    said = capsys.readouterr().out
    for name in ("achieved % of drawn", "send lag p99 ms", "client CPU %", "median", "2 repeats"):
        assert name in said
    (answered,) = (line.split() for line in said.splitlines() if line.startswith("answered"))
    assert answered[-3:] == ["100.00"] * 3


def test_the_bench_of_the_simulator_runs_and_reports(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_simulator", "--repeats", "1", "--requests", "300"])
    bench_simulator.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:2] for row in rows] == [
        [job.name, kind] for job in bench_simulator.JOBS for kind in ("paged", "contiguous")
    ]
    assert all(float(row[2]) > 1 for row in rows)
