"""How the next token is chosen: against distributions counted out in float64, against transformers' own penalty, and
the same in any batch and after any preemption."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Listing
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes_device import answer, arena_for, cache_for, interrupted
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from tiny_models import VOCAB, departures, generate, tiny_pair

from kvbench.contiguous.slots import Slots
from kvbench.engine.runner import ModelRunner
from kvbench.engine.sampling import next_tokens
from kvbench.engine.scheduler import Limits
from kvbench.engine.types import GREEDY, Batch, Chunk, Request, Sampling, Sequence
from kvbench.errors import CellError, KvbenchError
from kvbench.paged.blocks import BlockPool

LOGITS = (2.0, -1.0, 0.5, 1.5, -3.0, 0.0, 1.0, -0.5, 0.25, 1.75, -2.0, 0.75)
SURE = 1e-6
"""How often a right sampler would fail a chi-square test, were the seeds drawn anew."""


def sampled(sampling: Sampling, tokens: Iterable[int] = (0,)) -> Sequence:
    """A sequence that knows `tokens`."""
    return Sequence.of(Request(0, tuple(tokens), 8, sampling=sampling))


def distribution(logits: Listing[float], sampling: Sampling, seen: Iterable[int] = ()) -> list[float]:
    """The probability of every token, by definition and one by one."""
    scores = list(logits)
    for token in set(seen):
        penalty = sampling.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    weights = [math.exp(score / sampling.temperature) for score in scores]
    total, reached = sum(weights), 0.0
    kept = [0.0] * len(weights)
    for token in sorted(range(len(weights)), key=lambda token: (-weights[token], token)):
        kept[token] = weights[token]
        reached += weights[token] / total
        if reached >= sampling.top_p:
            break
    return [weight / sum(kept) for weight in kept]


def surprise(counts: Counter[Any], expected: dict[Any, float]) -> float:
    """How often a right sampler departs from what is expected at least as far: Pearson's test, rare outcomes pooled."""
    assert not set(counts) - {outcome for outcome, share in expected.items() if share}, "an impossible outcome"
    draws = sum(counts.values())
    bins = [(counts[outcome], share * draws) for outcome, share in expected.items() if share * draws >= 10]
    rare = [(counts[outcome], share * draws) for outcome, share in expected.items() if 0 < share * draws < 10]
    if rare:
        bins.append((sum(count for count, _ in rare), sum(share for _, share in rare)))
    statistic = sum((count - share) ** 2 / share for count, share in bins)
    return float(chi2.sf(statistic, len(bins) - 1))


def draw(sequences: list[Sequence], logits: Listing[float] = LOGITS) -> list[int]:
    found: list[int] = next_tokens(torch.tensor(logits).repeat(len(sequences), 1), sequences).tolist()
    return found


ASKED = {
    "plain": Sampling(1.0),
    "cool": Sampling(0.3),
    "hot": Sampling(4.0),
    "nucleus": Sampling(1.0, top_p=0.7),
    "narrow": Sampling(1.5, top_p=0.3),
    "penalty": Sampling(1.0, repetition_penalty=1.8),
    "reward": Sampling(0.7, repetition_penalty=0.6),
    "all": Sampling(0.8, top_p=0.9, repetition_penalty=1.3),
}


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("varied", ["seed", "position"])
def test_draws_have_the_distribution_asked_for(name: str, varied: str) -> None:
    seen, count = (3, 4, 9, 3), 8000
    if varied == "seed":
        sequences = [sampled(replace(ASKED[name], seed=seed), seen) for seed in range(count)]
    else:
        count = 1500  # one request, whose text is ever longer
        sequences = [sampled(replace(ASKED[name], seed=7), seen + (3,) * more) for more in range(count)]
    expected = distribution(LOGITS, ASKED[name], seen)
    assert surprise(Counter(draw(sequences)), dict(enumerate(expected))) > SURE


