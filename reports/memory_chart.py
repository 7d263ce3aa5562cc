"""Where a variant's KV memory went over a run: the five parts of the pool as areas, invisible where it was free, and
above them what lies outside the pool: rows that sharing spares, rows swapped to the host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvbench.metrics.memory import columns, split
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
HAIR = 0.005
"""Of the pool's height: what is never higher cannot be seen, so it has no name in the picture."""

CACHED = "cached"
OUTSIDE = {"spared": "rows that sharing spares", "swapped": "rows swapped to the host"}


@dataclass(frozen=True, slots=True)
class Course:
    """What became of one kind of rows, all as shares of the pool: in each stretch of time [BINS], over the time in
    which steps ran, as `kv_utilisation_mean` has it, and at the step with the most."""

    bins: Shares
    mean: float
    peak: float


def memory(folder: RunFolder, results: Results, group: Group, name: str) -> Figure:
    """The parts of the pool over the group's median repeat, by output tokens/s; what was cached, spared and swapped
    where anything was."""
    row = group.median_row(PRIMARY) or group.ok[0]
    edges, courses = _courses(folder.run(str(row["cell"])))
    plot = _draw(name, edges, courses, looks(results)[group.variant])
    repeat = f", repeat {int(row['repeat']) + 1}" if row.get("repeat") is not None else ""
    which = f"{group.load}{repeat}{' (the median)' if len(group.ok) > 2 else ''}"
    variant = results.name(group.variant)
    title = results.titled(f"{sentence_case(variant)}: tokens fill {percent(courses['used'].mean)} of the KV memory")
    subtitle = f"Share of the pool over time at {which}{of_context(results)}"
    if above := [words for kind, words in OUTSIDE.items() if kind in courses]:
        subtitle += f"; above it {' and '.join(above)}, in % of the pool"
    heads = ("from second", *(f"{kind} %" for kind in courses))
    return Figure(title, subtitle, plot.svg(f"{title}. {subtitle}"), heads, ((variant, _numbers(edges, courses)),))


def _numbers(edges: Shares, courses: dict[str, Course]) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (
            number(float(edges[i]), 1 if edges[-1] >= 10 else 2),
            *(number(float(course.bins[i]) * 100, 1) for course in courses.values()),
        )
        for i in range(0, BINS, BINS // NUMBERS)
    )


def _courses(run: Run) -> tuple[Shares, dict[str, Course]]:
    """The edges of equal stretches of time [BINS + 1], from 0, and the course of each part of the pool in them; then of
    what was cached of the free rows, spared and swapped, if anything ever was.

    Between steps nothing is held, and nothing spared or swapped; what was cached at a step stays so until the next.
    """
    import numpy as np

    parts = split(run)
    logical, cached, swapped = columns(run.steps, "logical_tokens", "cached_tokens", "swapped_tokens")
    times = np.array([(step.start_s, step.end_s) for step in run.steps])
    lasting = np.column_stack([times[:, 0], [*times[1:, 0], times[-1, 1]]])
    edges = np.linspace(times[0, 0], times[-1, 1], BINS + 1)
    weights = times[:, 1] - times[:, 0]

    def course(rows: NDArray[np.int64], ranges: Shares = times) -> Course:
        share = rows / parts.pool
        return Course(_binned(edges, ranges, share), float(np.average(share, weights=weights)), float(share.max()))

    held = {
        "used": course(parts.used),
        "reserved": course(parts.reserved),
        "never filled": course(parts.internal),
        "rounding": course(parts.rounding),
    }
    free = replace(course(parts.free), bins=1 - np.sum([part.bins for part in held.values()], axis=0))
    beside = {
        CACHED: (cached, lasting),
        "spared": ((logical - parts.used).clip(0), times),  # early runs have no logical rows
        "swapped": (swapped, times),
    }
    extra = {kind: course(rows, ranges) for kind, (rows, ranges) in beside.items() if rows.any()}
    return edges - edges[0], held | {"free": free} | extra


