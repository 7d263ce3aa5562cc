"""The figures of the page: output tokens/s by load, and where the KV memory went, one picture per variant.

One grammar: a variant is a colour and a mark, its name stands beside its line, a band is its 95 % interval, and what is
missing is shown as missing. A figure that cannot be drawn says why, and the others are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from kvbench.metrics.points import LoadPoint
from kvbench.metrics.store import RunFolder
from kvbench.reports.contests import PRIMARY, able_variants, contests, focus, pairs
from kvbench.reports.figure import Figure, Look, apart, looks, of_context
from kvbench.reports.groups import Group, Results, Variant
from kvbench.reports.memory_chart import memory
from kvbench.reports.servers import remote
from kvbench.reports.svg import LIGHT, Plot, y_ticks
from kvbench.reports.words import DASH, count, number, percent, sentence_case


def figures(folder: RunFolder, results: Results) -> list[Figure]:
    """All figures of a run that ran anything at its middle context."""
    if not results.ok:
        return []
    found = [drawn(results.titled("Output tokens/s by load"), partial(throughput, results))]
    load = focus(results)
    for i, variant in enumerate(results.variants):
        group = _largest(results, variant, load)
        if group and not remote(group):
            title = results.titled(f"{sentence_case(results.name(variant))}: the KV memory over time")
            found.append(drawn(title, partial(memory, folder, results, group, f"memory{i}")))
    return found


def drawn(title: str, draw: Callable[[], Figure]) -> Figure:
    """The figure, or a box under `title` with the reason why there is none."""
    try:
        return draw()
    except Exception as error:
        reason = " ".join(str(error).split())
        return Figure(title, "This figure could not be drawn.", error=f"{type(error).__name__}: {reason}")


def _largest(results: Results, variant: Variant, load: LoadPoint | None) -> Group | None:
    """The group at `load`, or where the variant did not run there at its own largest load."""
    ran = [group for group in results.of_variant(variant, results.middle) if group.ok]
    return next((group for group in ran if group.load == load), ran[-1] if ran else None)


def throughput(results: Results) -> Figure:
    """Mean output tokens/s of each variant by load, with the 95 % t-interval of its repeats."""
    names = {variant: results.name(variant) for variant in results.variants}
    lines = {variant: [results.at(variant, load, results.middle) for load in results.loads] for variant in names}
    plot = Plot("tokens", right=16 + 6.4 * max(len(name) for name in names.values()))
    x = [load.size or 1.0 for load in results.loads]
    top = _top(lines.values())
    plot.axes.set_ylim(0, top)
    y_ticks(plot, top)
    _load_axis(plot, results.loads, x)
    ends = {}
    for variant, look in looks(results).items():
        ends[variant] = _line(plot, x, lines[variant], look)
    _names(plot, {names[v]: (looks(results)[v].token, *end) for v, end in ends.items() if end}, top)
    unit = "requests per second asked" if any(load.request_rate is not None for load in results.loads) else "users"
    repeats = max(len(group.ok) for group in results.groups)
    band = f"{percent(0.95)} interval of {repeats} repeats" if repeats > 1 else _band_of_one(results)
    title = results.titled(_title(lines, names) + ("" if _told_apart(results) else "; no difference is proven"))
    where = "by load" if len(x) > 1 else f"at {results.loads[0]}, one load only"
    subtitle = f"Output tokens per second {where}; {band}{of_context(results)}"
    return Figure(
        title,
        subtitle,
        plot.svg(f"{title}. {subtitle}"),
        (unit, "out tok/s", f"{percent(0.95)} interval", "repeats"),
        tuple((names[variant], tuple(_number_row(group) for group in groups)) for variant, groups in lines.items()),
    )


def _band_of_one(results: Results) -> str:
    """What is drawn about a line that has one repeat."""
    within = any(group.mean(PRIMARY).low is not None for group in results.groups)
    return f"{percent(0.95)} interval within the one repeat" if within else "one repeat, so no interval"


def _told_apart(results: Results) -> bool:
    """Whether any two variants are proven different at any load; also where there is nothing to compare."""
    duels = [duel for pair in pairs(results) for duel in contests(results, *pair)]
    return len(able_variants(results)) < 2 or any(duel.proven for duel in duels)


def _title(lines: dict[Variant, list[Group]], names: dict[Variant, str]) -> str:
    """`Paged reaches 98 output tokens/s, contiguous 49`, the fastest first, three of them."""
    means = {variant: [group.mean(PRIMARY).value for group in groups] for variant, groups in lines.items()}
    most = {
        variant: max((mean for mean in found if mean is not None), default=None) for variant, found in means.items()
    }
    ran = sorted(((speed, names[variant]) for variant, speed in most.items() if speed is not None), reverse=True)
    decimals = 0 if ran and ran[-1][0] >= 10 else 1
    said = [f"{name} {number(speed, decimals)}" for speed, name in ran[1:3]]
    said += [f"{count(len(ran) - 3, 'other')} less"] * (len(ran) > 3)
    if not ran:
        return "No output tokens"
    return ", ".join([f"{sentence_case(ran[0][1])} reaches {number(ran[0][0], decimals)} output tokens/s", *said])


def _number_row(group: Group) -> tuple[str, ...]:
    speed = group.mean(PRIMARY)
    interval = DASH if speed.low is None else f"{number(speed.low, 1)} to {number(speed.high, 1)}"
    return group.load.number, number(speed.value, 1), interval, str(speed.n)


def _top(lines: Iterable[Sequence[Group]]) -> float:
    """Where the y axis ends: the data and its intervals, which two repeats can make endless, plus 5 %."""
    means = [group.mean(PRIMARY) for groups in lines for group in groups]
    most = max((mean.value for mean in means if mean.value is not None), default=0.0)
    highs = [mean.high for mean in means if mean.high is not None]
    return (min(max([most, *highs]), 2 * most) or 1.0) * 1.05


def _load_axis(plot: Plot, loads: Sequence[LoadPoint], x: Sequence[float]) -> None:
    """Logarithmic, a label at every load that has room for it."""
    plot.axes.set_xscale("log")
    pad = (x[-1] / x[0]) ** 0.04 if len(x) > 1 else 2.0
    plot.axes.set_xlim(x[0] / pad, x[-1] * pad)
    labelled: list[int] = []
    width = plot.axes.get_position().width * plot.WIDTH
    span = math.log(x[-1] / x[0]) or 1.0
    for i, at in enumerate(x):
        if not labelled or math.log(at / x[labelled[-1]]) / span * width > 8 + 6.2 * len(loads[i].number):
            labelled.append(i)
    plot.ticks("x", [x[i] for i in labelled], [loads[i].number for i in labelled])
    scale = " (log scale)" if len(x) > 1 else ""
    plot.name_x(
        ("requests/s asked" if any(load.request_rate is not None for load in loads) else "concurrent users") + scale
    )


def _line(plot: Plot, x: Sequence[float], groups: Sequence[Group], look: Look) -> tuple[float, float] | None:
    """A variant's line with its band; one load has a whisker instead. Returns where it ends, None for no line."""
    nan, colour = math.nan, LIGHT[look.token]
    means = [group.mean(PRIMARY) for group in groups]
    y = [nan if mean.value is None else mean.value for mean in means]
    low = [nan if mean.low is None else max(0.0, mean.low) for mean in means]
    high = [nan if mean.high is None else mean.high for mean in means]
    if len(x) > 1:
        plot.axes.fill_between(x, low, high, color=colour, alpha=0.22, lw=0)
        plot.axes.plot(x, y, color=colour)
    else:
        plot.axes.vlines(x, low, high, color=colour)
    marked = len(x) <= 24
    plot.axes.plot(
        x, y, ls="none", marker=look.mark if marked else "", color=colour, mec=LIGHT["surface"], clip_on=False
    )
    failed = [at for at, value, group in zip(x, y, groups, strict=True) if math.isnan(value) and group.rows]
    plot.axes.plot(failed, [0.0] * len(failed), ls="none", marker="x", ms=7, mew=2, color=colour, clip_on=False)
    return next(((at, value) for at, value in zip(x[::-1], y[::-1], strict=True) if not math.isnan(value)), None)


def _names(plot: Plot, ends: dict[str, tuple[str, float, float]], top: float) -> None:
    """Names right of where their lines end, at least 12 units apart."""
    ordered = sorted(ends.items(), key=lambda item: item[1][2])
    heights = apart([y / top * plot.plot_height for _, (_, _, y) in ordered], 12, plot.plot_height)
    for (name, (token, x, y)), height in zip(ordered, heights, strict=True):
        plot.write(name, (x, y), token, (9, height - y / top * plot.plot_height), weight="bold")
