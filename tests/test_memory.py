"""What fits into a card: bytes by hand, public bugs of others, and the logs of real servers."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.engine.hf_config import load_shape
from kvbench.engine.shapes import SHAPES, ModelShape
from kvbench.errors import KvbenchError
from kvbench.planner.catalog import catalogue, find_card
from kvbench.planner.memory import (
    Memory,
    Serving,
    activation_peak,
    default_limits,
    fewest_cards,
    kv_bytes,
    plan_memory,
    windowed_at_once,
)

GIB = 2**30
H100 = find_card("h100-sxm")
AS_VLLM = Serving(max_batched_tokens=8192, max_sequences=1024)


def planned(model: str, card: str = "h100-sxm", **told: object) -> Memory:
    """As vLLM's server has its limits on that card."""
    found = find_card(card)
    batched, sequences = default_limits(found)
    serving = Serving(max_batched_tokens=batched, max_sequences=sequences)
    return plan_memory(load_shape(model), found, replace(serving, **told))  # type: ignore[arg-type]


def test_llama_3_70b() -> None:
    """vllm-fit#2: eight heads of keys and values, not sixty-four."""
    assert load_shape("Llama-3-70B").kv_bytes_per_token(2) == 80 * 2 * 8 * 128 * 2 == 327_680


def test_deepseek_v3_keeps_a_latent() -> None:
    """LMCache PR#694: 61 layers x (512 + 64) values once, on every card."""
    shape = load_shape("DeepSeek-V3")
    assert shape.kv_bytes_per_token(2) == 61 * (512 + 64) * 2 == 70_272
    assert {shape.kv_bytes_per_token(2, tp) for tp in (1, 2, 8, 16)} == {70_272}


def test_mixtral_keeps_all_experts() -> None:
    """llmfit#230: 93.4 GB in bf16, whatever a token is sent to."""
    weights = planned("Mixtral-8x7B").term("weights").bytes
    assert weights == 2 * 46_702_792_704
    assert round(weights / 1e9, 1) == 93.4


def test_fp8_keys_and_values_take_a_byte() -> None:
    """vllm#25350: half of the 131,072 B in bf16; the scales are of a layer, not of a token."""
    memory = planned("Llama-3.1-8B", kv_dtype="fp8")
    assert memory.kv_bytes_per_token == 65_536
    assert memory.pool_tokens == pytest.approx(2 * planned("Llama-3.1-8B").pool_tokens, abs=32)


def test_fewer_heads_than_cards_are_on_several() -> None:
    """transformers PR#48566: Qwen2.5-7B has 4 heads of keys and values; each of 8 cards keeps one."""
    shape = load_shape("Qwen2.5-7B")
    assert planned("Qwen2.5-7B", tp=8).kv_bytes_per_token == 14_336
    assert shape.kv_bytes_per_token(2, 8) == 28 * 2 * 1 * 128 * 2 == 14_336
    assert shape.kv_bytes_per_token(2, 4) == 14_336
    assert shape.kv_bytes_per_token(2, 2) == 28_672


def test_a_heads_width_is_its_own_field() -> None:
    shape = load_shape("Qwen3-0.6B")  # hidden 1024, 16 heads of 128
    assert shape.kv_bytes_per_token(2) == 28 * 2 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("tokens", "rows"), [(0, 0), (1, 24), (128, 24 * 128), (129, 24 * 129 - 12), (1000, 12 * 1128)]
)
def test_a_sliding_layer_keeps_its_window_where_the_layout_lets_it(tokens: int, rows: int) -> None:
    shape = load_shape("gpt-oss-20b")  # 12 of 24 layers look back 128 tokens
    assert kv_bytes(shape, tokens, 2, layout="windowed") == rows * 2 * 8 * 64 * 2
    assert kv_bytes(shape, tokens, 2) == 24 * tokens * 2 * 8 * 64 * 2
    assert kv_bytes(load_shape("Llama-3.1-8B"), tokens, 2, layout="windowed") == tokens * 131_072


def test_users_at_once_where_layers_keep_their_windows() -> None:
    memory = planned("gpt-oss-20b")
    each = kv_bytes(memory.shape, 8000, 2, layout="windowed")
    assert windowed_at_once(memory, 7999) == windowed_at_once(memory, 8000) == memory.pool_bytes // each
    assert windowed_at_once(memory, 8001) == memory.pool_bytes // kv_bytes(memory.shape, 8016, 2, layout="windowed")


