"""How much load a server bears: a search that stops on its interval, whatever single runs say.

Every probe serves a load under a seed of its own and passes or fails. Near the limit that is chance, so the limit is
the load that half of all runs pass, and what is known of it is a distribution, not a bracket: the chance to pass falls
with the logarithm of the load along a logistic curve of unknown steepness, and a few in a hundred runs pass or fail
whatever the load. Each probe is put where it is expected to say most about the limit (QUEST, Watson and Pelli 1983;
with unknown steepness and least expected entropy, Kontsevich and Tyler 1999), until 95 % of the distribution lie within
the tolerance. The lower end of that interval (of whole numbers its middle, rounded down) is the answer, if it passes
again under fresh seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

TOLERANCE = 0.1
"""How far apart the ends of the interval may be, as a share of the lower one."""
BUDGET = 40
"""So many probes at most."""
LEVEL = 0.95
LAPSES = 0.02
STEEPNESS = (0.01, 0.02, 0.05, 0.1, 0.2)
"""By which share of the limit the odds to pass fall to 1 / e."""
RETESTS, RETESTS_PASSED = 5, 4
"""So many fresh seeds serve the answer, of which so many must pass: 4 of 5 where 9 of 10 runs pass in 92 % of cases."""
CANDIDATES = (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98)
"""Probes are put at one of these quantiles of the limit's distribution: at the middle alone a steep limit looks like a
flat one."""
_GRID = 800

Probe = Callable[[float, int], bool]
"""Whether a run of this load under this seed passes."""


@dataclass(frozen=True, slots=True)
class Trial:
    load: float
    seed: int
    passed: bool


@dataclass(frozen=True, slots=True)
class Limit:
    """What a search found. `answer` is the highest load that passed again under fresh seeds, None where none did;
    `low` to `high` is the interval of the limit, None where it lies outside what was searched. `retested` of
    `RETESTS` fresh seeds passed at the answer. `why` says how it ended, `warnings` what to beware of."""

    answer: float | None
    low: float | None
    high: float | None
    retested: int
    why: str
    warnings: tuple[str, ...]
    trials: tuple[Trial, ...]


@dataclass(frozen=True, slots=True)
class Range:
    """Which loads may be probed: `least` to `most`, `first` at first; whole numbers only, or three digits."""

    first: float
    least: float
    most: float
    whole: bool = False

    def __post_init__(self) -> None:
        assert 0 < self.least <= self.first <= self.most < math.inf, self

    def nearest(self, load: float) -> float:
        """The load as it can be asked for."""
        load = min(max(load, self.least), self.most)
        return float(max(1, math.floor(load + 1e-9))) if self.whole else float(f"{load:.3g}")


def search(probe: Probe, where: Range, *, seed: int = 0, tolerance: float = TOLERANCE, budget: int = BUDGET) -> Limit:
    """The largest load that passes. Seeds count up from `seed`, one a probe."""
    hunt = _Hunt(probe, where, seed, budget)
    why = _bracket(hunt)
    if why:
        return hunt.ended(why, hunt.edge, None, None, retested=hunt.retested)
    rejected: set[float] = set()
    while True:
        low, high = hunt.limit()
        near = high <= low * (1 + tolerance) or (where.whole and high - low <= 1)
        if not near and hunt.left > RETESTS:
            hunt.ask(hunt.telling())
            continue
        answer = where.nearest(math.sqrt(low * high) if where.whole and near else low)
        why = "the interval is narrow" if near else f"{budget} runs were not enough for a narrower interval"
        if answer in rejected or hunt.left < RETESTS:
            why = "its answer did not pass again" if rejected else f"{budget} runs were not enough"
            return hunt.ended(why, None, low, high)
        passed = sum(hunt.ask(answer) for _ in range(RETESTS))
        if passed >= RETESTS_PASSED:
            if hunt.left:
                hunt.ask(where.nearest(answer / 2))  # whether it passes below, too
            return hunt.ended(why, answer, *hunt.limit(), retested=passed)
        rejected.add(answer)


def _bracket(hunt: _Hunt) -> str:
    """Double while loads pass and halve while they fail, until one of each is known; else why there is none."""
    where = hunt.where
    load = where.nearest(where.first)
    passed = hunt.ask(load)
    while hunt.left:
        beyond = where.nearest(load * 2 if passed else load / 2)
        if beyond == load:
            if not passed:
                return f"even {load:g} fails"
            hunt.retested = sum(hunt.ask(load) for _ in range(min(RETESTS, hunt.left)))
            hunt.edge = load if hunt.retested >= RETESTS_PASSED else None
            return f"the largest load that may be asked, {load:g}, {'passes' if hunt.edge else 'did not pass again'}"
        load = beyond
        if hunt.ask(load) != passed:
            return ""
    return f"{hunt.budget} runs were not enough"


class _Hunt:
    """The probes so far and what they say."""

    def __init__(self, probe: Probe, where: Range, seed: int, budget: int) -> None:
        self.where, self.budget = where, budget
        self.trials: list[Trial] = []
        self.edge: float | None = None
        self.retested = 0
        self._probe, self._seed = probe, seed

    @property
    def left(self) -> int:
        return self.budget - len(self.trials)

    def ask(self, load: float) -> bool:
        seed = self._seed + len(self.trials)
        self.trials.append(Trial(load, seed, self._probe(load, seed)))
        return self.trials[-1].passed

    def limit(self) -> tuple[float, float]:
        """Both ends of the interval of the limit."""
        low, high = _quantiles(*self._posterior(), ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
        return low, high

    def telling(self) -> float:
        """The load of which a run says most about the limit: after it the entropy is expected to be least."""
        logs, weight = self._posterior()
        candidates = [self.where.nearest(load) for load in _quantiles(logs, weight, CANDIDATES)]

        def expected(load: float) -> float:
            chance = _chance(load, logs)
            after = [weight * chance, weight * (1 - chance)]
            return sum(float(part.sum()) * _entropy(part.sum(axis=0)) for part in after)

        return min(dict.fromkeys(candidates), key=expected)

    def _posterior(self) -> tuple[Floats, Floats]:
        """The logarithms of possible limits, and the weight of each (columns) with each steepness (rows); 1 in all."""
        import numpy as np

        least = min(trial.load for trial in self.trials) / 2
        most = max(trial.load for trial in self.trials) * 2
        logs = np.linspace(math.log(least), math.log(most), _GRID)
        total = np.zeros((len(STEEPNESS), _GRID))
        for trial in self.trials:
            chance = _chance(trial.load, logs)
            total += np.log(chance if trial.passed else 1 - chance)
        weight = np.exp(total - total.max())
        return logs, weight / weight.sum()

    def ended(self, why: str, answer: float | None, low: float | None, high: float | None, retested: int = 0) -> Limit:
        return Limit(answer, low, high, retested, why, tuple(_warnings(self.trials, low, high)), tuple(self.trials))


def _chance(load: float, logs: Floats) -> Floats:
    """To pass at this load with each steepness (rows) and each limit, by its logarithm (columns)."""
    import numpy as np

    odds = np.clip((math.log(load) - logs[None, :]) / np.array(STEEPNESS)[:, None], -500, 500)
    chance: Floats = LAPSES / 2 + (1 - LAPSES) / (1 + np.exp(odds))
    return chance


def _quantiles(logs: Floats, weight: Floats, shares: Sequence[float]) -> list[float]:
    """Of the limit, whatever the steepness."""
    import numpy as np

    reached = np.cumsum(weight.sum(axis=0))
    return [float(np.exp(np.interp(share, reached / reached[-1], logs))) for share in shares]


def _entropy(weight: Floats) -> float:
    import numpy as np

    share = weight / weight.sum()
    return float(-(share * np.log(np.maximum(share, 1e-300))).sum())


def _warnings(trials: Sequence[Trial], low: float | None, high: float | None) -> list[str]:
    """A load that mostly fails below one that mostly passes, not both within the interval."""
    loads = sorted({trial.load for trial in trials})
    passed = {load: sum(trial.passed for trial in trials if trial.load == load) for load in loads}
    asked = {load: sum(trial.load == load for trial in trials) for load in loads}
    failing = [load for load in loads if 2 * passed[load] < asked[load]]
    passing = [load for load in loads if 2 * passed[load] > asked[load]]
    pairs = [
        (bad, good)
        for bad in failing
        for good in passing
        if bad < good and not (low is not None and high is not None and low <= bad and good <= high)
    ]
    if not pairs:
        return []
    bad, good = pairs[0]
    told = (f"{bad:g} ({passed[bad]} of {asked[bad]} passed)", f"{good:g} ({passed[good]} of {asked[good]})")
    return [f"not monotone: it fails at {told[0]} but passes at {told[1]}, so there may be no one limit"]
