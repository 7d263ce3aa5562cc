"""The time of a step: against numbers reckoned by hand, against itself in bulk, and never less for more."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from kvbench.engine.shapes import ModelShape, find_shape
from kvbench.errors import KvbenchError
from kvbench.planner.catalog import Card, find_card
from kvbench.planner.cost import CostModel, StepParameters, cost_model
from kvbench.planner.formats import find_format, flops_per_s
from kvbench.planner.work import StepWork

TYPICAL = StepParameters(
    bandwidth_efficiency=0.8,
    compute_efficiency=0.6,
    kv_efficiency=0.7,
    link_efficiency=0.4,
    layer_s=3e-6,
    host_layer_s=5e-5,
    sequence_s=2e-5,
    link_s=1e-5,
)
IDEAL = StepParameters()


def shape(name: str) -> ModelShape:
    found = find_shape(name)
    assert found is not None
    return found


def model(
    card: str = "h100-sxm",
    name: str = "Llama-3-8B",
    number: str = "BF16",
    tp: int = 1,
    parameters: StepParameters = TYPICAL,
    **changed: float,
) -> CostModel:
    base = find_card(card)
    return cost_model(dataclasses.replace(base, **changed), shape(name), find_format(number), tp, parameters)  # type: ignore[arg-type]


def decode(sequences: int, context: int) -> StepWork:
    return StepWork(sequences, 0, context, context, sequences)


def prompt(tokens: int) -> StepWork:
    return StepWork(0, tokens, tokens * (tokens + 1) // 2, tokens, 1)


def test_one_decode_streams_the_weights_once() -> None:
    """Llama-3-8B: 32 layers of 4096 x (4096 + 2 x 1024) + 4096 x 4096 + 3 x 4096 x 14336, and a head of 128256 x 4096,
    two bytes each; 65 norms of 4096; one token of context is 131,072 bytes."""
    matrices = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    weights = 2 * (matrices + 128256 * 4096 + 65 * 4096)
    assert model(parameters=IDEAL).seconds(decode(1, 1000)) == pytest.approx(
        weights / 3.35e12 + 1000 * 131072 / 3.35e12, rel=1e-12
    )
    slower = StepParameters(bandwidth_efficiency=0.5, kv_efficiency=0.25)
    assert model(parameters=slower).seconds(decode(1, 1000)) == pytest.approx(
        weights / 1.675e12 + 1000 * 131072 / (1.675e12 / 4), rel=1e-12
    )


def test_a_long_prompt_is_bound_by_flop() -> None:
    matrices = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    flop = 2 * matrices * 4096 + 2 * 128256 * 4096
    pairs = 4096 * 4097 // 2
    attention = 32 * 4 * 32 * 128 * pairs
    half = StepParameters(compute_efficiency=0.5)
    assert model(parameters=half).seconds(prompt(4096)) == pytest.approx((flop + attention) / (0.5 * 989e12), rel=1e-12)


def test_experts_that_no_token_goes_to_are_not_streamed() -> None:
    """Mixtral: 8 experts of which a token goes to 2; 32 layers of 3 x 4096 x 14336 each."""
    cost = model(name="Mixtral-8x7B", parameters=IDEAL)
    expert = 32 * 3 * 4096 * 14336 * 2 / 3.35e12
    one, two = (cost.seconds(decode(n, 0)) for n in (1, 2))
    assert two - one == pytest.approx(expert * 8 * ((1 - 0.75**2) - 0.25), rel=1e-9)
    assert cost.seconds(decode(40, 0)) - one < expert * 6 * 1.001


def test_cards_that_share_the_work_pay_for_the_link() -> None:
    alone, four = model(parameters=IDEAL), model(parameters=IDEAL, tp=4)
    reduced = 2 * 32 * 2 * 3 / 4 * 4096 * 2 / 450e9
    kv = 131072 / 4 / 3.35e12
    norms = 65 * 4096 * 2 / 3.35e12
    streamed = alone.seconds(decode(1, 0)) - norms
    assert four.seconds(decode(1, 1)) == pytest.approx(streamed / 4 + norms + kv + reduced, rel=1e-9)
    slow = dataclasses.replace(IDEAL, link_s=1e-3)
    assert model(parameters=slow, tp=4).seconds(decode(1, 1)) == pytest.approx(
        four.seconds(decode(1, 1)) + 64e-3, rel=1e-9
    )


def test_the_host_is_a_floor_and_sequences_come_on_top() -> None:
    bound = dataclasses.replace(IDEAL, host_layer_s=1e-3, sequence_s=1e-4)
    assert model(parameters=bound).seconds(decode(10, 0)) == pytest.approx(32e-3 + 1e-3, rel=1e-12)
    assert model(parameters=bound).seconds(StepWork(0, 0, 0, 0, 0)) == 0


def test_a_window_bounds_what_a_sliding_layer_reads() -> None:
    """gpt-oss-20b: 12 of 24 layers look back 128 tokens; a layer's token is 2 x 8 x 64 x 2 bytes."""
    cost, row = model(name="gpt-oss-20b", number="MXFP4", parameters=IDEAL), 2 * 8 * 64 * 2 / 3.35e12
    empty = cost.seconds(decode(4, 0))
    assert cost.seconds(decode(4, 40_000)) - empty == pytest.approx(row * (12 * 40_000 + 12 * 4 * 128), rel=1e-9)
    assert cost.seconds(decode(4, 400)) - empty == pytest.approx(row * 24 * 400, rel=1e-9)