KVPOOL = {"Llama-3.1-8B": 0.9, "Qwen3-32B": 0.9, "gpt-oss-20b": 0.9, "gpt-oss-120b": 0.95}
"""Models whose memory vLLM logged on an H100, and the share it was given. The source says 0.9 for all, but the pool of
gpt-oss-120b only adds up at 0.95: 0.95 x 79.18 - 64.38 - 7.38 - 0.13 = 3.33 GiB; at 0.9 there would be none."""


def logged(shared_data: Path, model: str) -> dict[str, float]:
    """The GiB in vLLM's log on an H100: weights, activation_peak, kv_pool."""
    with (shared_data / "measured_points.csv").open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["group"] == "kvpool" and line["shape"] == model]
    return {line["metric"].removesuffix("_GiB_per_gpu"): float(line["value"]) for line in lines}


def gib(memory: Memory, *keys: str) -> float:
    return sum(term.bytes for term in memory.terms if term.key in keys) / GIB


@pytest.mark.parametrize("model", sorted(KVPOOL))
def test_vllms_logs_on_an_h100(shared_data: Path, model: str) -> None:
    """Weights, activation peak and pool within 0.02 GiB; the padded experts of gpt-oss-120b are 0.3 % off."""
    log, memory = logged(shared_data, model), planned(model, gpu_memory_utilization=KVPOOL[model])
    rest = KVPOOL[model] * 79.18 - log["weights"] - log["activation_peak"] - 0.13
    assert rest == pytest.approx(log["kv_pool"], abs=0.02)  # the log's own sum
    assert gib(memory, "activation") == pytest.approx(log["activation_peak"], abs=0.01)
    off = 0.003 * log["weights"] if model == "gpt-oss-120b" else 0.02
    assert gib(memory, "weights", "rotary", "padding") == pytest.approx(log["weights"], abs=off)
    assert memory.left_bytes / GIB == pytest.approx(log["kv_pool"], abs=off + 0.01)


def test_the_pool_of_llama_on_an_h100_by_hand() -> None:
    """0.9 x 79.18 - 14.99 - 4.76 - 0.13 = 51.38 GiB, 420,905 tokens of 131,072 B."""
    memory = planned("Llama-3.1-8B")
    assert memory.pool_bytes / GIB == pytest.approx(51.38, abs=0.01)
    assert memory.pool_tokens == pytest.approx(420_905, rel=2e-4)
    assert memory.pool_tokens % 16 == 0 and memory.pool_bytes == memory.pool_tokens * 131_072


def test_a_log_of_another_version_and_card_is_missed_by_five_percent(shared_data: Path) -> None:
    """A held-out point: vLLM 0.19 on an RTX 4090, whose top-p needs less room than the sort on the H100."""
    with (shared_data / "measured_points.csv").open(newline="") as file:
        (log,) = [line for line in csv.DictReader(file) if line["metric"] == "kv_pool_tokens"]
    assert (log["shape"], log["gpu_id"]) == ("Llama-3.1-8B", "rtx-4090")
    ratio = planned("Llama-3.1-8B", "rtx-4090").pool_tokens / float(log["value"])
    assert 0.95 <= ratio <= 0.96


def test_the_sum_is_the_sum_of_its_terms() -> None:
    memory = planned("gpt-oss-20b", tp=2, graph_bytes=GIB)
    budget, *taken = memory.terms
    assert memory.left_bytes == budget.bytes - sum(term.bytes for term in taken)
    assert {term.key for term in taken} == {"weights", "rotary", "padding", "activation", "outside", "graphs"}
    assert {term.key: term.evidence for term in memory.terms if term.evidence != "estimated"} == {
        "budget": "catalogue",
        "weights": "exact",
    }
    assert planned("tiny", "l4").terms[0].evidence == "estimated"  # nobody noted what torch reports of an L4
    assert memory.term("graphs").bytes == GIB
    assert memory.term("padding").bytes == pytest.approx(memory.shape.part_bytes(2, 2)["experts"] / 15, rel=1e-9)


def test_choosing_tokens_or_a_layer_is_the_peak() -> None:
    shape = load_shape("Llama-3.1-8B")
    peak, widest = activation_peak(shape, AS_VLLM)
    assert peak == 1024 * 128256 * 38 + 8192 * 4096 * 2 + int(0.05 * GIB)
    assert widest == "logits"
    peak, widest = activation_peak(shape, Serving(max_batched_tokens=8192, max_sequences=1))
    assert peak == 8192 * (2 * 4096 + 3 * 14336) * 2 + int(0.05 * GIB)
    assert widest == "layer"
    few, _ = activation_peak(shape, Serving(max_batched_tokens=16, max_sequences=1024))
    assert few == activation_peak(shape, Serving(max_batched_tokens=16, max_sequences=16))[0]


