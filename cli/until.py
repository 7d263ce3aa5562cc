"""`--until-ci`: whether the repeats of a run are enough for its intervals, and what is said of them in the end."""

from __future__ import annotations

from kvbench.metrics.precision import FEWEST_REPEATS, wide
from kvbench.metrics.store import RunFolder


def enough(folder: RunFolder, repeats: int, share: float) -> bool:
    """Whether to stop after so many whole repeats: every interval of the primary metric is within ± `share`."""
    return repeats >= FEWEST_REPEATS and not still_wide(folder, share)


def still_wide(folder: RunFolder, share: float) -> list[str]:
    """The groups whose interval of the primary metric is wider, each with how wide: `paged at 16 users ± 7.1 %`. One of
    which no cell ran has none to wait for."""
    from kvbench.reports.contests import PRIMARY
    from kvbench.reports.groups import Results

    results = Results.of(folder)
    found = []
    for group in results.groups:
        interval = group.mean(PRIMARY)
        if not group.ok or not wide(interval, share):
            continue
        half = None if interval.high is None or not interval.value else interval.high / interval.value - 1
        told = "no interval" if half is None else f"± {half:.1%}".replace("%", " %")
        at = f"{group.load}{f', {group.context}' if len(results.contexts) > 1 else ''}"
        found.append(f"{results.name(group.variant)} at {at} {told}")
    return found


def outcome(folder: RunFolder, share: float) -> dict[str, object]:
    """As `run.json` keeps it."""
    left = still_wide(folder, share)
    repeats = len({row.get("repeat") for row in folder.rows()})
    return {"share": share, "repeats": repeats, "reached": not left, "wide": left}
