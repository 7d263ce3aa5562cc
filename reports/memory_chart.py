"""Where a variant's KV memory went over a run: the five parts of the pool as areas, invisible where it was free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench.metrics.memory import split
from kvbench.metrics.records import Run
from kvbench.metrics.store import RunFolder
from kvbench.reports.contests import PRIMARY
from kvbench.reports.figure import Figure, Look, apart, looks, of_context
from kvbench.reports.groups import Group, Results
from kvbench.reports.svg import LIGHT, Plot, y_ticks
from kvbench.reports.words import THIN, number, percent, sentence_case

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Shares = NDArray[np.float64]

BINS = 96
"""Stretches of time in the picture: about what the eye can tell apart at its size."""
NUMBERS = 12
"""Rows of the table behind it."""


def memory(folder: RunFolder, results: Results, group: Group, name: str) -> Figure:
    """The parts of the pool over the group's median repeat, by output tokens/s. What was never filled
    was asked for in vain or added by rounding."""
    row = group.median_row(PRIMARY) or group.ok[0]
    run = folder.run(str(row["cell"]))
    shares = _shares(run)
    means = {part: _mean(run, share) for part, share in shares.items()}
    edges, series = _binned(run, shares)
    look = looks(results)[group.variant]
    plot = _draw(name, edges, series, means, look)
    repeat = f", repeat {int(row['repeat']) + 1}" if row.get("repeat") is not None else ""
    which = f"{group.load}{repeat}{' (the median)' if len(group.ok) > 2 else ''}"
    title = f"{sentence_case(results.name(group.variant))}: tokens fill {percent(means['used'])} of the KV memory"
    subtitle = f"Share of the pool over time at {which}{of_context(results)}"
    rows = tuple(
        (
            number(float(edges[i]), 1 if edges[-1] >= 10 else 2),
            *(number(float(values[i]) * 100, 1) for values in series.values()),
        )
        for i in range(0, BINS, BINS // NUMBERS)
    )
    heads = ("from second", *(f"{part} %" for part in series))
    return Figure(title, subtitle, plot.svg(f"{title}. {subtitle}"), heads, ((results.name(group.variant), rows),))


def _shares(run: Run) -> dict[str, Shares]:
    """The parts at each step as shares of the pool."""
    parts = split(run)
    rows = {
        "used": parts.used,
        "reserved": parts.reserved,
        "never filled": parts.internal + parts.rounding,
        "free": parts.free,
    }
    return {part: values / parts.pool for part, values in rows.items()}


def _mean(run: Run, share: Shares) -> float:
    """Over the time in which steps ran, as `kv_utilisation_mean` has it."""
    import numpy as np

    return float(np.average(share, weights=[step.end_s - step.start_s for step in run.steps]))


def _binned(run: Run, shares: dict[str, Shares]) -> tuple[Shares, dict[str, Shares]]:
    """The edges of equal stretches of time [BINS + 1] and the mean of each part in them [BINS]. Between steps nothing
    is held."""
    import numpy as np

    edges = np.linspace(run.steps[0].start_s, run.steps[-1].end_s, BINS + 1)
    times = np.array([(step.start_s, step.end_s) for step in run.steps])
    seconds = times[:, 1] - times[:, 0]
    series: dict[str, Shares] = {}
    for part, share in shares.items():
        if part != "free":
            so_far = np.concatenate([[0.0], np.cumsum(share * seconds)])
            until = np.stack([so_far[:-1], so_far[1:]], axis=1)
            means = np.diff(np.interp(edges, times.ravel(), until.ravel())) / np.diff(edges)
            series[part] = means.round(9)  # what the sums added to the last digits
    series["free"] = 1 - np.sum(list(series.values()), axis=0)
    return edges - edges[0], series


def _draw(name: str, edges: Shares, series: dict[str, Shares], means: dict[str, float], look: Look) -> Plot:
    from matplotlib.ticker import MaxNLocator

    plot = Plot(name, left=42, right=106)
    end = float(edges[-1])
    plot.axes.set_xlim(0, end)
    plot.axes.set_ylim(0, 100)
    y_ticks(plot, 100, f"{THIN}%")
    at = [float(tick) for tick in MaxNLocator(4).tick_values(0, end) if 0 <= tick <= end]
    plot.ticks("x", at, [f"{tick:,.10g}" for tick in at])
    bottom, middle, middles = 0 * series["free"], 0.0, {}
    for part, fill in (("used", look.token), ("reserved", look.tint), ("never filled", "waste-tint"), ("free", "")):
        top = bottom + series[part] * 100
        if fill and series[part].max() > 0.0005:
            plot.axes.stairs(top, edges, baseline=bottom, fill=True, color=LIGHT[fill], lw=0)
        middles[part] = middle + means[part] * 50
        bottom, middle = top, middle + means[part] * 100
    _name_parts(plot, end, means, middles, look)
    plot.name_x("seconds since the start")
    return plot


def _name_parts(plot: Plot, x: float, means: dict[str, float], middles: dict[str, float], look: Look) -> None:
    """The parts with their means, right of the picture."""
    scale = plot.plot_height / 100
    inks = {"used": look.token, "never filled": "waste"}
    for (part, y), height in zip(
        middles.items(), apart([y * scale for y in middles.values()], 13, plot.plot_height), strict=True
    ):
        weight = "bold" if part in inks else "normal"
        words = f"{part} {percent(means[part], 1 if 0 < means[part] < 0.01 else 0)}"
        plot.write(words, (x, y), inks.get(part, "ink2"), (7, height - y * scale), weight=weight)
