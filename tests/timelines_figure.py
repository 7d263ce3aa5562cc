"""The figure of docs/timelines.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from timelines import Replayed


def draw(replays: Sequence[Replayed], path: Path) -> None:
    """Running and waiting over time, a column for each run, as SVG: the same runs give the same bytes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "timelines", "font.size": 9, "path.simplify": True}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(9, 4.6), layout="constrained")
        grid = figure.subplots(2, len(replays), sharex="col", sharey="row", squeeze=False)
        for column, one in enumerate(replays):
            end_s = max(one.recorded.last_s.max(), one.simulated.last_s.max())
            at_s = np.linspace(0.0, float(end_s), 240)
            for row, word in enumerate(("running", "waiting")):
                axes = grid[row][column]
                axes.plot(one.seen[:, 0], one.seen[:, 1 + row], ".", color="#8A8F98", ms=3, label="recorded, log")
                axes.plot(at_s, getattr(one.recorded, word)(at_s), color="#1B1F24", lw=1.4, label="recorded, requests")
                axes.plot(at_s, getattr(one.simulated, word)(at_s), color="#0B62A8", lw=1.4, label="simulated")
                axes.set_ylabel(f"{word} requests" if column == 0 else "")
                axes.grid(color="#E9E9E4")
                axes.spines[["top", "right"]].set_visible(False)
            grid[0][column].set_title(f"{one.recording.model}, {one.recording.tp} x RTX PRO 6000")
            grid[1][column].set_xlabel("seconds after the first request")
        grid[0][0].legend(frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
