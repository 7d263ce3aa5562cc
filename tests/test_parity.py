"""The engine's greedy tokens are those of transformers' own `generate`, for every family, on both backends, through
chunked prefills, mixed steps and preemptions, over memory that is NaN until somebody writes it."""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from fakes_device import (
    ForgetfulCache,
    MisplacedBlocks,
    MisplacedSlots,
    SlippingArena,
    answer,
    arena_for,
    cache_for,
    interrupted,
)
from tiny_models import FAMILY_FIELDS, VOCAB, WINDOW, Expected, Pair, departures, generate, tiny_config, tiny_pair
from transformers import AutoConfig, AutoModelForCausalLM

from kvbench.contiguous.slots import Slots
from kvbench.engine.arena import Arena
from kvbench.engine.model import ATTENTION, FAMILIES, REFUSED, BoundModel, check_family, register
from kvbench.engine.scheduler import Limits
from kvbench.errors import KvbenchError
from kvbench.metrics.memory import split
from kvbench.metrics.records import FINISHED, Run
from kvbench.paged.blocks import BlockPool

NEW_TOKENS = 64
PROMPT_LENGTHS = (3, 40, 11, 26, 17, 5)
LIMITS = Limits(max_model_len=max(PROMPT_LENGTHS) + NEW_TOKENS, max_batched_tokens=16, max_sequences=4)
POOL = 3 * LIMITS.max_model_len

PREFIXES = ((20, 3), (20, 9), (12, 1), (20, 0), (17, 6), (20, 9), (9, 20), (20, 1))
"""Of each prompt in the test of the prefix cache: tokens of a common text, and of its own."""

