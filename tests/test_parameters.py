"""Parameters counted from a shape or a config.json are those of transformers' own modules, to the last one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from kvbench.engine.hf_fields import HEAD_DIM, LATENT, NESTED_DEFAULTS, SAME_AS, SWITCHES, UNPLANNED
from kvbench.engine.parameters import (
    DENSE,
    EMBEDDING,
    EXPERTS,
    FAMILIES,
    HEAD,
    NORMS,
    PARTS,
    ROUTER,
    sharing,
    split_heads,
)
from kvbench.engine.shapes import SHAPES, ModelShape, find_shape
from kvbench.engine.weights import quiet
from kvbench.errors import KvbenchError

FIELDS: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 64,
    "intermediate_size_mlp": 80,
    "ffn_dim": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 200,
    "max_position_embeddings": 256,
    "word_embed_proj_dim": 96,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""Small, and no two dimensions that could be mistaken for each other."""

BUFFERED = ("deepseek_v3", "glm4_moe")
"""Families whose checkpoints carry their router's biases as buffers."""


def configuration(family: str, **fields: Any) -> Any:
    quiet()
    own = {"partial_rotary_factor": 0.5} if family.startswith("glm") else {}
    return AutoConfig.for_model(family, **FIELDS | own | fields)


def parameters(config: Any) -> int:
    """What transformers' own model has."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    buffers = [value for name, value in module.named_buffers() if name.endswith("e_score_correction_bias")]
    return sum(weight.numel() for weight in [*module.parameters(), *buffers])


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_config_of_any_family_is_counted_to_the_last_parameter(family: str, tied: bool) -> None:
    config = configuration(family, tie_word_embeddings=tied)
    shape = ModelShape.from_config(config.to_dict(), family)
    assert shape.parameters == parameters(config)
    assert (shape.tied, shape.layers, shape.vocab) == (tied, 3, 200)
    assert bool(shape.latent) == (family in LATENT)


@pytest.mark.parametrize(
    ("key", "family"), [(key, family) for key, families in SWITCHES.items() for family in sorted(families)]
)
@pytest.mark.parametrize("on", [False, True], ids=["off", "on"])
def test_biases_are_there_where_the_config_says_so(key: str, family: str, on: bool) -> None:
    config = configuration(family, **{key: on})
    assert ModelShape.from_config(config.to_dict(), family).parameters == parameters(config)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("cohere", {"use_qk_norm": True}),
        ("glm4_moe", {"use_qk_norm": True}),
        ("stablelm", {"use_parallel_residual": True}),
        ("stablelm", {"qk_layernorm": True}),
        ("qwen3_moe", {"mlp_only_layers": [0]}),
        ("qwen2_moe", {"decoder_sparse_step": 2}),
        ("llama4_text", {"interleave_moe_layer_step": 2, "moe_layers": [1]}),
        ("deepseek_v2", {"q_lora_rank": None}),
        ("deepseek_v3", {"first_k_dense_replace": 3}),
        ("gpt2", {"n_inner": 80}),
        ("llama", {"num_key_value_heads": 6}),
    ],
)
def test_what_a_config_switches_is_counted(family: str, fields: dict[str, Any]) -> None:
    config = configuration(family, **fields)
    assert ModelShape.from_config(config.to_dict(), family).parameters == parameters(config)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_layers_slide_as_transformers_has_it_where_they_are_not_listed(family: str) -> None:
    config = configuration(family, num_hidden_layers=13, max_window_layers=9, sliding_window=32)
    told = config.to_dict()
    listed = told.pop("layer_types", None)
    shape = ModelShape.from_config(told, family)
    if listed is not None:
        assert shape.sliding_layers == len(listed) - listed.count("full_attention")
    else:  # a window for every layer, or for none
        own = getattr(config, "sliding_window", None) if FAMILIES[family].slide_every else None
        switched_on = getattr(config, "use_sliding_window", True)
        assert shape.sliding_layers == (13 if own and switched_on else 0)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_defaults_are_those_of_transformers(family: str) -> None:
    """What a published config leaves out: whether the head is tied, and the width of a head."""
    quiet()
    config = AutoConfig.for_model(family)
    assert bool(config.tie_word_embeddings) == FAMILIES[family].tied
    width = getattr(config, "head_dim", None)
    if family not in LATENT and width not in (None, config.hidden_size // config.num_attention_heads):
        assert HEAD_DIM[family] == width


@pytest.mark.parametrize("family", sorted(NESTED_DEFAULTS))
def test_defaults_of_nested_language_models_are_those_of_transformers(family: str) -> None:
    quiet()
    config = AutoConfig.for_model(family)
    assert NESTED_DEFAULTS[family] == {key: getattr(config, key) for key in NESTED_DEFAULTS[family]}


def test_no_family_is_both_known_and_refused() -> None:
    assert not FAMILIES.keys() & UNPLANNED.keys()
    assert set(SAME_AS.values()) <= FAMILIES.keys() and not SAME_AS.keys() & FAMILIES.keys()


PUBLISHED = [shape for shape in SHAPES if shape.published_parameters]


@pytest.mark.parametrize("shape", PUBLISHED, ids=lambda shape: shape.name)
def test_built_in_shapes_have_the_published_number_of_parameters(shape: ModelShape) -> None:
    assert shape.parameters == shape.published_parameters


def test_most_built_in_shapes_have_a_published_number() -> None:
    assert {shape.name for shape in SHAPES} - {shape.name for shape in PUBLISHED} == {
        "tiny",
        "bench-40m",
        "OPT-66B",
        "OPT-175B",
    }


def shape_of(name: str) -> ModelShape:
    found = find_shape(name)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt-oss-20b", 3.61),
        ("gpt-oss-120b", 5.13),
        ("Qwen3-30B-A3B", 3.0),
        ("Mixtral-8x7B", 12.7),
        ("DeepSeek-V3", 37),
    ],
)
def test_active_parameters_are_the_published_ones(name: str, billions: float) -> None:
    """As their model cards round them."""
    assert shape_of(name).active_parameters / 1e9 == pytest.approx(billions, rel=0.015)


@pytest.mark.parametrize(("name", "gib"), [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)])
def test_checkpoints_in_mxfp4_have_the_published_size(name: str, gib: float) -> None:
    assert sum(shape_of(name).part_bytes(2).values()) / 2**30 == pytest.approx(gib, abs=0.05)


def test_the_parts_of_llama_by_hand() -> None:
    shape = shape_of("Llama-3.1-8B")
    layer_attention = 4096 * 4096 * 2 + 2 * 4096 * 8 * 128
    assert {name: part.parameters for name, part in shape.parts().items() if part.parameters} == {
        EMBEDDING: 128256 * 4096,
        HEAD: 128256 * 4096,
        "attention": 32 * layer_attention,
        DENSE: 32 * 3 * 4096 * 14336,
        NORMS: 65 * 4096,
    }
    assert shape.embedding_parameters == shape.head_parameters == 128256 * 4096
    assert shape.active_parameters == shape.parameters - 128256 * 4096


def test_a_tied_head_is_stored_once_and_read_each_step() -> None:
    shape = shape_of("Qwen2.5-0.5B")
    assert shape.parts()[HEAD].parameters == 0
    assert shape.head_parameters == shape.embedding_parameters == 151936 * 896
    assert shape.active_parameters == shape.parameters


def test_experts_by_hand() -> None:
    shape = shape_of("Mixtral-8x7B")
    assert shape.expert_parameters == 32 * 8 * 3 * 4096 * 14336
    assert shape.active_expert_parameters == shape.expert_parameters // 4
    assert shape.parts()[ROUTER].parameters == 32 * 8 * 4096
    assert shape.parts()[DENSE].parameters == 0


def test_dense_and_shared_layers_of_deepseek_by_hand() -> None:
    shape = shape_of("DeepSeek-V3")
    parts = shape.parts()
    assert shape.moe_layers == 58
    assert parts[DENSE].parameters == 3 * 3 * 7168 * 18432
    assert parts["shared"].parameters == 58 * 3 * 7168 * 2048
    assert parts[EXPERTS].parameters == 58 * 256 * 3 * 7168 * 2048
    assert parts[EXPERTS].matrices / parts[EXPERTS].parameters == 1
    assert shape.latent == 512 + 64


@given(shape=st.sampled_from(SHAPES), data=st.data())
def test_more_cards_never_keep_more_of_any_part_each_and_together_never_less_than_all(
    shape: ModelShape, data: st.DataObject
) -> None:
    few, many = sorted(data.draw(st.lists(st.integers(1, shape.heads), min_size=2, max_size=2)))
    whole, half, less = shape.parts(), shape.part_bytes(2, few), shape.part_bytes(2, many)
    for part in PARTS:
        assert less[part] <= half[part]
        assert many * shape.parts(many)[part].parameters >= whole[part].parameters
    assert shape.kv_bytes_per_token(2, many) <= shape.kv_bytes_per_token(2, few)
    assert many * shape.kv_bytes_per_token(2, many) >= shape.kv_bytes_per_token(2)


def test_what_is_split_and_what_every_card_keeps() -> None:
    shape = shape_of("Qwen2.5-7B")  # 28 heads, 4 of keys and values, biases of queries, keys and values
    whole, share = shape.parts(), shape.parts(28)
    assert share[DENSE].parameters == 28 * 3 * 3584 * -(-18944 // 28)
    assert share["attention"].parameters == 28 * (3584 * 128 * 3 + 128 * 3584 + 3 * 128)
    assert share[NORMS] == whole[NORMS]
    latent = shape_of("DeepSeek-V3")
    down = 61 * (7168 * 1536 + 7168 * 576)
    up = latent.parts()["attention"].matrices - down
    assert latent.parts(8)["attention"].matrices == down + up // 8


@pytest.mark.parametrize("cards", [-1, 0, 33, 10**6])
def test_cards_that_cannot_share_the_heads_are_refused(cards: int) -> None:
    with pytest.raises(
        KvbenchError, match=rf"^--tp {cards} does not share the 32 heads of Llama-3\.1-8B; choose among 1, "
    ):
        shape_of("Llama-3.1-8B").parts(cards)


def test_the_fullest_of_cards_that_share_unevenly() -> None:
    shape = shape_of("Qwen2.5-7B")
    assert sharing(shape) == [1, 2, 4, 28]
    assert split_heads(shape, 8) == (4, 1) and split_heads(shape, 3) == (10, 2)
    assert shape.parts(8)["attention"] == shape.parts(7)["attention"]
