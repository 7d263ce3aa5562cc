"""When the requests of an open loop arrive: an absolute schedule, drawn before the run and never moved by it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvbench.errors import KvbenchError
from kvbench.workloads.streams import stream

if TYPE_CHECKING:
    import numpy as np

KINDS = ("poisson", "gamma", "constant")


def schedule(kind: str, count: int, rate_per_s: float, seed: int, burstiness: float = 1.0) -> list[float]:
    """The arrival times of `count` requests, in seconds from the start; the first comes after the first gap.

    - `poisson`: exponential gaps of mean 1 / rate.
    - `gamma`: gaps of shape `burstiness` and the same mean, as in vLLM's `--burstiness`: their coefficient of variation
      is 1 / sqrt(burstiness), so below 1 the load comes in bursts and above 1 it evens out. At 1 it *is* `poisson`,
      number for number.
    - `constant`: equal gaps.

    The schedule is not stretched to the asked rate: a drawn Poisson schedule has a rate of its own, and a report prints
    both.
    """
    if kind not in KINDS:
        raise KvbenchError(f"--arrivals must be one of {', '.join(KINDS)}, not {kind!r}")
    if count < 1:
        raise KvbenchError(f"--num-prompts must be at least 1, not {count}")
    if not (math.isfinite(rate_per_s) and rate_per_s > 0):
        raise KvbenchError(f"--request-rate must be a positive number of requests a second, not {rate_per_s}")
    if not (math.isfinite(burstiness) and burstiness > 0):
        raise KvbenchError(f"--burstiness must be a positive number, not {burstiness}")
    if burstiness != 1 and kind != "gamma":
        raise KvbenchError(f"--burstiness {burstiness} goes with --arrivals gamma, not {kind}")
    if kind == "constant":
        times = [(index + 1) / rate_per_s for index in range(count)]
    else:
        times = _gamma_times(count, rate_per_s, burstiness, stream(seed, "arrivals"))
    if not math.isfinite(times[-1]):
        raise KvbenchError(
            f"--request-rate {rate_per_s} with --burstiness {burstiness} gives times beyond any clock; use larger ones"
        )
    return times


def _gamma_times(count: int, rate_per_s: float, shape: float, rng: np.random.Generator) -> list[float]:
    import numpy as np

    with np.errstate(all="ignore"):  # overflow shows in the last time, which the caller checks
        gaps = rng.standard_gamma(shape, size=count) * (1 / rate_per_s / shape)
        times: list[float] = np.cumsum(gaps).tolist()
    return times