def test_neighbours_are_independent() -> None:
    """In seed, in position and in token: pairs of draws are distributed as if each were alone."""
    logits, sampling = (0.5, 0.0, -0.5), Sampling(1.0)
    single = distribution(logits, sampling)
    pairs = {(a, b): single[a] * single[b] for a in range(3) for b in range(3)}
    by_seed = draw([sampled(replace(sampling, seed=seed), (0,)) for seed in range(9000)], logits)
    assert surprise(Counter(zip(by_seed[::2], by_seed[1::2], strict=True)), pairs) > SURE
    next_seed = draw([sampled(replace(sampling, seed=seed - 1), (0, 0)) for seed in range(1, 9001)], logits)
    assert surprise(Counter(zip(by_seed[1:], next_seed, strict=False)), pairs) > SURE
    by_position = draw([sampled(replace(sampling, seed=3), (0,) * length) for length in range(1, 1801)], logits)
    assert surprise(Counter(zip(by_position[::2], by_position[1::2], strict=True)), pairs) > SURE


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=8, unique=True).flatmap(
        lambda ranks: st.tuples(st.just(ranks), st.integers(0, len(ranks) - 1))
    )
)
def test_the_nucleus_is_the_smallest_that_reaches_top_p(drawn: tuple[list[int], int]) -> None:
    """Token t has the weight 2^-rank; top-p lies just below or above what the first tokens sum up to."""
    ranks, cut = drawn
    weights = [2.0**-rank for rank in ranks]
    ordered = sorted(weights, reverse=True)
    reached = sum(ordered[: cut + 1]) / sum(weights)
    for top_p, size in ((reached * (1 - 1e-5), cut + 1), (min(1.0, reached * (1 + 1e-5)), min(cut + 2, len(ranks)))):
        kept = {weights.index(weight) for weight in ordered[:size]}
        found = draw(
            [sampled(Sampling(1.0, top_p, seed=seed)) for seed in range(300)], [math.log(one) for one in weights]
        )
        assert set(found) <= kept
        likely = {token for token in kept if weights[token] / sum(ordered[:size]) > 0.1}  # missed: 300 x, 2e-14
        assert likely <= set(found)


def test_of_equally_likely_tokens_the_lower_ones_stay() -> None:
    found = draw([sampled(Sampling(1.0, 0.0099, seed=seed)) for seed in range(200)], [0.0] * 1000)
    assert set(found) == set(range(10))


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(0.0, top_p=0.2), Sampling(1e-30), Sampling(5e-324)])
def test_no_temperature_is_greedy_whatever_top_p_says(sampling: Sampling) -> None:
    assert draw([sampled(replace(sampling, seed=seed)) for seed in range(50)]) == [0] * 50


def test_the_highest_temperature_is_a_fair_die() -> None:
    found = Counter(draw([sampled(Sampling(1e300, seed=seed)) for seed in range(6000)]))
    assert surprise(found, dict.fromkeys(range(len(LOGITS)), 1 / len(LOGITS))) > SURE


