"""Where the arena's rows went: five parts of the pool at each step, made after the run, and the ratios they give.

Per sequence and step, with `filled` rows, `held` rows, `asked` (what its policy asked for) and `final` (filled when
its stay ended):

    reserved = max(0, min(final, held) - filled)                    will be filled by this sequence
    rounding = held - max(min(asked, held), min(final, held))       only because the allocator rounds up
    internal = held - filled - reserved - rounding                  asked for, never filled
    pool     = used + reserved + internal + rounding + free         exactly, each step

No live sequence fills more than min(final, held), so the sum of `filled + reserved` over the sequences is that of
min(final, held), which is constant over a hold: only `used` must be recorded step by step.
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

    step, used, recorded, free, pool = _columns(
        run.steps, "step", "used_tokens", "held_tokens", "free_tokens", "pool_tokens"
    )
    first, end, held, asked, final = _columns(
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
        (parts.reserved < 0, "more rows are in use than will be filled"),
    ):
        assert not wrong.any(), f"step {step[wrong.argmax()]}: {what}"
    return parts


def memory_summary(run: Run, window: Window) -> dict[str, float | None]:
    """Time-weighted mean and peak of utilisation (used / pool), efficiency (used / held), fragmentation ((internal +
    rounding) / held) and sharing (1 - used / logical: the share of the sequences' rows that exist only once for
    several) over the steps of the window, as `kv_..._mean` and `kv_..._peak`.

    A step weighs as long as it lasts inside the window. Idle time weighs nothing: no step runs then and nothing is
    held, so counting it would mix the load into what these numbers say about the layout. A step that holds nothing
    has no efficiency and no fragmentation, one that has filled nothing no sharing; what is defined at no step is None.
    """
    import numpy as np

    parts = split(run)
    start_s = np.array([step.start_s for step in run.steps])
    end_s = np.array([step.end_s for step in run.steps])
    (logical,) = _columns(run.steps, "logical_tokens")
    seconds = np.minimum(end_s, window.end_s) - np.maximum(start_s, window.start_s)
    wasted, summary = parts.internal + parts.rounding, dict[str, float | None]()
    for name, rows, of in (
        ("utilisation", parts.used, parts.pool),
        ("efficiency", parts.used, parts.held),
        ("fragmentation", wasted, parts.held),
        ("sharing", logical - parts.used, logical),
    ):
        defined = (seconds >= 0) & (of > 0)
        ratio, weight = rows[defined] / of[defined], seconds[defined]
        summary[f"kv_{name}_mean"] = float(np.average(ratio, weights=weight)) if weight.sum() > 0 else None
        summary[f"kv_{name}_peak"] = float(ratio.max()) if ratio.size else None
    return summary


def _columns(rows: Sequence[object], *names: str) -> list[Rows]:
    import numpy as np

    return [np.array([getattr(row, name) for row in rows], np.int64) for name in names]
