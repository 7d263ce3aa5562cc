"""The engine's greedy tokens are those of transformers' own `generate`, for every family, on both backends, through
chunked prefills, mixed steps and preemptions, over memory that was NaN until somebody wrote it."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fakes_device import InterruptedSlots, MisplacedBlocks, MisplacedSlots, SlippingArena, answer, arena_for
from tiny_models import FAMILY_FIELDS, VOCAB, Pair, tiny_config, tiny_pair
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from kvbench.contiguous.slots import Slots
from kvbench.engine.arena import Arena
from kvbench.engine.model import ATTENTION, FAMILIES, REFUSED, BoundModel, check_family, register
from kvbench.engine.scheduler import Limits
from kvbench.errors import KvbenchError
from kvbench.metrics.records import FINISHED, Run
from kvbench.paged.blocks import BlockPool

NEW_TOKENS = 64
PROMPT_LENGTHS = (3, 40, 11, 26, 17, 5)
LIMITS = Limits(max_model_len=max(PROMPT_LENGTHS) + NEW_TOKENS, max_batched_tokens=16, max_sequences=4)
NEAR_TIE = 1e-4
BACKENDS: dict[str, Callable[[], Slots | BlockPool]] = {
    "contiguous": lambda: InterruptedSlots(3 * LIMITS.max_model_len, LIMITS.max_model_len, every=61),
    "paged": lambda: BlockPool(240, block_size=3),
}


@dataclass(frozen=True, slots=True)
class Expected:
    """What `generate` answers: tokens [prompts, n] and, for each, how far its logit is above the second best."""

    tokens: list[list[int]]
    margins: list[list[float]]

    @property
    def near_ties(self) -> int:
        return sum(margin < NEAR_TIE for margins in self.margins for margin in margins)


def expected(reference: Any, prompts: list[list[int]], new_tokens: int) -> Expected:
    """Greedy answers of a model of transformers, the prompts padded on the left into one batch."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=new_tokens,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    reference.generation_config.eos_token_id = None
    with torch.inference_mode():
        made = reference.generate(ids, attention_mask=mask, generation_config=config)
    best = torch.stack(made.logits, dim=1).topk(2).values
    return Expected(made.sequences[:, longest:].tolist(), (best[..., 0] - best[..., 1]).tolist())


def departures(run: Run, right: Expected) -> list[str]:
    """Where an answer leaves the expected one at a token that was no near-tie. A near-tie may turn either way, and what
    follows it is another text."""
    found = []
    for record, tokens, margins in zip(run.requests, right.tokens, right.margins, strict=True):
        assert record.output_token_ids is not None and len(record.output_token_ids) == len(tokens)
        for at, (ours, theirs, margin) in enumerate(zip(record.output_token_ids, tokens, margins, strict=True)):
            if ours != theirs:
                if margin >= NEAR_TIE:
                    found.append(f"request {record.request}, token {at}: {ours} for {theirs}, margin {margin:.2e}")
                break
    return found


@dataclass(frozen=True, slots=True)
class Case:
    """A family's models, the prompts put to them and the answers of the reference."""

    pair: Pair
    prompts: list[list[int]]
    right: Expected


@functools.cache
def case(family: str) -> Case:
    pair, draw = tiny_pair(family), random.Random(1)
    prompts = [[draw.randrange(VOCAB) for _ in range(length)] for length in PROMPT_LENGTHS]
    return Case(pair, prompts, expected(pair.reference, prompts, NEW_TOKENS))


def assert_eventful(run: Run) -> None:
    """The records prove that prompts were cut, that prefill and decode shared steps, and that a sequence lost its
    memory in the middle of its answer and still finished."""
    budget = LIMITS.max_batched_tokens
    assert all(step.prefill_tokens + step.decode_tokens <= budget for step in run.steps)
    assert any(request.input_tokens > budget for request in run.requests)
    assert any(step.prefill_tokens and step.decode_tokens for step in run.steps)
    assert sum(step.preemptions for step in run.steps) == sum(request.preemptions for request in run.requests) > 0
    asked = {request.request: request for request in run.requests}
    assert any(
        asked[hold.request].input_tokens < hold.final_tokens < asked[hold.request].input_tokens + NEW_TOKENS - 1
        for hold in run.holds
    )
    assert all(request.status == FINISHED and request.output_tokens == NEW_TOKENS for request in run.requests)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_tokens_equal_those_of_generate(family: str, backend: str) -> None:
    this = case(family)
    assert all(len(tokens) == NEW_TOKENS and len(set(tokens)) >= 20 for tokens in this.right.tokens)
    run = answer(this.pair.model, BACKENDS[backend](), this.prompts, new_tokens=NEW_TOKENS, limits=LIMITS)
    assert_eventful(run)
    total = len(this.prompts) * NEW_TOKENS
    print(f"{family}, {backend}: {this.right.near_ties} near-ties in {total} tokens")
    assert this.right.near_ties < total / 100
    assert departures(run, this.right) == []


def test_every_family_has_a_tiny_model() -> None:
    assert set(FAMILY_FIELDS) == FAMILIES


def test_windows_caps_and_sinks_are_no_decoration() -> None:
    """The tiny configurations switch on what a family can do to attention."""
    seen: dict[str, set[str]] = {}
    for family in FAMILIES:
        module = case(family).pair.model.module
        for part in module.modules():
            if getattr(part, "layer_idx", None) is None:
                continue
            for name in ("sliding_window", "attn_logit_softcapping", "sinks"):
                if getattr(part, name, None) is not None:
                    seen.setdefault(name, set()).add(family)
    print(seen)