Allocators = Slots | BlockPool
BACKENDS: dict[str, Callable[[], Allocators]] = {
    "contiguous": lambda: interrupted(Slots(POOL, LIMITS.max_model_len), lambda asked: asked % 61 == 0),
    "paged": lambda: BlockPool(240, block_size=3),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A family's two models, the prompts put to them and the answers of the reference."""

    pair: Pair
    prompts: list[list[int]]
    expected: Expected


@functools.cache
def case(family: str) -> Case:
    pair, draw = tiny_pair(family), random.Random(1)
    prompts = [[draw.randrange(VOCAB) for _ in range(length)] for length in PROMPT_LENGTHS]
    return Case(pair, prompts, generate(pair.reference, prompts, NEW_TOKENS))


def assert_eventful(run: Run) -> None:
    """The records prove that a prompt was cut, that prefill and decode shared a step, and that a sequence lost its
    memory in the middle of its answer; all the same, every answer is whole."""
    assert all(request.status == FINISHED and request.output_tokens == NEW_TOKENS for request in run.requests)
    assert all(step.prefill_tokens + step.decode_tokens <= LIMITS.max_batched_tokens for step in run.steps)
    assert any(request.input_tokens > LIMITS.max_batched_tokens for request in run.requests)
    assert any(step.prefill_tokens and step.decode_tokens for step in run.steps)
    assert sum(step.preemptions for step in run.steps) == sum(request.preemptions for request in run.requests) > 0
    prompt = {request.request: request.input_tokens for request in run.requests}
    assert any(prompt[hold.request] < hold.final_tokens < prompt[hold.request] + NEW_TOKENS - 1 for hold in run.holds)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_tokens_equal_those_of_generate(family: str, backend: str) -> None:
    this = case(family)
    assert all(len(tokens) == NEW_TOKENS for tokens in this.expected.tokens)
    assert min(len(set(tokens)) for tokens in this.expected.tokens) >= 20
    run = answer(this.pair.model, BACKENDS[backend](), this.prompts, new_tokens=NEW_TOKENS, limits=LIMITS)
    assert_eventful(run)
    tokens = len(this.prompts) * NEW_TOKENS
    print(f"{family}, {backend}: {this.expected.near_ties} of {tokens} tokens are near-ties")
    assert this.expected.near_ties < tokens / 100
    assert departures(run, this.expected) == []


def test_every_measured_family_is_compared() -> None:
    assert set(FAMILY_FIELDS) == FAMILIES


@pytest.mark.parametrize("backend", ["contiguous", "paged", "paged with a prefix cache"])
def test_a_preemption_at_any_moment_changes_no_token(backend: str) -> None:  # vllm#16832
    this, new_tokens = case("qwen3"), 8
    limits = Limits(max_model_len=LIMITS.max_model_len, max_batched_tokens=7)
    prompts = [this.prompts[number] for number in (0, 4, 2)]
    expected = generate(this.pair.reference, prompts, new_tokens)
    for moment in itertools.count(1):
        clean: Allocators = BlockPool(POOL, block_size=4, prefix_caching=backend.endswith("cache"))
        if backend == "contiguous":
            clean = Slots(POOL, limits.max_model_len)
        allocator = interrupted(clean, functools.partial(operator.eq, moment))
        run = answer(this.pair.model, allocator, prompts, new_tokens=new_tokens, limits=limits)
        assert departures(run, expected) == []
        if not any(request.preemptions for request in run.requests):
            break
    assert moment > len(prompts) * new_tokens


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_tokens_found_in_the_prefix_cache_change_no_token(family: str) -> None:
    """Prompts that begin alike, in a pool so tight that sequences are preempted and find their own blocks again."""
    draw, new_tokens = random.Random(2), 32
    common = [draw.randrange(VOCAB) for _ in range(20)]
    prompts = [common[:cut] + [draw.randrange(VOCAB) for _ in range(own)] for cut, own in PREFIXES]
    pair = case(family).pair
    pool = BlockPool(123, block_size=3, prefix_caching=True)
    run = answer(pair.model, pool, prompts, new_tokens=new_tokens, limits=LIMITS)
    assert departures(run, generate(pair.reference, prompts, new_tokens)) == []
    parts = split(run)
    assert sum(record.cached_tokens > 0 for record in run.requests) >= 4
    assert all(record.cached_tokens % 3 == 0 and record.cached_tokens < record.input_tokens for record in run.requests)
    assert sum(record.preemptions for record in run.requests) > 0
    assert (parts.pool == 123).all() and any(step.logical_tokens > step.used_tokens for step in run.steps)


def misplaced(kind: str, max_model_len: int = LIMITS.max_model_len) -> tuple[Allocators, type[Arena]]:
    """A backend in which some row is not where it should be."""
    if kind == "range one row off":
        return MisplacedSlots(4 * max_model_len, max_model_len), Arena
    if kind == "table entry one block off":
        return MisplacedBlocks(600, block_size=3), Arena
    if kind == "contiguous write one row off":
        return Slots(4 * max_model_len, max_model_len), SlippingArena
    assert kind == "paged write one row off"
    return BlockPool(600, block_size=3), SlippingArena


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_oss"])
@pytest.mark.parametrize(
    "kind",
    [
        "range one row off",
        "table entry one block off",
        "contiguous write one row off",
        "paged write one row off",
    ],
)
def test_a_wrong_row_is_noticed(family: str, kind: str) -> None:
    this = case(family)
    allocator, arena = misplaced(kind)
    cache = cache_for(allocator, arena_for(allocator, this.pair.model.kv, fill=0.0, kind=arena))
    run = answer(this.pair.model, allocator, this.prompts, new_tokens=NEW_TOKENS, limits=LIMITS, cache=cache)
    assert departures(run, this.expected)


WINDOWED = "qwen2 qwen3 qwen3_moe mistral mixtral phi3 gemma2 gemma3_text gpt_oss starcoder2 smollm3".split()


@pytest.mark.parametrize(
    ("family", "option"), [*((family, "window") for family in WINDOWED), ("gemma2", "softcap"), ("gpt_oss", "sinks")]
)
def test_a_forgotten_option_of_attention_is_noticed(family: str, option: str) -> None:
    """The comparison above would mean little if windows, soft caps and sinks changed no token."""
    this = case(family)
    allocator = Slots(4 * LIMITS.max_model_len, LIMITS.max_model_len)
    cache = ForgetfulCache(cache_for(allocator, arena_for(allocator, this.pair.model.kv)), option)
    run = answer(this.pair.model, allocator, this.prompts, new_tokens=NEW_TOKENS, limits=LIMITS, cache=cache)
    assert departures(run, this.expected)
    assert any(value is not None for value in cache.seen)
    if option == "window":
        assert {value for value in cache.seen if value is not None} == {WINDOW}


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_a_family_known_not_to_work_is_refused_by_name(family: str) -> None:
    with pytest.raises(KvbenchError, match=f"^model type '{family}' cannot be measured: .+$"):
        check_family(AutoConfig.for_model(family))


@pytest.mark.parametrize("family", ["falcon_h1", "bamba", "phi", "cohere2"])
def test_a_family_never_compared_is_refused_by_name(family: str) -> None:
    with pytest.raises(KvbenchError, match=f"^model type '{family}' cannot be measured: .*have not been compared.*$"):
        check_family(AutoConfig.for_model(family))


def test_a_model_whose_layers_go_around_our_attention_is_refused() -> None:
    register()
    module = AutoModelForCausalLM.from_config(tiny_config("llama"), attn_implementation=ATTENTION)
    stray = module.model.layers[1].self_attn
    stray.config = copy.deepcopy(stray.config)
    stray.config._attn_implementation = "eager"
    with pytest.raises(KvbenchError, match=r"^model type 'llama' cannot be measured: its layers do not each pass"):
        BoundModel(module, module.config)


def test_a_model_that_never_asks_for_our_attention_is_refused() -> None:
    register()
    config = AutoConfig.for_model("bloom", hidden_size=32, n_head=4, n_layer=2, vocab_size=99)
    module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    with pytest.raises(KvbenchError, match=r"^model type 'bloom' cannot be measured: its layers do not each pass"):
        BoundModel(module, config)


def test_rows_of_the_pool_that_fill_no_block_stay_unused() -> None:
    this = case("llama")
    run = answer(this.pair.model, BlockPool(250, block_size=16), this.prompts, new_tokens=NEW_TOKENS, limits=LIMITS)
    assert departures(run, this.expected) == []
    assert min(step.free_tokens for step in run.steps) >= 250 % 16
