"""In bfloat16 and float16 the engine's greedy tokens are those of transformers in the same dtype, but for logits so
close that rounding decides between them, for every family and on both backends."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fakes_device import answer, arena_for, cache_for, interrupted
from test_parity import misplaced
from tiny_models import FAMILY_FIELDS, VOCAB, Pair, generate, tiny_pair

from kvbench.contiguous.slots import Slots
from kvbench.engine.interfaces import Cache
from kvbench.engine.scheduler import Limits
from kvbench.errors import CellError
from kvbench.metrics.records import FINISHED, RequestRecord, Run
from kvbench.paged.blocks import BlockPool

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
NEW_TOKENS = 24
PROMPT_LENGTHS = (3, 30, 11, 22, 5)
LIMITS = Limits(max(PROMPT_LENGTHS) + NEW_TOKENS, max_batched_tokens=16, max_sequences=4)
OVERFLOWING = {("olmo2", "float16")}

BACKENDS: dict[str, Callable[[], Slots | BlockPool]] = {
    "contiguous": lambda: interrupted(Slots(3 * LIMITS.max_model_len, LIMITS.max_model_len), lambda n: n % 41 == 0),
    "paged": lambda: BlockPool(105, block_size=3),
}


def tamed(family: str) -> dict[str, Any]:
    """What keeps a model from magnifying a rounding error: weights less wide than those of the comparison in fp32,
    granite's scores scaled as other families' are, and every expert asked, since choosing some of them is a jump."""
    usual = FAMILY_FIELDS[family]
    fields: dict[str, Any] = {"init_std" if family == "opt" else "initializer_range": 0.2}
    if "num_experts" in usual:
        fields["num_experts_per_tok"] = usual["num_experts"]
    if family == "granite":
        fields["attention_multiplier"] = 0.1
    return fields if family != "olmo2" else {}


@dataclass(frozen=True, slots=True)
class Case:
    """A family's two models in one dtype, the prompts put to them and the answers of `generate`."""

    pair: Pair
    prompts: list[list[int]]
    expected: list[list[int]]

    @property
    def margin(self) -> float:
        """How far apart two logits may be that rounding exchanges, as a share of the largest logit of their step.

        A layer rounds its activations some 16 times on the way to a logit (two norms, seven projections, rotation,
        scores, weights, activation and product, two sums), each time by eps / 2 at most. Such errors walk at random:
        sqrt(16 layers) x eps / 2. Two computations of two logits make four of them.
        """
        return 2 * math.sqrt(16 * self.pair.model.kv.layers) * torch.finfo(self.pair.model.dtype).eps


@functools.cache
def case(family: str, dtype: str) -> Case:
    pair, draw = tiny_pair(family, HALVES[dtype], **tamed(family)), random.Random(1)
    prompts = [[draw.randrange(VOCAB) for _ in range(length)] for length in PROMPT_LENGTHS]
    return Case(pair, prompts, generate(pair.reference, prompts, NEW_TOKENS).tokens)


def gaps(reference: Any, record: RequestRecord, expected: list[int]) -> list[float]:
    """For each token of an answer how far its logit lies below that of the token the reference gives after the same
    text, as a share of the step's largest logit; 0 where they are the same token.

    While the answer is that of `generate`, the reference's token is the one `generate` gave; afterwards the text is
    another, and it is the reference's best.
    """
    assert record.prompt_token_ids is not None and record.output_token_ids is not None
    prompt, output = record.prompt_token_ids, list(record.output_token_ids)
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
    found, same = [], True
    for step, ours, given in zip(logits, output, expected, strict=True):
        theirs = given if same else int(step.argmax())
        found.append(float((step[theirs] - step[ours]).abs() / step.abs().max()))
        same = same and ours == given
    return found


def served(this: Case, allocator: Slots | BlockPool, cache: Cache | None = None) -> tuple[Run, list[float]]:
    """A run, and the gaps of all its tokens."""
    run = answer(this.pair.model, allocator, this.prompts, new_tokens=NEW_TOKENS, limits=LIMITS, cache=cache)
    assert all(record.status == FINISHED for record in run.requests)
    judged = zip(run.requests, this.expected, strict=True)
    return run, [gap for record, expected in judged for gap in gaps(this.pair.reference, record, expected)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [(family, dtype) for family in FAMILY_FIELDS for dtype in HALVES if (family, dtype) not in OVERFLOWING],
)
def test_tokens_equal_those_of_generate_within_rounding(family: str, dtype: str, backend: str) -> None:
    this = case(family, dtype)
    run, found = served(this, BACKENDS[backend]())
    assert sum(record.preemptions for record in run.requests) > 0
    other = sum(gap > 0 for gap in found)
    print(f"{family}, {dtype}, {backend}: {other} of {len(found)} tokens differ, gap {max(found) / this.margin:.2f}")
    assert max(found) <= this.margin
    assert other < len(found) / 10


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_oss"])
@pytest.mark.parametrize(
    "kind",
    ["range one row off", "table entry one block off", "contiguous write one row off", "paged write one row off"],
)
def test_a_wrong_row_is_beyond_rounding(family: str, kind: str, dtype: str) -> None:
    """The comparison above would mean little if the margin hid what it looks for. (In bfloat16 a single wrong key of a
    single layer can hide behind it, in some families: the comparison in fp32 sees those.)"""
    this = case(family, dtype)
    allocator, kind_of_arena = misplaced(kind, LIMITS.max_model_len)
    model = this.pair.model
    arena = arena_for(allocator, model.kv, model.dtype, fill=0.0, kind=kind_of_arena)
    _, found = served(this, allocator, cache_for(allocator, arena))
    assert max(found) > this.margin


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("family", "dtype"), sorted(OVERFLOWING))
def test_where_transformers_overflows_we_raise(family: str, dtype: str, backend: str) -> None:  # vllm#14126
    """The wide weights overflow fp16 in transformers' own forward pass too, where the same weights in fp32 do not. An
    answer of argmax over NaN would be token 0, again and again ("!!!!")."""
    pair = tiny_pair(family, HALVES[dtype])
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    with torch.inference_mode():
        assert all(pair.reference(torch.tensor([prompt])).logits[0, -1].isnan().any() for prompt in prompts)
        assert all(pair.reference.float()(torch.tensor([prompt])).logits.isfinite().all() for prompt in prompts)
    with pytest.raises(CellError, match=r"^step 0 gave logits that are NaN or infinite$"):
        answer(pair.model, BACKENDS[backend](), prompts, new_tokens=NEW_TOKENS, limits=LIMITS)