@pytest.mark.parametrize("name", ["Llama-3-8B", "gpt-oss-20b", "Mixtral-8x7B", "OPT-13B", "Qwen3-30B-A3B"])
@pytest.mark.parametrize("tp", [1, 2])
def test_many_steps_at_once_are_the_steps_one_by_one(name: str, tp: int) -> None:
    number = "MXFP4" if name.startswith("gpt-oss") else "BF16"
    for host in (0.0, 2e-4):
        cost = model(name=name, number=number, tp=tp, parameters=dataclasses.replace(TYPICAL, host_layer_s=host))
        for sequences, context in ((1, 0), (3, 77), (64, 20_011), (256, 900_000)):
            singly = [cost.seconds(decode(sequences, context + (i + 1) * sequences)) for i in range(300)]
            assert cost.decode_seconds(sequences, context, 300).tolist() == singly
    assert cost.decode_seconds(0, 0, 3).tolist() == [0, 0, 0]


def test_works_in_bulk_are_the_works_one_by_one() -> None:
    import numpy as np

    for name, tp in itertools.product(("Llama-3-8B", "Mixtral-8x7B"), (1, 4)):
        cost = model(name=name, tp=tp)
        works = [StepWork(b, n, 50 * b + n * n // 2, 60 * b + n, b + (n > 0)) for b in (0, 1, 90) for n in (1, 700)]
        rows = np.array([dataclasses.astuple(work)[:5] for work in works], dtype=float).T
        assert cost.seconds_of(rows) == pytest.approx([cost.seconds(work) for work in works], rel=1e-12)


CARDS = ("l4", "a100-80-sxm", "h100-sxm", "rtx-4090", "h20")
WORKS = [StepWork(b, n, b * 500 + n * (n + 1) // 2, b * 500 + n, b + 1) for b in (0, 1, 64) for n in (1, 512, 4096)]


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("name", ["Llama-3-8B", "Mixtral-8x7B", "gpt-oss-20b"])
def test_a_better_card_is_never_slower(card: str, name: str) -> None:
    for tp, work in itertools.product((1, 2), WORKS):
        own = find_card(card)
        plain = model(card, name, tp=tp).seconds(work)
        assert math.isfinite(plain) and plain > 0
        faster: list[Card] = [
            dataclasses.replace(own, bandwidth_bytes_per_s=1.5 * own.bandwidth_bytes_per_s),
            dataclasses.replace(own, flops_per_s={key: 1.5 * value for key, value in own.flops_per_s.items()}),
            dataclasses.replace(own, link_bytes_per_s=1.5 * (own.link_bytes_per_s or 1)),
        ]
        for better in faster:
            assert cost_model(better, shape(name), find_format("BF16"), tp, TYPICAL).seconds(work) <= plain


@pytest.mark.parametrize("field", ["decodes", "prefill_tokens", "attended_pairs", "context_tokens", "sampled_tokens"])
def test_more_work_never_takes_less(field: str) -> None:
    for name, tp, work in itertools.product(("Llama-3-8B", "Mixtral-8x7B"), (1, 2), WORKS):
        cost = model(name=name, tp=tp)
        more = dataclasses.replace(work, **{field: getattr(work, field) + 100})
        assert cost.seconds(more) >= cost.seconds(work)
    for field in ("copied_tokens", "swapped_tokens"):
        assert model().seconds(dataclasses.replace(WORKS[0], **{field: 100_000})) > model().seconds(WORKS[0])


def test_formats_stream_their_bits_and_multiply_where_the_card_can() -> None:
    assert flops_per_s(find_card("h100-sxm"), find_format("FP8")) == 1979e12
    assert flops_per_s(find_card("a100-80-sxm"), find_format("FP8")) == 312e12  # unpacked on the way
    assert flops_per_s(find_card("a100-80-sxm"), find_format("W8A8")) == 624e12
    assert flops_per_s(find_card("h100-sxm"), find_format("W4A16")) == 989e12
    half, whole = (model(number=number, parameters=IDEAL).dense_s for number in ("FP8", "BF16"))
    head = 2 * (128256 * 4096 + 65 * 4096) / 3.35e12
    assert half - head == pytest.approx((whole - head) / 2, rel=1e-9)


def test_what_cannot_be_is_one_line() -> None:
    with pytest.raises(KvbenchError, match=r"unknown number format 'fp7'; known are BF16"):
        find_format("fp7")
    with pytest.raises(KvbenchError, match="--tp 33 does not share the 32 heads"):
        model(tp=33)
    for name, value in (("bandwidth_efficiency", 0.0), ("layer_s", -1e-6), ("sequence_s", math.nan)):
        with pytest.raises(KvbenchError, match=f"step parameter {name} is"):
            StepParameters(**{name: value})
