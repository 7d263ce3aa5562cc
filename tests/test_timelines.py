"""docs/timelines.md is what the replay of the recordings gives; both are read right."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import timelines
from timelines_figure import draw

from kvbench.reports.accuracy import MARK, document


@cache
def replays(folder: Path) -> list[timelines.Replayed]:
    return [timelines.replay(folder, recording) for recording in timelines.RECORDINGS]


def test_the_page_is_what_the_replay_gives(shared_data: Path) -> None:
    assert [words for one in replays(shared_data / "traces") for words in timelines.doubts(one)] == []
    page = timelines.page(replays(shared_data / "traces"))
    assert page == timelines.PAGE.read_text(encoding="utf-8"), "make timelines writes it again"


def test_the_figure_has_the_same_bytes_each_time(shared_data: Path, tmp_path: Path) -> None:
    for name in "ab":
        draw(replays(shared_data / "traces"), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert timelines.FIGURE.stat().st_size < 120_000


def test_requests_and_log_of_a_recording_agree(shared_data: Path) -> None:
    """Two files of one run, written by different parts of its server: the times are on one clock, from one zero."""
    for one in replays(shared_data / "traces"):
        log = timelines._log(shared_data / "traces", one.recording)
        assert log["gen_throughput"].sum() == one.recorded.tokens.sum()
        for word in ("running", "waiting"):
            apart = np.abs(getattr(one.recorded, word)(log["t"]) - log[word])
            assert apart.mean() < 1.5
        order = (one.recorded.arrived_s <= one.recorded.admitted_s) & (one.recorded.first_s < one.recorded.last_s)
        assert order.all() and (one.recorded.admitted_s < one.recorded.first_s).all()
        assert one.recorded.running(np.arange(0, 200, 0.01)).max() == timelines.SEATS


def test_curves_and_metrics_of_known_times() -> None:
    times = timelines.Times(*(np.array(x, dtype=float) for x in ([0, 1], [0, 3], [1, 4], [3, 8], [3, 5])))
    at_s = np.array([-1.0, 0.0, 1.5, 3.0, 7.9, 8.0])
    assert times.running(at_s).tolist() == [0, 1, 1, 1, 1, 0]
    assert times.waiting(at_s).tolist() == [0, 0, 1, 0, 0, 0]
    assert times.ttft_s.tolist() == [1, 3] and times.tpot_s.tolist() == [1, 1] and times.e2e_s.tolist() == [3, 7]
    assert times.tokens_per_s == pytest.approx(1.0)


def test_what_the_parameters_have_seen_is_said() -> None:
    told = {one.model: timelines.known(one) for one in timelines.RECORDINGS}
    assert "have not seen this run" in told["Llama-3.1-8B"]
    assert "have seen this run" in told["Qwen3-32B"]


def test_the_score_keeps_the_way_to_the_page() -> None:
    """`make score` writes docs/accuracy.md again from its mark on."""
    accuracy = timelines.PAGE.with_name("accuracy.md")
    kept = document(accuracy.read_text(encoding="utf-8"), ["## Errors"]).split(MARK)[0]
    assert f"({timelines.PAGE.name})" in kept
