"""How many tokens a prompt or an answer has: one number, or a distribution around a mean.

`--input-dist` and `--output-dist` name one of `KINDS` around the mean of `--input-len` or `--output-len`:

| word                                    | lengths                                                                  |
| `fixed`                                 | all the mean                                                             |
| `uniform:ratio=0.5` or `uniform:cv=0.3` | the whole numbers around it, each as likely                              |
| `normal:cv=0.3`                         | rounded, clipped                                                         |
| `lognormal:cv=1` or `lognormal:p99=900` | rounded, clipped; the spread by CV or by one percentile                  |
| `zipf:alpha=1.2`                        | k tokens as likely as k ** -alpha, up to where the mean is the asked one |

Clipped lengths lie from `min` (1) to `max` (the distribution's own 99.9th percentile), so one in a thousand is clipped
unless `:min=` or `:max=` say otherwise; `average` is the mean of what is really drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Protocol

from kvbench.errors import KvbenchError
from kvbench.workloads.options import shaped

if TYPE_CHECKING:
    import numpy as np
    from numpy.random import Generator

_PERCENTILES = ("p50", "p75", "p90", "p95", "p99")
KINDS: dict[str, dict[str, str]] = {
    "fixed": {},
    "uniform": dict.fromkeys(("ratio", "cv"), "number"),
    "normal": dict.fromkeys(("cv", "min", "max"), "number"),
    "lognormal": dict.fromkeys(("cv", *_PERCENTILES, "min", "max"), "number"),
    "zipf": dict.fromkeys(("alpha",), "number"),
}
"""The distributions and the numbers that each may be told."""

CAP = 0.999
"""Where a distribution without an end is clipped, as a share of it."""
LONGEST = 2**20
"""Beyond this no length is drawn: a slip of the finger, or a distribution that has no such mean."""


class Distribution(Protocol):
    """Lengths in whole tokens. `mean` was asked; `average` is that of what is drawn, clipping and rounding included."""

    @property
    def mean(self) -> int: ...

    @property
    def shortest(self) -> int: ...

    @property
    def longest(self) -> int: ...

    @property
    def average(self) -> float: ...

    def draw(self, count: int, rng: Generator) -> list[int]:
        """`count` lengths; a longer draw from an equal generator begins with the shorter one's."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths in tokens: uniform over the whole numbers from `shortest` to `longest`, both included.

    `range_ratio` r is vLLM's `--range-ratio`: the bounds are mean (1 - r) and mean (1 + r), rounded, and never below
    one token. With r = 0 every length is exactly `mean`.
    """

    mean: int
    range_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.mean < 1:
            raise KvbenchError(f"--input-len and --output-len must be at least 1 token, not {self.mean}")
        if not 0 <= self.range_ratio < 1:  # NaN fails this too
            raise KvbenchError(f"--range-ratio must be at least 0 and below 1, not {self.range_ratio}")

    @property
    def shortest(self) -> int:
        return max(1, round(self.mean * (1 - self.range_ratio)))

    @property
    def longest(self) -> int:
        return max(1, round(self.mean * (1 + self.range_ratio)))

    @property
    def average(self) -> float:
        return (self.shortest + self.longest) / 2

    def draw(self, count: int, rng: Generator) -> list[int]:
        """`count` lengths; a longer draw from an equal generator begins with the shorter one's."""
        lengths: list[int] = rng.integers(self.shortest, self.longest, size=count, endpoint=True).tolist()
        return lengths


@dataclass(frozen=True, slots=True)
class Clipped:
    """`mu` + `sigma` × a standard normal number, or e to the power of that where `log`, rounded and clipped."""

    mean: int
    mu: float
    sigma: float
    log: bool
    shortest: int
    longest: int

    @property
    def average(self) -> float:
        """Shortest + the sum over k of P(length > k), k from the shortest to below the longest."""
        return self.shortest + math.fsum(self._beyond(k + 0.5) for k in range(self.shortest, self.longest))

    def _beyond(self, tokens: float) -> float:
        at = math.log(tokens) if self.log else tokens
        return math.erfc((at - self.mu) / (self.sigma * math.sqrt(2))) / 2

    def draw(self, count: int, rng: Generator) -> list[int]:
        import numpy as np

        values = self.mu + self.sigma * rng.standard_normal(count)
        if self.log:
            values = np.exp(np.minimum(values, math.log(2 * self.longest)))
        lengths: list[int] = np.clip(np.rint(values), self.shortest, self.longest).astype(np.int64).tolist()
        return lengths


@dataclass(frozen=True, slots=True)
class Zipf:
    """k tokens with a probability in proportion to k ** -alpha, for k from 1 to `longest`."""

    mean: int
    alpha: float
    longest: int

    @property
    def shortest(self) -> int:
        return 1

    @property
    def average(self) -> float:
        weights = _zipf_weights(self.alpha, self.longest)
        return float((weights * range(1, self.longest + 1)).sum() / weights.sum())

    def draw(self, count: int, rng: Generator) -> list[int]:
        return zipf_ranks(self.alpha, self.longest, count, rng)


