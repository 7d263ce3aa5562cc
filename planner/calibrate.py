"""Fits the step-time model to measured steps: what a machine of one's own takes for each unit of work.

A step's time is linear in what it does once it is known which bound holds: weights streamed or tokens multiplied,
context read or pairs attended to. So assignment and non-negative least squares alternate, on rows divided by the step's
fitted time (relative errors). Coefficients at 0, or no larger than twice their standard error, are "not identified":
the measured configurations do not tell them apart from the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.errors import KvbenchError
from kvbench.metrics.records import StepRecord

if TYPE_CHECKING:
    import numpy as np

PARAMETERS = (
    ("step_s", "each step: weights streamed, or the host"),
    ("token_s", "each token multiplied, where that takes longer than streaming"),
    ("sampled_s", "each token drawn"),
    ("context_s", "each token of context read"),
    ("pair_s", "each (query, key) pair, where that takes longer than reading"),
    ("sequence_s", "each decoding sequence"),
)
ROUNDS = 30
FEWEST_STEPS = 30
TWO_ERRORS = 2.0


@dataclass(frozen=True, slots=True)
class Observed:
    """The steps of one configuration: `works` `[5, steps]` (decodes, prefill, pairs, context, sampled), `seconds`."""

    configuration: str
    works: np.ndarray
    seconds: np.ndarray


@dataclass(frozen=True, slots=True)
class Coefficient:
    """Seconds a unit of one kind of work, with its standard error."""

    name: str
    meaning: str
    value: float
    error: float | None
    identified: bool


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fit, and how far it was off on configurations that it had not seen."""

    coefficients: tuple[Coefficient, ...]
    condition: float
    steps: int
    held_out: tuple[tuple[str, int, float, float, float], ...]
    """By configuration: steps, error of the total time, mean absolute error of a step, 90th percentile of it."""

    def seconds(self, works: np.ndarray) -> np.ndarray:
        return predict([one.value for one in self.coefficients], works)


def observe(configuration: str, steps: Sequence[StepRecord]) -> Observed:
    """Steps that computed something, in time from launch to tokens."""
    import numpy as np

    whole = [step for step in steps if step.sequences and not step.copied_tokens]
    whole = [step for step in whole if not (step.swapped_in_tokens or step.swapped_out_tokens)]
    works = [(s.decode_tokens, s.prefill_tokens, s.attended_pairs, s.context_tokens, s.sampled_tokens) for s in whole]
    seconds = np.array([step.end_s - step.start_s for step in whole])
    if (seconds <= 0).any():
        raise KvbenchError(f"{configuration} has steps that took no time; it cannot be calibrated on")
    return Observed(configuration, np.array(works, dtype=float).T.reshape(5, -1), seconds)


def calibrate(observed: Sequence[Observed]) -> Calibration:
    """Fit all configurations, and each by the others. KvbenchError where there is too little to fit to."""
    import numpy as np

    steps = sum(len(one.seconds) for one in observed)
    if steps < FEWEST_STEPS:
        raise KvbenchError(f"{steps} steps are too few to calibrate on; measure at least {FEWEST_STEPS}")
    found, errors, condition = _fit(observed)
    held_out = []
    for i, one in enumerate(observed):
        others = [*observed[:i], *observed[i + 1 :]]
        if sum(len(other.seconds) for other in others) < FEWEST_STEPS or not len(one.seconds):
            continue
        predicted = predict(_fit(others)[0], one.works)
        off = predicted / one.seconds - 1
        total = float(predicted.sum() / one.seconds.sum() - 1)
        sizes = np.abs(off)
        held_out.append((one.configuration, len(off), total, float(sizes.mean()), float(np.percentile(sizes, 90))))
    coefficients = tuple(
        Coefficient(name, meaning, float(value), error, error is not None and float(value) > TWO_ERRORS * error)
        for (name, meaning), value, error in zip(PARAMETERS, found, errors, strict=True)
    )
    return Calibration(coefficients, condition, steps, tuple(held_out))


