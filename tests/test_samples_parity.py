"""Samples that share a prompt, copies on write, rows put aside and aborts change no token of a real model, over memory
that is NaN until somebody writes it."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest
import torch
from fakes_device import answer, arena_for, cache_for
from hypothesis import given, settings
from hypothesis import strategies as st
from test_parity import Case, case
from tiny_models import VOCAB, Expected, departures, generate, tiny_pair

from kvbench.contiguous.slots import Slots
from kvbench.engine.arena import Arena, KVShape
from kvbench.engine.clock import WallClock
from kvbench.engine.engine import Engine, serve
from kvbench.engine.model import FAMILIES
from kvbench.engine.runner import ModelRunner
from kvbench.engine.scheduler import Limits, Scheduler
from kvbench.engine.types import COPY, IN, OUT, Move, Request, Sampling
from kvbench.metrics.memory import split
from kvbench.metrics.records import ABORTED, FINISHED, Run
from kvbench.paged.blocks import BlockPool
from kvbench.workloads.load import ClosedLoop

BLOCK = 4
NEW_TOKENS = 24
LIMITS = Limits(max_model_len=80, max_batched_tokens=24, max_sequences=8)


def repeated(expected: Expected, samples: int) -> Expected:
    """The same answers, each expected of so many samples."""
    return Expected(
        [tokens for tokens in expected.tokens for _ in range(samples)],
        [margins for margins in expected.margins for _ in range(samples)],
    )


def moved(run: Run) -> tuple[int, int, int]:
    """Rows copied on write, put aside and brought back over a run."""
    steps = run.steps
    return (
        sum(step.copied_tokens for step in steps),
        sum(step.swapped_out_tokens for step in steps),
        sum(step.swapped_in_tokens for step in steps),
    )


@functools.cache
def short(family: str) -> tuple[list[list[int]], Expected]:
    """Prompts of a block + 3, of two whole blocks and of several, and their answers."""
    this: Case = case(family)
    prompts = [this.prompts[1][: BLOCK + 3], this.prompts[3][: 2 * BLOCK], this.prompts[4]]
    return prompts, generate(this.pair.reference, prompts, NEW_TOKENS)


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_samples_and_swaps_give_the_tokens_of_generate(family: str, prefix_caching: bool) -> None:
    """Greedy samples all answer what `generate` does, whatever was forked, copied, put aside and brought back."""
    prompts, expected = short(family)
    pool = BlockPool(25 * BLOCK, BLOCK, prefix_caching=prefix_caching, swap_tokens=60)
    run = answer(case(family).pair.model, pool, prompts, new_tokens=NEW_TOKENS, limits=LIMITS, samples=2, host_rows=60)
    assert departures(run, repeated(expected, 2)) == []
    copied, out, back = moved(run)
    assert copied > 0 and sum(one.swaps for one in run.requests) > 0, "the run was not as eventful as it should be"
    assert 0 < back <= out
    assert any(step.logical_tokens > step.used_tokens for step in run.steps)
    assert (split(run).pool == 100).all()


@pytest.mark.parametrize("backend", ["contiguous", "paged"])
@pytest.mark.parametrize("length", [BLOCK + 3, 2 * BLOCK])
def test_four_samples_are_those_of_four_requests_alone(backend: str, length: int) -> None:  # vllm PR#10980
    """Each sample draws what a request with its seed draws alone: sharing a prompt changes nothing."""
    pair, sampling = tiny_pair("llama"), Sampling(2.5, 0.95, 1.2, seed=100)
    prompts = [[random.Random(number).randrange(VOCAB) for _ in range(length)] for number in range(3)]
    pool = BlockPool(400, BLOCK) if backend == "paged" else Slots(12 * 80, 80)
    run = answer(pair.model, pool, prompts, new_tokens=NEW_TOKENS, limits=LIMITS, sampling=sampling, samples=4)
    together = [one.output_token_ids for one in run.requests]
    alone = []
    for number, prompt in enumerate(prompts):
        asked = Request(number, tuple(prompt), NEW_TOKENS, sampling=replace(sampling, seed=100 + number), n=4)
        for sample in range(4):
            single = answer(pair.model, BlockPool(80, BLOCK), [prompt], new_tokens=NEW_TOKENS, limits=LIMITS,
                            sampling=asked.sampling_of(sample))  # fmt: skip
            alone.append(single.requests[0].output_token_ids)
    assert together == alone
    assert len({tuple(one or ()) for one in together}) == 12
    assert (moved(run)[0] > 0) == (backend == "paged" and length % BLOCK > 0)


def test_what_others_abort_changes_no_token() -> None:
    """Of five requests of two samples, two are given up in the middle, once forked, while others are put aside."""
    prompts, expected = short("qwen3")
    prompts, wanted = [*prompts, prompts[2], prompts[1]], (0, 1, 2)
    requests = [
        Request(number, tuple(prompt), NEW_TOKENS, output_tokens=NEW_TOKENS, n=2)
        for number, prompt in enumerate(prompts)
    ]
    model = case("qwen3").pair.model
    pool = BlockPool(25 * BLOCK, BLOCK, swap_tokens=60)
    runner = ModelRunner(model, cache_for(pool, arena_for(pool, model.kv, model.dtype, host_rows=60)))
    engine = Engine(pool, runner, LIMITS, save_tokens=True, scheduler=Scheduler(pool, LIMITS, pool))

    def impatient(engine: Engine, _: float) -> None:
        for number, step in ((3, 9), (4, 16)):
            if len(engine.steps) == step:
                assert engine.abort(number)

    run = serve(ClosedLoop(requests, 5), engine, WallClock(), impatient)
    statuses = [one.status for one in run.requests]
    assert statuses == [FINISHED] * 6 + [ABORTED] * 4
    run.requests = [one for one in run.requests if one.request in wanted]
    assert departures(run, repeated(expected, 2)) == []
    assert moved(run)[1] > 0
    assert pool.usage().held == pool.usage().swapped == 0


class Forgetful(Arena):
    """Leaves one way of moving undone."""

    way = ""

    def move(self, moves: tuple[Move, ...]) -> None:  # type: ignore[override]
        super().move(tuple(move for move in moves if move.way != self.way))


@pytest.mark.parametrize("way", [COPY, OUT, IN])
def test_a_move_that_is_not_made_is_noticed(way: str) -> None:
    prompts, expected = short("llama")
    model = case("llama").pair.model
    pool = BlockPool(25 * BLOCK, BLOCK, swap_tokens=60)
    arena = arena_for(pool, model.kv, fill=0.0, host_rows=60, kind=type("", (Forgetful,), {"way": way}))
    cache = cache_for(pool, arena)
    run = answer(model, pool, prompts, new_tokens=NEW_TOKENS, limits=LIMITS, samples=2, cache=cache)
    assert departures(run, repeated(expected, 2))


@settings(max_examples=60)
@given(st.data())
def test_moves_are_those_of_a_list(data: st.DataObject) -> None:
    """Out, within and in: each kind reads what was there before any of its kind is written."""
    arena = Arena(KVShape(2, 1, 4), 24, torch.float32, torch.device("cpu"), host_rows=12)
    for layer in range(2):
        arena.k[layer].copy_(torch.arange(24.0).add(100 * layer).view(24, 1, 1).expand(24, 1, 4))
        arena.v[layer].copy_(-arena.k[layer])
    rows, host = list(range(24)), [0] * 12
    moves = []
    for way, source, target in ((OUT, rows, host), (COPY, rows, rows), (IN, host, rows)):
        targets = data.draw(st.lists(st.integers(0, len(target) // 4 - 1), max_size=3, unique=True))
        mine = [
            Move(way, 4 * data.draw(st.integers(0, len(source) // 4 - 1)), 4 * to, data.draw(st.integers(1, 4)))
            for to in targets
        ]
        taken = [source[move.source : move.source + move.rows] for move in mine]
        for move, found in zip(mine, taken, strict=True):
            target[move.target : move.target + move.rows] = found
        moves += mine
    arena.move(moves)
    assert arena.k[0][:, 0, 0].tolist() == rows
    assert [value % 100 for value in arena.k[1][:, 0, 0].tolist()] == rows
    assert torch.equal(arena.v[0], -arena.k[0]) and torch.equal(arena.v[1], -arena.k[1])
