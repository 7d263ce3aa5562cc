"""A sequence is preempted at every length from 1 to past the end of its third block, one run for each, and ends with
the tokens of one that never was: in the middle of its answer, of its prompt, and right behind a prompt of that
length."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest
from fakes import Pool, answer, asked_in_every_step, make_pool, request, serve_on
from fakes_device import answer as answer_on_device
from tiny_models import VOCAB, Expected, Pair, departures, generate, tiny_pair

from kvbench.contiguous.slots import POLICIES
from kvbench.engine.scheduler import Limits
from kvbench.engine.types import SAMPLE, Sequence, Usage
from kvbench.metrics.memory import split
from kvbench.metrics.records import FINISHED, Run
from kvbench.workloads.load import ClosedLoop

LATEST = 1
"""The request that is preempted; request 0, admitted before it, runs along."""

MODES = ("in its answer", "in its prompt", "behind its prompt")


def refused_at(pool: Pool, length: int, latest: int = LATEST) -> Pool:
    """`pool`, but the latest sequence is refused more rows the one time when exactly `length` of its tokens are
    computed."""
    reserve = asked_in_every_step(pool).reserve

    def once(sequence: Sequence, rows: int) -> bool:
        meant = sequence.id == latest and sequence.computed == length and not sequence.preemptions
        return not meant and reserve(sequence, rows)

    pool.reserve = once  # type: ignore[method-assign]
    return pool


def assert_preempted_at(run: Run, length: int) -> None:
    """Once, with that many rows filled; everybody ends all the same."""
    assert [one.status for one in run.requests] == [FINISHED] * 2
    assert [one.preemptions for one in run.requests] == [0, 1]
    first = min((hold for hold in run.holds if hold.request == LATEST), key=lambda hold: hold.first_step)
    assert first.final_tokens == length
    split(run)


CACHES = ("paged", "cached", "swapping", "cached_swapping")
PAGED = [f"{cache}-{size}" for cache in CACHES for size in (1, 3, 4, 16)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [*PAGED, *POLICIES, *(f"{policy} static" for policy in POLICIES)])
def test_at_every_length_on_simulated_rows(kind: str, mode: str) -> None:  # nano-vllm PR#211, vllm#16832
    """What is resumed begins at row 0, with a prefix cache behind the full blocks it had, swapped where it was."""
    policy, _, static = kind.partition(" ")
    size = int(kind.split("-")[1]) if kind in PAGED else 4
    edge = 3 * size + 1
    for length in range(1, edge + 1):
        prompt = {"in its answer": 1, "in its prompt": edge + 1, "behind its prompt": length}[mode]
        requests = [request(0, 2, edge + 8), request(LATEST, prompt, edge + 4)]
        limits = Limits(3 * edge + 12, 2 if mode == "in its prompt" else 3 * edge)  # 2: one token each
        pool = refused_at(make_pool(policy, 8 * edge + 256, limits.max_model_len), length)
        run, batches, _ = serve_on(pool, ClosedLoop(requests, 2), limits, static=bool(static))
        assert_preempted_at(run, length)
        assert [one.output_token_ids for one in run.requests] == [answer(one) for one in requests]
        resumed = next(piece for batch in batches for piece in batch if (piece.id, piece.stay) == (LATEST, 1))
        swaps = "swapping" in kind
        assert resumed.start == (length if swaps else length // size * size if kind.startswith("cached") else 0)
        assert [one.swaps for one in run.requests] == [0, int(swaps)]
        usage = pool.usage()
        assert (usage.filled, usage.held, usage.free) == (0, 0, pool.pool_tokens)


@pytest.mark.parametrize("kind", [f"{cache}-4" for cache in CACHES])
@pytest.mark.parametrize("prompt", [7, 8])
def test_a_sample_at_every_length_from_its_fork_on(kind: str, prompt: int) -> None:
    """The last of three samples makes room when so many of its rows are filled, the shared prompt among them. What it
    gave up it finds in part with the others, for they hold the same prompt."""
    for length in range(prompt, 3 * 4 + 2):
        asked = request(0, prompt, 16, n=3)
        pool = refused_at(make_pool(kind, 160, 40), length, asked.id + 2 * SAMPLE)
        run, batches, _ = serve_on(pool, ClosedLoop([asked], 1), Limits(40))
        assert [one.preemptions for one in run.requests] == [0, 0, 1]
        assert [one.output_token_ids for one in run.requests] == [answer(asked, sample=sample) for sample in range(3)]
        resumed = next(piece for batch in batches for piece in batch if piece.stay == 1)
        assert resumed.start >= (length if "swapping" in kind else prompt // 4 * 4)
        split(run)
        assert replace(pool.usage(), cached=0) == Usage(0, 0, 160)


NEW_TOKENS = 16
PROMPTS = {"in its answer": 1, "in its prompt": 15}


@functools.cache
def case(mode: str) -> tuple[Pair, list[list[int]], Expected]:
    """Layers with windows and without, two prompts, and what `generate` answers."""
    pair, draw = tiny_pair("qwen3"), random.Random(3)
    prompts = [[draw.randrange(VOCAB) for _ in range(length)] for length in (2, PROMPTS[mode])]
    return pair, prompts, generate(pair.reference, prompts, NEW_TOKENS)


@pytest.mark.parametrize("mode", PROMPTS)
@pytest.mark.parametrize("kind", ["max", "paged-4", "cached-4"])
def test_at_every_length_on_a_real_model(kind: str, mode: str) -> None:  # vllm#16832
    pair, prompts, expected = case(mode)
    limits = Limits(40, 2 if mode == "in its prompt" else 40)
    for length in range(1, 3 * 4 + 2):
        pool = refused_at(make_pool(kind, 100, limits.max_model_len), length)
        run = answer_on_device(pair.model, pool, prompts, new_tokens=NEW_TOKENS, limits=limits)
        assert_preempted_at(run, length)
        assert departures(run, expected) == [], f"preempted at {length}"