def test_a_row_depends_on_no_other_row() -> None:
    """Greedy rows and any others, alone and together in any order."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(90, 50, generator=generator)
    sequences = [
        sampled(replace(sampling, seed=row), (row % 50, 3))
        for row, sampling in zip(range(90), [GREEDY, *ASKED.values()] * 10, strict=True)
    ]
    alone = [int(next_tokens(logits[row : row + 1], [one])) for row, one in enumerate(sequences)]
    order = random.Random(2).sample(range(90), 90)
    assert next_tokens(logits, sequences).tolist() == alone
    assert next_tokens(logits[order], [sequences[row] for row in order]).tolist() == [alone[row] for row in order]
    assert alone[::9] == logits.argmax(-1).tolist()[::9]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_are_left_as_they_are(dtype: torch.dtype) -> None:
    logits = torch.tensor([LOGITS]).to(dtype)
    before = logits.clone()
    next_tokens(logits, [sampled(Sampling(0.8, 0.9, 1.5), (0, 3))])
    assert torch.equal(logits, before)


PAIR = tiny_pair("llama")
LENGTHS = (3, 40, 11, 26, 17, 5, 1, 33)
NEW_TOKENS = 24
PROMPTS = [[random.Random(number).randrange(VOCAB) for _ in range(LENGTHS[number % 8])] for number in range(32)]
LONGEST = max(LENGTHS) + NEW_TOKENS
EVERYTHING = Sampling(temperature=2.5, top_p=0.95, repetition_penalty=1.2, seed=100)


def tokens(allocator: Slots | BlockPool, sequences: int, **how: Any) -> list[Listing[int] | None]:
    limits = Limits(LONGEST, 64, sequences)
    run = answer(PAIR.model, allocator, PROMPTS, new_tokens=NEW_TOKENS, limits=limits, **how)
    most = max(step.sequences for step in run.steps)
    assert most == sequences, "the batch is not of the size compared"
    return [request.output_token_ids for request in run.requests]


@pytest.mark.parametrize("backend", ["contiguous", "paged"])
def test_a_sample_is_the_same_alone_and_among_32(backend: str) -> None:
    def fresh() -> Slots | BlockPool:
        return Slots(32 * LONGEST, LONGEST) if backend == "contiguous" else BlockPool(32 * 80, 16)

    alone = tokens(fresh(), 1, sampling=EVERYTHING)
    assert tokens(fresh(), 32, sampling=EVERYTHING) == alone
    assert len({tuple(one or ()) for one in alone}) == 32
    assert tokens(fresh(), 32, sampling=replace(EVERYTHING, seed=900)) != alone


@pytest.mark.parametrize("sampling", [EVERYTHING, Sampling(repetition_penalty=1.4)])
@pytest.mark.parametrize("backend", ["contiguous", "paged", "paged with a prefix cache"])
def test_a_preemption_changes_no_sample(backend: str, sampling: Sampling) -> None:  # vllm PR#5349
    limits, prompts = Limits(LONGEST, 16, 4), PROMPTS[:8]
    calm = answer(PAIR.model, Slots(8 * LONGEST, LONGEST), prompts, new_tokens=NEW_TOKENS, limits=limits,
                  sampling=sampling)  # fmt: skip
    pool: Slots | BlockPool = BlockPool(90, 3, prefix_caching=backend.endswith("cache"))
    if backend == "contiguous":
        pool = interrupted(Slots(4 * LONGEST, LONGEST), lambda asked: asked % 37 == 0)
    rough = answer(PAIR.model, pool, prompts, new_tokens=NEW_TOKENS, limits=limits, sampling=sampling)
    assert not any(one.preemptions for one in calm.requests) and sum(one.preemptions for one in rough.requests) >= 5
    assert [one.output_token_ids for one in rough.requests] == [one.output_token_ids for one in calm.requests]


@pytest.mark.parametrize("penalty", [0.8, 1.1, 1.7])
def test_greedy_with_a_penalty_is_what_transformers_answers(penalty: float) -> None:
    plain = [generate(PAIR.reference, [prompt], NEW_TOKENS) for prompt in PROMPTS[:8]]
    expected = [generate(PAIR.reference, [prompt], NEW_TOKENS, repetition_penalty=penalty) for prompt in PROMPTS[:8]]
    assert [one.tokens for one in expected] != [one.tokens for one in plain]
    for prompt, one in zip(PROMPTS[:8], expected, strict=True):
        run = answer(PAIR.model, BlockPool(96, 3), [prompt], new_tokens=NEW_TOKENS, limits=Limits(LONGEST, 16),
                     sampling=Sampling(repetition_penalty=penalty))  # fmt: skip
        assert departures(run, one) == []


@pytest.mark.parametrize("sampling", [GREEDY, *ASKED.values()])
@pytest.mark.parametrize("wrong", ["nan", "+inf", "all -inf"])
def test_logits_that_are_no_numbers_raise(  # vllm#14126
    wrong: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bad number in one row of several ends the cell; a token must never come of it."""

    def forward(ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, cache: object) -> torch.Tensor:
        logits = torch.tensor([LOGITS, LOGITS, LOGITS], dtype=torch.float16)
        if wrong == "all -inf":
            logits[1] = -math.inf
        else:
            logits[1, 5] = float(wrong)
        return logits

    pool = BlockPool(64, 4)
    sequences = [Sequence.of(Request(number, (1, 2), 8, sampling=sampling)) for number in range(3)]
    assert all(pool.reserve(sequence, 2) for sequence in sequences)
    monkeypatch.setattr(PAIR.model, "forward", forward)
    runner = ModelRunner(PAIR.model, cache_for(pool, arena_for(pool, PAIR.model.kv)))
    batch = Batch(4, tuple(Chunk(sequence, 0, 2, samples=True) for sequence in sequences))
    with pytest.raises(CellError, match=r"^step 4 gave logits that are NaN or infinite$"):
        runner.collect(runner.launch(batch, 0.0))


def test_a_forbidden_token_is_never_drawn_and_no_fault() -> None:
    logits = [-math.inf, 1.0, 2.0]
    found = draw([sampled(Sampling(3.0, 0.9, 1.5, seed=seed), (0, 1)) for seed in range(300)], logits)
    assert set(found) == {1, 2}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({"temperature": value}, "temperature") for value in (math.nan, math.inf, -0.5)),
        *(({"top_p": value}, "top-p") for value in (math.nan, 0.0, -0.1, 1.1, math.inf)),
        *(({"repetition_penalty": value}, "repetition penalty") for value in (math.nan, 0.0, -1.0, 101.0, math.inf)),
        *(({"seed": value}, "seed") for value in (-1, 2**63)),
    ],
)
def test_what_cannot_be_asked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(KvbenchError, match=message) as refused:
        Sampling(**fields)
    assert "\n" not in str(refused.value)