def _binned(edges: Shares, ranges: Shares, share: Shares) -> Shares:
    """The mean between each two edges of what is `share` in each of the ranges of time and 0 outside them."""
    import numpy as np

    so_far = np.concatenate([[0.0], np.cumsum(share * (ranges[:, 1] - ranges[:, 0]))])
    until = np.stack([so_far[:-1], so_far[1:]], axis=1)
    means: Shares = np.diff(np.interp(edges, ranges.ravel(), until.ravel())) / np.diff(edges)
    return means.round(9)  # what the sums added to the last digits


def _draw(name: str, edges: Shares, courses: dict[str, Course], look: Look) -> Plot:
    from matplotlib.ticker import MaxNLocator

    above = [kind for kind in OUTSIDE if kind in courses]
    plot = Plot(name, left=42, right=106, strips=len(above))
    end = float(edges[-1])
    plot.axes.set_xlim(0, end)
    plot.axes.set_ylim(0, 100)
    y_ticks(plot, 100, f"{THIN}%")
    at = [float(tick) for tick in MaxNLocator(4).tick_values(0, end) if 0 <= tick <= end]
    plot.ticks("x", at, [f"{tick:,.10g}" for tick in at])
    plot.name_x("seconds since the start")
    _areas(plot, edges, courses, look)
    for kind in above:
        _strip(plot, edges, courses[kind], kind, look)
    return plot


def _areas(plot: Plot, edges: Shares, courses: dict[str, Course], look: Look) -> None:
    """The parts one above the other, the cached rows at the foot of the free ones; right of them their names and means,
    at mid-height of the mean."""
    fills = {
        "used": (look.token, 1.0),
        "reserved": (look.tint, 1.0),
        "never filled": ("waste-tint", 1.0),
        "rounding": ("waste", 0.6),
        CACHED: ("rule", 1.0),
    }
    inks = {"used": look.token, "never filled": "waste", "rounding": "waste"}
    bottom, foot = 0 * edges[1:], 0.0
    names: list[tuple[str, float, str]] = []
    for part in ("used", "reserved", "never filled", "rounding", CACHED, "free"):
        if part not in courses or (part != "used" and courses[part].bins.max() <= HAIR):
            continue
        course, ink = courses[part], inks.get(part, "ink2")
        cached = courses[CACHED].mean if part == "free" and CACHED in courses else 0.0
        words = f"{part} {percent(course.mean, 1 if 0 < course.mean < 0.01 else 0)}"
        names.append((f"of it {words}" if part == CACHED else words, foot + (course.mean - cached) * 50, ink))
        foot += (course.mean - cached) * 100
        if part in fills:
            token, alpha = fills[part]
            top = bottom + course.bins * 100
            plot.axes.stairs(top, edges, baseline=bottom, fill=True, color=LIGHT[token], alpha=alpha, lw=0)
            bottom = top
    scale = plot.plot_height / 100
    heights = apart([at * scale for _, at, _ in names], 13, plot.plot_height)
    for (words, at, ink), height in zip(names, heights, strict=True):
        weight = "normal" if ink == "ink2" else "bold"
        plot.write(words, (edges[-1], at), ink, (7, height - at * scale), weight=weight)


def _strip(plot: Plot, edges: Shares, course: Course, kind: str, look: Look) -> None:
    """Rows outside the pool, on a scale of their own."""
    decimals = 0 if course.peak >= 0.1 else 1
    words = f"{OUTSIDE[kind]}: {percent(course.mean, decimals)}, up to {percent(course.peak, decimals)}"
    axes = plot.strip(sentence_case(words))
    axes.stairs(course.bins / course.peak, edges, baseline=0, fill=True, color=LIGHT[look.tint], lw=0)
    axes.stairs(course.bins / course.peak, edges, baseline=None, color=LIGHT[look.token], lw=1.2)