@pytest.mark.parametrize(
    ("card", "limits"),
    [
        ("h100", (8192, 1024)),
        ("mi300x", (8192, 1024)),
        ("a100", (2048, 256)),
        ("l4", (2048, 256)),
        ("a800", (8192, 1024)),
    ],
)
def test_limits_are_vllms_on_that_card(card: str, limits: tuple[int, int]) -> None:
    assert default_limits(find_card(card)) == limits


@pytest.mark.parametrize(
    ("model", "card", "cards"),
    [
        ("Llama-3.1-70B", "h100", 2),
        ("Llama-3.1-8B", "h100", 1),
        ("DeepSeek-V3", "h100", 16),
        ("Qwen2.5-7B", "t4", 2),
    ],
)
def test_the_fewest_cards_that_hold_a_model(model: str, card: str, cards: int) -> None:
    found = fewest_cards(load_shape(model), find_card(card), AS_VLLM)
    assert found is not None and found.serving.tp == cards and found.pool_tokens > 0
    none = fewest_cards(load_shape(model), find_card(card), replace(AS_VLLM, gpu_memory_utilization=0.01))
    assert none is None


def test_a_model_that_does_not_fit_leaves_an_empty_pool() -> None:
    memory = planned("Llama-3.1-70B")
    assert memory.left_bytes < 0 and memory.pool_tokens == memory.pool_bytes == 0


SHAPE, CARD = st.sampled_from(SHAPES), st.sampled_from(catalogue())
SERVING = st.builds(
    Serving,
    kv_dtype=st.sampled_from(["bfloat16", "fp8"]),
    gpu_memory_utilization=st.floats(0.1, 1),
    max_batched_tokens=st.integers(1, 20_000),
    max_sequences=st.integers(1, 2_000),
    block_size=st.sampled_from([1, 16, 128]),
)


@given(shape=SHAPE, card=CARD, serving=SERVING, more=st.integers(0, 10**11))
def test_more_memory_never_holds_less(shape: ModelShape, card: object, serving: Serving, more: int) -> None:
    small = plan_memory(shape, card, serving)  # type: ignore[arg-type]
    large = plan_memory(shape, replace(small.card, memory_bytes=small.card.memory_bytes + more), serving)
    assert large.pool_tokens >= small.pool_tokens
    assert (
        small.pool_bytes <= max(0, small.left_bytes) < small.pool_bytes + serving.block_size * small.kv_bytes_per_token
    )


@given(shape=SHAPE, serving=SERVING, data=st.data())
def test_more_cards_never_keep_more_each(shape: ModelShape, serving: Serving, data: st.DataObject) -> None:
    few, many = sorted(data.draw(st.lists(st.integers(1, shape.heads), min_size=2, max_size=2)))
    fewer, more = (plan_memory(shape, H100, replace(serving, tp=tp)) for tp in (few, many))
    assert more.left_bytes >= fewer.left_bytes and more.pool_tokens >= fewer.pool_tokens


@given(shape=SHAPE, serving=SERVING, data=st.data())
def test_larger_batches_never_take_less(shape: ModelShape, serving: Serving, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["max_batched_tokens", "max_sequences"]))
    larger = replace(serving, **{name: getattr(serving, name) + data.draw(st.integers(1, 1000))})
    assert activation_peak(shape, larger)[0] >= activation_peak(shape, serving)[0]


@given(shape=SHAPE, tokens=st.integers(0, 10**6), more=st.integers(0, 10**5))
def test_a_windowed_layout_never_takes_more_and_both_grow(shape: ModelShape, tokens: int, more: int) -> None:
    uniform, windowed = (kv_bytes(shape, tokens, 2, layout=layout) for layout in ("uniform", "windowed"))
    assert windowed <= uniform
    assert kv_bytes(shape, tokens + more, 2, layout="windowed") >= windowed


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, float("nan"), float("inf")])
def test_a_share_of_memory_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(KvbenchError, match=r"^--gpu-memory-utilization must be above 0 and at most 1, not "):
        Serving(gpu_memory_utilization=share)


@pytest.mark.parametrize(
    ("field", "flag"),
    [
        ("tp", "--tp"),
        ("max_batched_tokens", "--max-num-batched-tokens"),
        ("max_sequences", "--max-num-seqs"),
        ("block_size", "--block-size"),
    ],
)
@pytest.mark.parametrize("count", [0, -1, 10**10])
def test_counts_that_are_none_are_refused(field: str, flag: str, count: int) -> None:
    with pytest.raises(KvbenchError, match=f"^{flag} must be at least 1 and at most 1,000,000,000, not {count}$"):
        Serving(**{field: count})  # type: ignore[arg-type]