def distribution(text: str | None, mean: int, flag: str) -> Distribution:
    """What the word of `--input-dist` or `--output-dist` means around `mean`; None is `fixed`."""
    name, told = shaped(text or "fixed", KINDS, flag)
    if mean < 1:
        raise KvbenchError(f"--input-len and --output-len must be at least 1 token, not {mean}")
    if name == "fixed":
        return Lengths(mean)
    if name == "uniform":
        return Lengths(mean, _ratio(told, flag))
    if name == "zipf":
        return _zipf(_only(told, ("alpha",), name, flag)[1], mean, flag)
    key, value = _only(told, [key for key in KINDS[name] if key not in ("min", "max")], name, flag)
    if name == "normal":
        return _clipped(mean, mean, value * mean, False, told, flag)
    sigma = math.sqrt(math.log1p(value * value)) if key == "cv" else _sigma(int(key[1:]), value, mean, flag)
    return _clipped(mean, math.log(mean) - sigma * sigma / 2, sigma, True, told, flag)


def zipf_ranks(alpha: float, ranks: int, count: int, rng: Generator) -> list[int]:
    """`count` of the numbers 1 to `ranks`, k with a probability in proportion to k ** -alpha."""
    cumulated = _zipf_weights(alpha, ranks).cumsum()
    found: list[int] = (cumulated.searchsorted(rng.random(count) * cumulated[-1], side="right") + 1).tolist()
    return [min(rank, ranks) for rank in found]


def _zipf_weights(alpha: float, ranks: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    import numpy as np

    weights: np.ndarray[tuple[int], np.dtype[np.float64]] = np.arange(1, ranks + 1, dtype=np.float64) ** -alpha
    return weights


def _only(told: Mapping[str, float], keys: tuple[str, ...] | list[str], name: str, flag: str) -> tuple[str, float]:
    """The one number of these keys that says how wide a distribution is."""
    found = [key for key in keys if key in told]
    if len(found) != 1:
        words = " or ".join(f"{name}:{key}=…" for key in (keys if len(keys) <= 2 else (keys[0], keys[-1])))
        raise KvbenchError(f"{flag} {name} needs exactly one number that says how far lengths spread, as {words}")
    return found[0], told[found[0]]


def _ratio(told: Mapping[str, float], flag: str) -> float:
    """Of a uniform distribution; its CV is ratio / sqrt(3)."""
    key, value = _only(told, ("ratio", "cv"), "uniform", flag)
    most = 1.0 if key == "ratio" else 1 / math.sqrt(3)
    if not value < most:
        raise KvbenchError(f"{flag} uniform:{key} must be below {most:.3g}, where lengths reach 0, not {value:g}")
    return value / most


def _sigma(percentile: int, tokens: float, mean: int, flag: str) -> float:
    """Of the lognormal with this mean and percentile q: ln(q / mean) = z sigma - sigma² / 2. Of the two solutions the
    narrower; for the median, where z is 0, there is but one."""
    z, gap = NormalDist().inv_cdf(percentile / 100), math.log(tokens / mean)
    root = z * z - 2 * gap
    sigma = abs(z - math.sqrt(max(0.0, root)))
    if root < 0 or gap * (percentile - 50.5) <= 0:
        range_ = f"above the mean and at most {math.floor(mean * math.exp(z * z / 2)):,}" if z > 0 else "below the mean"
        raise KvbenchError(
            f"{flag} lognormal:p{percentile}={tokens:g} cannot be around a mean of {mean}; it must be {range_}"
        )
    return sigma


def _clipped(mean: int, mu: float, sigma: float, log: bool, told: Mapping[str, float], flag: str) -> Clipped:
    for key in ("min", "max"):
        if key in told and not told[key].is_integer():
            raise KvbenchError(f"{flag} {key} must be whole tokens, not {told[key]:g}")
    cap = mu + sigma * NormalDist().inv_cdf(CAP)
    if "max" not in told and cap > (math.log(LONGEST) if log else LONGEST):
        raise KvbenchError(f"{flag} spreads beyond {LONGEST:,} tokens around a mean of {mean}; clip it with :max=…")
    own = max(mean, round(math.exp(cap) if log else cap)) if "max" not in told else 0
    shortest, longest = int(told.get("min", 1)), int(told.get("max", own))
    if not 1 <= shortest <= mean <= longest <= LONGEST:
        raise KvbenchError(
            f"{flag} must have its mean of {mean} between min {shortest} and max {longest}, and max at most {LONGEST:,}"
        )
    found = Clipped(mean, mu, sigma, log, shortest, longest)
    if "max" not in told and not mean / 2 <= found.average <= mean * 2:
        raise KvbenchError(
            f"{flag} spreads so far that clipping would leave a mean of {found.average:,.0f}, not {mean}; spread it "
            "less, or say where to clip with :max=…"
        )
    return found


def _zipf(alpha: float, mean: int, flag: str) -> Zipf:
    """Ends where its mean comes nearest to the asked one; the mean grows with the end."""
    import numpy as np

    ranks = np.arange(1, LONGEST + 1, dtype=np.float64)
    weights = ranks**-alpha
    means = (weights * ranks).cumsum() / weights.cumsum()
    if means[-1] < mean - 0.5:
        raise KvbenchError(
            f"{flag} zipf:alpha={alpha:g} has a mean of {means[-1]:.3g} tokens at most, not {mean}; lower alpha"
        )
    after = min(int(means.searchsorted(mean)), LONGEST - 1)
    nearer = after - 1 if after and mean - means[after - 1] <= means[after] - mean else after
    return Zipf(mean, alpha, nearer + 1)
