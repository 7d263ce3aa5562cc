"""Distributions of lengths: means, spreads and caps against theory, and words that mean nothing.

A Kolmogorov-Smirnov distance of n draws is above 1.95 / sqrt(n) once in a thousand; against whole numbers less often.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from kvbench.errors import KvbenchError
from kvbench.workloads.lengths import Clipped, Distribution, Lengths, Zipf, distribution
from kvbench.workloads.streams import stream

COUNT = 10_000
WORDS = (
    *("fixed", "uniform:ratio=0.5", "uniform:cv=0.3", "normal:cv=0.3", "normal:cv=1", "lognormal:cv=1"),
    *("lognormal:p99=2000", "lognormal:p50=300", "lognormal:cv=1:min=10:max=800", "zipf:alpha=1.2", "zipf:alpha=0.5"),
)


def shares(found: Distribution, word: str) -> dict[int, float]:
    """The probability of each length by the definition in words, worked out without the code under test."""
    tokens = range(found.shortest, found.longest + 1)
    if isinstance(found, Lengths):
        return {k: 1 / len(tokens) for k in tokens}
    if isinstance(found, Zipf):
        total = math.fsum(k**-found.alpha for k in tokens)
        return {k: k**-found.alpha / total for k in tokens}
    assert isinstance(found, Clipped)
    bell = NormalDist(found.mu, found.sigma)
    to = [bell.cdf(math.log(k + 0.5) if word.startswith("log") else k + 0.5) for k in tokens]
    return dict(zip(tokens, np.diff([0.0, *to[:-1], 1.0]).tolist(), strict=True))


@pytest.mark.parametrize("word", WORDS)
def test_ten_thousand_lengths_follow_their_distribution(word: str) -> None:
    found = distribution(word, 512, "--input-dist")
    drawn = found.draw(COUNT, stream(0, "lengths.input"))
    wanted = shares(found, word)
    assert set(drawn) <= set(wanted)
    counts = np.bincount(drawn, minlength=found.longest + 1)[found.shortest :]
    distance = np.abs(np.cumsum(counts) / COUNT - np.cumsum(list(wanted.values()))).max()
    assert distance < 1.95 / math.sqrt(COUNT)
    assert found.average == pytest.approx(math.fsum(k * share for k, share in wanted.items()))
    assert found.draw(30, stream(7, "x"))[:9] == found.draw(9, stream(7, "x"))


@pytest.mark.parametrize("mean", [1, 2, 8192])
@pytest.mark.parametrize("word", [None, "fixed", "FIXED"])
def test_a_fixed_length_is_exact(word: str | None, mean: int) -> None:  # vllm#24591
    found = distribution(word, mean, "--output-dist")
    assert (found.shortest, found.longest, found.average) == (mean, mean, mean)
    assert found.draw(5, stream(0, "lengths")) == [mean] * 5


def test_spreads_are_those_that_were_asked() -> None:
    """Mean and CV of wide distributions whose caps are far away, by the definitions of the parameters."""
    uniform, normal, lognormal = (
        np.array(distribution(word, 10_000, "--input-dist").draw(200_000, stream(1, "lengths")))
        for word in ("uniform:cv=0.3", "normal:cv=0.2", "lognormal:cv=0.5:max=1000000")
    )
    for drawn, cv in ((uniform, 0.3), (normal, 0.2), (lognormal, 0.5)):
        assert drawn.mean() == pytest.approx(10_000, rel=5 * cv / math.sqrt(200_000))
        assert drawn.std() / drawn.mean() == pytest.approx(cv, rel=0.02)
    p90 = distribution("lognormal:p90=2000:max=1000000", 1_000, "--input-dist")
    drawn = np.array(p90.draw(200_000, stream(1, "lengths")))
    assert (drawn <= 2_000).mean() == pytest.approx(0.9, abs=5 * math.sqrt(0.09 / 200_000))
    assert drawn.mean() == pytest.approx(1_000, rel=0.02)


def test_one_in_a_thousand_is_clipped_unless_said_otherwise() -> None:
    """The cap is the 99.9th percentile: mean x (1 + cv z), and for a lognormal mean x e ** (sigma z - sigma² / 2)."""
    z = 3.0902323
    assert distribution("normal:cv=0.3", 1_000, "--input-dist").longest == round(1_000 * (1 + 0.3 * z))
    sigma = math.sqrt(math.log(2))
    assert distribution("lognormal:cv=1", 1_000, "--input-dist").longest == round(
        1_000 * math.exp(sigma * z - sigma * sigma / 2)
    )
    told = distribution("lognormal:cv=1:min=100:max=2000", 1_000, "--input-dist")
    assert (told.shortest, told.longest) == (100, 2_000) and told.average < 1_000
    zipf = distribution("zipf:alpha=1", 100, "--input-dist")
    assert abs(zipf.average - 100) < 0.5 and zipf.shortest == 1


BAD = [
    ("unifrom", "did you mean uniform"),
    ("", "is not one of fixed"),
    ("fixed:cv=1", "takes nothing more"),
    ("normal", "normal:cv="),
    ("normal:cvv=1", "did you mean cv"),
    ("normal:cv", "key=value"),
    ("normal:cv=", "key=value"),
    ("normal:cv=x", "must be a number"),
    ("normal:cv=nan", "above 0"),
    ("normal:cv=inf", "above 0"),
    ("normal:cv=0", "above 0"),
    ("normal:cv=-1", "above 0"),
    ("normal:cv=1:cv=2", "twice"),
    ("normal:cv=0.1:min=1.5", "whole tokens"),
    ("normal:cv=5", "clipping would leave a mean of"),
    ("normal:cv=1000000", "spreads beyond"),
    ("uniform:ratio=1", "below 1"),
    ("uniform:cv=0.6", "below 0.577"),
    ("uniform:cv=0.1:ratio=0.1", "exactly one"),
    ("lognormal:cv=1:p99=900", "exactly one"),
    ("lognormal:p99=100", "above the mean and at most 7,663"),
    ("lognormal:p99=9000", "above the mean and at most 7,663"),
    ("lognormal:p50=600", "below the mean"),
    ("lognormal:cv=1:max=10", "between min 1 and max 10"),
    ("lognormal:cv=1:min=600", "between min 600"),
    ("lognormal:cv=1000000", "clipping would leave a mean of"),
    ("zipf", "zipf:alpha="),
    ("zipf:alpha=3", "lower alpha"),
]


@pytest.mark.parametrize(("word", "says"), BAD)
def test_a_distribution_that_cannot_be_is_one_line(word: str, says: str) -> None:
    with pytest.raises(KvbenchError) as caught:
        distribution(word or " ", 512, "--input-dist")
    assert str(caught.value).startswith("--input-dist") and says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mean_below_one_token_is_refused() -> None:
    with pytest.raises(KvbenchError, match="--input-len"):
        distribution("normal:cv=1", 0, "--input-dist")
