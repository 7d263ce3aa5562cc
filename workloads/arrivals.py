"""When the requests of an open loop arrive: an absolute schedule, drawn before the run and never moved by it.

| word                    | arrivals around the asked rate R                                                        |
| `poisson`               | exponential gaps of mean 1 / R                                                          |
| `gamma`                 | gaps of shape `burstiness` and the same mean (vLLM's `--burstiness`): CV 1 / sqrt(shape) |
| `constant`              | equal gaps                                                                              |
| `ramp:from=0.2:to=1.8`  | Poisson; the rate goes from 0.2 R to 1.8 R in a straight line, then stays                |
| `step:at=0.5:to=2`      | Poisson at R, from half of the load on at 2 R                                           |
| `onoff:on=5s:off=5s`    | Poisson in bursts: silence in between, and so much more within that the mean is R       |
| `trace`                 | as the data set recorded them; drawn elsewhere (`traces.py`)                            |

The numbers shown are those where none are told. A ramp and a step span `--duration`, or where only the number of
requests is told the time in which so many are expected.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from kvbench.errors import KvbenchError
from kvbench.workloads.options import shaped
from kvbench.workloads.streams import stream

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[tuple[int], np.dtype[np.float64]]

TRACE = "trace"
MOST = 10**7
"""More requests than this are a slip of the finger."""
KINDS: dict[str, dict[str, str]] = {
    "poisson": {},
    "gamma": {},
    "constant": {},
    "ramp": {"from": "number", "to": "number"},
    "step": {"at": "number", "to": "number"},
    "onoff": {"on": "time", "off": "time"},
    TRACE: {},
}
"""The processes and the numbers that each may be told."""

_DEFAULTS: dict[str, dict[str, float]] = {
    "ramp": {"from": 0.2, "to": 1.8},
    "step": {"at": 0.5, "to": 2.0},
    "onoff": {"on": 5.0, "off": 5.0},
}


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A process by name, with its numbers."""

    kind: str = "poisson"
    burstiness: float = 1.0
    told: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.burstiness) and self.burstiness > 0):
            raise KvbenchError(f"--burstiness must be a positive number, not {self.burstiness}")
        if self.burstiness != 1 and self.kind != "gamma":
            raise KvbenchError(f"--burstiness {self.burstiness} goes with --arrivals gamma, not {self.kind}")
        if self.kind == "step" and not self._numbers["at"] < 1:
            raise KvbenchError(f"--arrivals step:at must be a share of the load below 1, not {self._numbers['at']:g}")

    @classmethod
    def of(cls, text: str | None, burstiness: float | None = None) -> Arrivals:
        """What the words of `--arrivals` and `--burstiness` mean."""
        kind, told = shaped(text or "poisson", KINDS, "--arrivals")
        return cls(kind, 1.0 if burstiness is None else burstiness, tuple(told.items()))

    @property
    def _numbers(self) -> dict[str, float]:
        return _DEFAULTS.get(self.kind, {}) | dict(self.told)

    def schedule(
        self, rate_per_s: float, seed: int, *, count: int | None = None, duration_s: float | None = None
    ) -> list[float]:
        """The arrival times of `count` requests, or of all that come until `duration_s`, whichever is less; in seconds
        from the start, the first after the first gap.

        The schedule is not stretched to the asked rate: a drawn Poisson schedule has a rate of its own, and a report
        prints both.
        """
        assert count is not None or duration_s is not None, "a schedule needs an end"
        assert self.kind != TRACE, "a trace brings its own times"
        if count is not None and count < 1:
            raise KvbenchError(f"--num-prompts must be at least 1, not {count}")
        if not (math.isfinite(rate_per_s) and rate_per_s > 0):
            raise KvbenchError(f"--request-rate must be a positive number of requests a second, not {rate_per_s}")
        when = self._when(rate_per_s, count, duration_s)
        times = self._times(when, rate_per_s, seed, count, duration_s)
        if not times:
            raise KvbenchError(
                f"no request arrives within --duration {duration_s:g}s at --request-rate {rate_per_s:g}; raise one"
            )
        if not 0 < times[-1] < math.inf:
            raise KvbenchError(
                f"--request-rate {rate_per_s} with --burstiness {self.burstiness} gives times beyond any clock; use "
                "larger ones"
            )
        return times

    def _times(
        self,
        when: Callable[[Array], Array],
        rate_per_s: float,
        seed: int,
        count: int | None,
        duration_s: float | None,
    ) -> list[float]:
        """Gaps of mean 1, added up and put on the clock by `when`; more of them until the end is reached."""
        import numpy as np

        rng, most = stream(seed, "arrivals"), MOST if count is None else count
        enough = most if duration_s is None else min(most, int(min(rate_per_s * duration_s, MOST)) + 64)
        gaps = np.empty(0)
        while True:
            with np.errstate(all="ignore"):  # overflow shows in the last time, which the caller checks
                more = np.ones(enough) if self.kind == "constant" else rng.standard_gamma(self.burstiness, enough)
                gaps = np.concatenate([gaps, more / self.burstiness])
                times = when(np.cumsum(gaps))
            if gaps.size >= most or (duration_s is not None and not times[-1] <= duration_s):
                break
            enough = min(gaps.size, most - gaps.size)
        if duration_s is not None and count is None and times[-1] <= duration_s:
            raise KvbenchError(f"--duration {duration_s:g}s brings over {MOST:,} requests; shorten it")
        if duration_s is not None:
            times = times[times <= duration_s]
        found: list[float] = times.tolist()
        return found

    def _when(self, rate_per_s: float, count: int | None, duration_s: float | None) -> Callable[[Array], Array]:
        """From the number of arrivals expected so far to the time: the inverse of the rate's integral."""
        import numpy as np

        n = self._numbers
        if self.kind == "onoff":
            on_s, cycle_s = n["on"], n["on"] + n["off"]
            per_cycle = rate_per_s * cycle_s

            def bursts(units: Array) -> Array:
                whole = np.floor(units / per_cycle)
                return whole * cycle_s + (units - whole * per_cycle) / per_cycle * on_s

            return bursts
        if self.kind == "ramp":
            first, last = n["from"], n["to"]
            span_s = duration_s or cast(int, count) / rate_per_s / ((first + last) / 2)
            slope = (last - first) * rate_per_s / span_s

            def ramp(units: Array) -> Array:
                at = first * rate_per_s
                root = np.sqrt(np.maximum(at * at + 2 * slope * units, 0.0))
                beyond = units - span_s * rate_per_s * (first + last) / 2
                return np.where(beyond <= 0, 2 * units / (at + root), span_s + beyond / (last * rate_per_s))

            return ramp
        if self.kind == "step":
            at, to = n["at"], n["to"]
            span_s = duration_s or cast(int, count) / rate_per_s / (at + (1 - at) * to)

            def step(units: Array) -> Array:
                beyond = units - at * span_s * rate_per_s
                return np.where(beyond <= 0, units / rate_per_s, at * span_s + beyond / (to * rate_per_s))

            return step
        return lambda units: units / rate_per_s


def schedule(kind: str, count: int, rate_per_s: float, seed: int, burstiness: float = 1.0) -> list[float]:
    """The times of `count` requests under the process of this name, its numbers as they are where none are told."""
    return Arrivals.of(kind, burstiness).schedule(rate_per_s, seed, count=count)
