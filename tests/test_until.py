"""`--until-ci`: repeats are added until intervals are narrow, from a minimum to a cap, also in a run taken up again."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_reports_runs import add, make, refused, serve
from test_sweep import TINY, sweep

import kvbench.cli.conduct as conduct
import kvbench.cli.measure as measuring
from kvbench.cli import until
from kvbench.cli.config import SweepConfig
from kvbench.cli.parse import parse_share
from kvbench.errors import KvbenchError
from kvbench.metrics.points import Variant
from kvbench.metrics.precision import FEWEST_REPEATS
from kvbench.metrics.store import RunFolder
from kvbench.reports.context import checks
from kvbench.reports.groups import Results
from kvbench.reports.sign import WARNING

FLAGS = (*TINY[:4], "--input-len", "4", "--output-len", "2", "--concurrency", "1", "--num-warmups", "0")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _made_up_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell runs, but its speed is a made-up one: 100 tokens/s ± 1 %, contiguous ± 4 %, by turns."""
    real = measuring.measure

    def measured(job: object, cell: object, watch: object = None) -> object:
        row, run = real(job, cell, watch)  # type: ignore[arg-type]
        swing = 0.04 if row["backend"] == "contiguous" else 0.01
        repeat = row["repeat"]
        assert isinstance(repeat, int)
        return row | {"output_tokens_per_s": 100 * (1 + swing * (-1) ** repeat)}, run

    monkeypatch.setattr(measuring, "measure", measured)


@pytest.mark.usefixtures("_made_up_speeds")
def test_repeats_stop_when_every_interval_is_narrow(capsys: pytest.CaptureFixture[str]) -> None:
    """96 and 104 by turns: half the interval is t(5) · 4.382 / sqrt 6 = 4.60 % of 100 with 6 repeats, t(6) · 4.276 /
    sqrt 7 = 3.95 of 100.6 with 7."""
    folder = sweep(*FLAGS, "--until-ci", "4.7%")
    assert {row["repeat"] for row in folder.rows()} == set(range(FEWEST_REPEATS))
    assert len(folder.manifest["cells"]) == len(folder.rows()) == 2 * FEWEST_REPEATS
    assert folder.manifest["until_ci"] == {"share": 0.047, "repeats": 6, "reached": True, "wide": []}
    assert "stopped after 6 repeats" in capsys.readouterr().err
    assert any(
        "every interval of out tok/s is within ± 4.7" in check.text for check in checks(folder, Results.of(folder))
    )


@pytest.mark.usefixtures("_made_up_speeds")
def test_a_run_that_is_taken_up_again_stops_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = (*FLAGS, "--until-ci", "4.1%")
    calls = 0
    write = RunFolder.write_cell

    def interrupted(self: RunFolder, *args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise KeyboardInterrupt
        write(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(RunFolder, "write_cell", interrupted)
    folder = sweep(*flags, code=conduct.INTERRUPTED)
    assert len(folder.rows()) == 11 and len(folder.manifest["cells"]) == 80
    assert folder.manifest["until_ci"]["reached"] is False
    folder = sweep(*flags, "--resume")
    assert len(folder.rows()) == len(folder.manifest["cells"]) == 2 * 7
    assert folder.manifest["until_ci"]["reached"] is True


@pytest.mark.usefixtures("_made_up_speeds")
def test_at_the_cap_the_wide_ones_are_named() -> None:
    folder = sweep(*FLAGS, "--until-ci", "2%", "--repeats", "6")
    assert folder.manifest["until_ci"]["wide"] == ["contiguous at 1 user ± 4.6 %"]
    found = [check.text for check in checks(folder, Results.of(folder)) if check.kind == WARNING]
    assert any("not every interval of out tok/s is within" in text and "contiguous at 1 user" in text for text in found)


def test_a_group_that_never_ran_holds_nobody_up(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    for repeat in range(6):
        add(folder, "paged", 5, repeat, serve("paged", 5, 20, 0.1))
        add(folder, "contiguous", 5, repeat, refused(3), status="oom")
    assert until.enough(folder, 6, 0.05) and not until.enough(folder, FEWEST_REPEATS - 1, 0.05)


def test_how_narrow_is_a_share() -> None:
    assert parse_share("5%", "--until-ci") == parse_share(" 0.05 ", "--until-ci") == 0.05
    assert parse_share(None, "--until-ci") is None
    for text in ("0", "5", "100%", "-1%", "nan", "inf", "five", "%", ""):
        with pytest.raises(KvbenchError, match="--until-ci must be a share"):
            parse_share(text, "--until-ci")
    with pytest.raises(KvbenchError, match="at least 6 repeats"):
        SweepConfig(variants=(Variant("paged"),), loads=None, contexts=None, until_ci=0.05, repeats=5)
