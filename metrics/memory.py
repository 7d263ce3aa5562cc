"""Where the arena's rows went: five parts of the pool at each step, made after the run, and the ratios they give.

Per sequence and step, with `filled` rows, `held` rows, `asked` (what its policy asked for) and `final` (filled when
its stay ended):

    reserved = max(0, min(final, held) - filled)                    will be filled by this sequence
    rounding = held - max(min(asked, held), min(final, held))       only because the allocator rounds up
    internal = held - filled - reserved - rounding                  asked for, never filled
    pool     = used + reserved + internal + rounding + free         exactly, each step

No live sequence fills more than min(final, held), so the sum of `filled + reserved` over the sequences is that of
min(final, held), which is constant over a hold: only `used` must be recorded step by step.

Beside the parts: `cached` rows are free ones whose content could be reused, `swapped` rows lie in the host's memory and
so outside the pool, and `logical` rows are the used ones counted once for each sequence that reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.metrics.records import Run
from kvbench.metrics.window import Window

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Rows of the pool by what became of them, int64 [steps] each. Their sum is the pool."""

    used: Rows
    reserved: Rows
    internal: Rows
    rounding: Rows
    free: Rows

    @property
    def held(self) -> Rows:
        return self.used + self.reserved + self.internal + self.rounding

    @property
    def pool(self) -> Rows:
        return self.held + self.free


def split(run: Run) -> MemoryParts:
    """The five parts at each of the run's steps.

    AssertionError, naming the step, where the holds contradict what the allocator reported at that step.
    """
    import numpy as np

    step, used, recorded, free, cached, pool = columns(
        run.steps, "step", "used_tokens", "held_tokens", "free_tokens", "cached_tokens", "pool_tokens"
    )
    first, end, held, asked, final = columns(
        run.holds, "first_step", "end_step", "held_tokens", "asked_tokens", "final_tokens"
    )
    assert (np.diff(step) > 0).all(), "steps are out of order"
    starts, ends = np.searchsorted(step, first), np.searchsorted(step, end)

    def at_each_step(rows: Rows) -> Rows:
        change = np.zeros(len(step) + 1, np.int64)
        np.add.at(change, starts, rows)
        np.subtract.at(change, ends, rows)
        return change.cumsum()[:-1]

    filled = np.minimum(final, held)
    wanted = np.maximum(np.minimum(asked, held), filled)
    parts = MemoryParts(
        used, at_each_step(filled) - used, at_each_step(wanted - filled), at_each_step(held - wanted), free
    )
    for wrong, what in (
        (at_each_step(held) != recorded, "the holds are not what the allocator held"),
        (parts.pool != pool, "the parts are not the pool"),
        (used < 0, "rows in use are negative"),
        (free < 0, "free rows are negative"),
        (cached > free, "more rows are cached than free"),
        (parts.reserved < 0, "more rows are in use than will be filled"),
    ):
        assert not wrong.any(), f"step {step[wrong.argmax()]}: {what}"
    return parts


def memory_summary(run: Run, window: Window) -> dict[str, float | int | None]:
    """What the window's steps say of the pool. Means are time-weighted:

        kv_utilisation    used / pool                            mean and peak
        kv_efficiency     used / held                            mean and peak
        kv_fragmentation  (internal + rounding) / held           mean and peak
        kv_sharing        (logical - used) / logical             mean and peak
        kv_blocks_saved   (logical_held - held) / logical_held   mean: blocks that sharing spares / those held without
        kv_reserved, kv_internal, kv_rounding, kv_free           mean of each part / pool
        kv_cached         the part of free that could be reused  mean of it / pool
        kv_cache_usage    held / pool, as servers tell it        mean and peak
        swapped_tokens    rows in the host's memory              peak, in rows

    The means of utilisation, reserved, internal, rounding and free add up to 1. A step weighs as long as it lasts
    inside the window. Idle time weighs nothing: no step runs then and nothing is held, so counting it would mix the
    load into what these numbers say about the layout. A step that holds nothing has no efficiency and no fragmentation,
    one that has filled nothing no sharing; what is defined at no step is None.
    """
    import numpy as np

    parts = split(run)
    start_s = np.array([step.start_s for step in run.steps])
    end_s = np.array([step.end_s for step in run.steps])
    logical, logical_held, cached, swapped = columns(
        run.steps, "logical_tokens", "logical_held_tokens", "cached_tokens", "swapped_tokens"
    )
    seconds = np.minimum(end_s, window.end_s) - np.maximum(start_s, window.start_s)
    inside = (seconds > 0) | ((seconds == 0) & (start_s == end_s))
    summary: dict[str, float | int | None] = {}

    def tell(name: str, rows: Rows, of: Rows, *, peak: bool = False) -> None:
        defined = inside & (of > 0)
        ratio, weight = rows[defined] / of[defined], seconds[defined]
        summary[f"kv_{name}_mean"] = float(np.average(ratio, weights=weight)) if weight.sum() > 0 else None
        if peak:
            summary[f"kv_{name}_peak"] = float(ratio.max()) if ratio.size else None

    tell("utilisation", parts.used, parts.pool, peak=True)
    tell("efficiency", parts.used, parts.held, peak=True)
    tell("fragmentation", parts.internal + parts.rounding, parts.held, peak=True)
    tell("sharing", logical - parts.used, logical, peak=True)
    tell("blocks_saved", logical_held - parts.held, logical_held)
    for name in ("reserved", "internal", "rounding", "free"):
        tell(name, getattr(parts, name), parts.pool)
    tell("cached", cached, parts.pool)
    tell("cache_usage", parts.held, parts.pool, peak=True)
    return summary | {"swapped_tokens_peak": int(swapped[inside].max()) if inside.any() else None}


def columns(rows: Sequence[object], *names: str) -> list[Rows]:
    """Whole numbers of the rows, an array for each name."""
    import numpy as np

    return [np.array([getattr(row, name) for row in rows], np.int64) for name in names]