def predict(values: Sequence[float] | np.ndarray, works: np.ndarray) -> np.ndarray:
    """Seconds of each step, `[steps]`, of works `[5, steps]`."""
    import numpy as np

    step, token, sampled, context, pair, sequence = values
    decodes, prefill, pairs, contexts, drawn = works
    matrices = np.maximum(step, token * (decodes + prefill))
    attention = np.maximum(context * contexts, pair * pairs)
    return np.asarray(matrices + attention + sampled * drawn + sequence * decodes)


def _fit(observed: Sequence[Observed]) -> tuple[np.ndarray, list[float | None], float]:
    """Coefficients, standard errors (None for one at its bound) and the condition number of the scaled design."""
    import numpy as np
    from scipy.optimize import nnls

    works = np.concatenate([one.works for one in observed], axis=1)
    seconds = np.concatenate([one.seconds for one in observed])
    tokens = works[0] + works[1]
    computing = tokens > 4 * np.median(tokens)
    attending = works[2] > 4 * works[3]
    found, by = np.zeros(len(PARAMETERS)), seconds
    for _ in range(ROUNDS):
        design = _design(works, computing, attending) / by[:, None]
        scale = np.linalg.norm(design, axis=0)
        scale[scale == 0] = 1.0
        last, found = found, nnls(design / scale, seconds / by)[0] / scale
        computing = found[1] * tokens > found[0]
        attending = found[4] * works[2] > found[3] * works[3]
        by = np.maximum(predict(found, works), seconds.min())  # by the fit: by the measured it would lean to fast steps
        if np.allclose(found, last, rtol=1e-6):
            break
    design = _design(works, computing, attending) / by[:, None]
    norms = np.linalg.norm(design, axis=0)
    best, kept = found, design / np.where(norms == 0, 1.0, norms)
    free = best > 0
    matrix = kept[:, free]
    condition = float(np.linalg.cond(matrix)) if matrix.size else math.inf
    left = (seconds - predict(best, works)) / by
    spread = float(left @ left) / max(1, len(left) - int(free.sum()))
    covariance = np.linalg.pinv(matrix.T @ matrix) * spread
    errors: list[float | None] = [None] * len(PARAMETERS)
    for place, i in enumerate(np.flatnonzero(free)):
        errors[i] = float(math.sqrt(max(0.0, covariance[place, place])) / (norms[i] or 1.0))
    return best, errors, condition


def _design(works: np.ndarray, computing: np.ndarray, attending: np.ndarray) -> np.ndarray:
    """What each coefficient is multiplied by, `[steps, 6]`, where it is known which bounds hold."""
    import numpy as np

    decodes, prefill, pairs, contexts, drawn = works
    return np.stack(
        [
            np.where(computing, 0.0, 1.0),
            np.where(computing, decodes + prefill, 0.0),
            drawn,
            np.where(attending, 0.0, contexts),
            np.where(attending, pairs, 0.0),
            decodes,
        ],
        axis=1,
    )


@dataclass(frozen=True, slots=True)
class Rates:
    """What this machine reaches in the two things that bound a step."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float


def measure_rates(device: str, dtype: str) -> Rates:
    """Median of several copies of 256 MiB (read and written: twice the bytes) and products of two 2048 x 2048."""
    import statistics
    import time

    import torch

    kind = getattr(torch, dtype)
    place = torch.device(device)

    def wait() -> None:
        if place.type == "cuda":
            torch.cuda.synchronize(place)

    def seconds(work: object) -> float:
        assert callable(work)
        taken = []
        for i in range(9):
            wait()
            start = time.perf_counter()
            work()
            wait()
            if i >= 2:  # the first ones warm up
                taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    source = torch.ones(1 << 28, dtype=torch.uint8, device=place)
    target = torch.empty_like(source)
    side = 2048
    left = torch.ones(side, side, dtype=kind, device=place)
    copied = 2 * source.numel() / seconds(lambda: target.copy_(source))
    return Rates(copied, 2 * side**3 / seconds(lambda: left @ left))
