"""What a running sweep says on standard error: one live line on a terminal, one plain line a cell elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvbench.metrics.points import Context

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from kvbench.engine.engine import Engine
    from kvbench.workloads.grid import Cell

REFRESH_S = 0.25


class Progress:
    """Follows the cells of a sweep. `watch` may be called every step; it draws at most four times a second.

    The time left is estimated from the cells that are done: a repeat of a point takes what its last one took, a point
    not seen yet what `guesses_s` says, corrected by how the guesses of the finished ones turned out. `done` cells came
    before these, in a run taken up again.
    """

    def __init__(self, console: Console, cells: list[Cell], guesses_s: dict[str, float], done: int = 0) -> None:
        self._console = console
        self._left = list(cells)
        self._count = done + len(cells)
        self._guesses_s = guesses_s
        self._took_s: dict[object, float] = {}
        self._guessed_total_s = self._took_total_s = 0.0
        self._live: Status | None = None
        self._drawn_s = 0.0
        self._started_s = time.monotonic()
        self._label = ""

    def start(self, cell: Cell) -> None:
        self._started_s = time.monotonic()
        self._label = f"cell {self._count - len(self._left) + 1}/{self._count} {describe(cell)}"
        if self._console.is_terminal:
            self._live = self._console.status(self._label)
            self._live.start()

    def watch(self, engine: Engine, now_s: float) -> None:
        if self._live is None or (clock_s := time.monotonic()) - self._drawn_s < REFRESH_S or not engine.steps:
            return
        self._drawn_s = clock_s
        last = engine.steps[-1]
        tokens = sum(step.sampled_tokens for step in engine.steps[-64:])
        since_s = now_s - engine.steps[-64:][0].start_s
        pool = last.pool_tokens
        self._live.update(
            f"{self._label} · {tokens / since_s if since_s else 0:.0f} out tok/s · "
            f"KV {last.held_tokens / pool:.0%} held, {last.used_tokens / pool:.0%} used · "
            f"{last.running} running, {last.waiting} waiting · {clock(self.left_s())} left"
        )

    def finish(self, cell: Cell, said: str) -> None:
        took_s = time.monotonic() - self._started_s
        self.stop()
        self._left.remove(cell)
        self._took_s[_point(cell)] = took_s
        self._took_total_s += took_s
        self._guessed_total_s += self._guesses_s[cell.id]
        tail = f"; {clock(self.left_s())} left" if self._left else ""
        self._console.print(f"{self._label}: {said} in {took_s:.1f} s{tail}", markup=False, soft_wrap=True)

    def stop(self) -> None:
        """Take the live line away."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def left_s(self) -> float:
        """Seconds until the last cell is done, by the best estimate there is."""
        bias = self._took_total_s / self._guessed_total_s if self._guessed_total_s else 1.0
        left_s = sum(self._took_s.get(_point(cell), bias * self._guesses_s[cell.id]) for cell in self._left)
        running_s = time.monotonic() - self._started_s if self._live is not None else 0.0
        return max(0.0, left_s - running_s)


def _point(cell: Cell) -> object:
    return cell.variant, cell.load, cell.context


def describe(cell: Cell) -> str:
    """`paged + swap, 16 users, 64 tokens in and 48 tokens out, repeat 2`."""
    words = [str(cell.variant), str(cell.load)]
    if cell.context != Context():
        words.append(str(cell.context))
    return ", ".join([*words, f"repeat {cell.repeat + 1}"])


def clock(seconds: float) -> str:
    """`0:07`, `12:30`, `1:02:03`."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
