"""A config.json as published becomes a shape; one that lacks or breaks something is one line that says what."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.engine.hf_config import load_shape, read_config
from kvbench.engine.hf_fields import UNPLANNED
from kvbench.engine.parameters import ATTENTION, DENSE, EXPERTS, HEAD, SHARED, sharing
from kvbench.engine.quantisation import LINEAR, read_quantisation
from kvbench.engine.shapes import ModelShape, find_shape
from kvbench.errors import KvbenchError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "tie_word_embeddings": False,
    "v_head_dim": 128,
    "vocab_size": 129280,
}

QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}


def same(config: dict[str, Any], name: str) -> None:
    """The configuration describes the built-in shape of that name."""
    read, built_in = ModelShape.from_config(config), find_shape(name)
    assert built_in is not None
    for own in ("name", "source", "published_parameters", "also"):
        object.__setattr__(read, own, getattr(built_in, own))
    assert read == built_in


def refusal(config: Any) -> str:
    with pytest.raises(KvbenchError) as refused:
        read_config(config, "m/config.json")
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("config", "name"),
    [(LLAMA, "Llama-3.1-8B"), (GPT_OSS, "gpt-oss-20b"), (DEEPSEEK, "DeepSeek-V3")],
    ids=["llama", "gpt-oss", "deepseek"],
)
def test_published_configs_are_the_built_in_shapes(config: dict[str, Any], name: str) -> None:
    same(config, name)


def test_what_older_configs_leave_out() -> None:
    """Llama 2 13B has neither num_key_value_heads nor head_dim; Qwen2.5 names a window it does not use."""
    llama = {"model_type": "llama", "hidden_size": 5120, "intermediate_size": 13824, "max_position_embeddings": 4096}
    same(llama | {"num_attention_heads": 40, "num_hidden_layers": 40, "vocab_size": 32000}, "Llama-2-13B")
    qwen = {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 131072,
        "max_window_layers": 28,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "sliding_window": 131072,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
    }
    same(qwen, "Qwen2.5-7B")


def test_the_language_model_of_a_multimodal_config_is_read() -> None:
    """Gemma 3 4B as published: what its class has by default is left out."""
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
    }
    shape = ModelShape.from_config(config)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.vocab, shape.tied) == (8, 4, 256, 262208, True)
    assert (shape.sliding_window, shape.sliding_layers) == (1024, 29)
    assert shape.source == "config.json, its language model alone"
    assert shape.parameters == 4_300_079_472 - 416_866_032 - 2_950_272  # as published; vision tower; projector
    quantised = ModelShape.from_config(config | {"quantization_config": {"quant_method": "awq", "bits": 4}})
    assert quantised.quantisation is not None


def test_a_nested_config_that_is_not_the_language_models_changes_nothing() -> None:
    assert ModelShape.from_config(LLAMA | {"text_config": {}}) == ModelShape.from_config(LLAMA)


@pytest.mark.parametrize("model_type", sorted(UNPLANNED))
def test_layers_without_a_kv_cache_of_every_token_are_refused_by_name(model_type: str) -> None:
    assert f"model type '{model_type}' cannot be planned for: its " in refusal(LLAMA | {"model_type": model_type})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": None}, "lacks model_type"),
        ({"model_type": 7}, "has model_type 7; it must be a text"),
        ({"model_type": "lama"}, "model type 'lama' is not known; the nearest known one is llama"),
        ({"num_hidden_layers": None}, "lacks num_hidden_layers or n_layer or n_layers"),
        ({"num_hidden_layers": None, "num_hiden_layers": 3}, "the nearest it has is num_hiden_layers"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0; it must be a whole number of at least 1"),
        ({"num_hidden_layers": -3}, "num_hidden_layers -3"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers 2.5"),
        ({"num_hidden_layers": math.nan}, "num_hidden_layers nan"),
        ({"num_hidden_layers": True}, "num_hidden_layers True"),
        ({"hidden_size": "4096"}, "hidden_size '4096'"),
        ({"hidden_size": 10**12}, "hidden_size 1000000000000"),
        (
            {"hidden_size": 4100, "head_dim": None},
            "lacks head_dim, and its hidden size 4100 does not divide by 32 heads",
        ),
        ({"num_key_value_heads": 5}, "num_key_value_heads 5, by which its 32 heads do not divide"),
        ({"num_key_value_heads": 64}, "num_key_value_heads 64, by which"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings 'no'; it must be true or false"),
        ({"layer_types": ["full_attention"]}, "layer_types for other than its 32 layers"),
        ({"layer_types": ["linear_attention"] * 32}, "layers of type 'linear_attention', which keep no plain KV cache"),
        ({"layer_types": ["sliding_attention"] * 32}, "32 sliding layers and lacks sliding_window"),
        (
            {"quantization_config": {"quant_method": "ftp8"}},
            "quant_method 'ftp8', which is not known; the nearest is fp8",
        ),
        ({"quantization_config": {}}, "quant_method None"),
        ({"quantization_config": 8}, "quantization_config must be an object"),
        ({"quantization_config": {"quant_method": "gptq", "bits": "4"}}, "bits '4'; it must be a number"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 0}}, "0.125 bits a value"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0]}}, "weight_block_size [0]"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "lacks config_groups"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "X"}}, "known are NVFP4 and FP8"),
        ({"quantization_config": {"quant_method": ["fp8"]}}, "quant_method ['fp8'], which is not known"),
        ({"quantization_config": {"quant_method": "fp8", "ignored_layers": 3}}, "ignored_layers 3; it must be a list"),
        ({"quantization_config": {"quant_method": "fp8", "ignored_layers": "lm_head"}}, "it must be a list of modules"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [10**400, 1]}}, "two whole numbers"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": 3}}},
            "lacks config_groups with weights",
        ),
        ({"model_type": ["llama"]}, "has model_type ['llama']; it must be a text"),
    ],
)
def test_a_broken_config_is_one_line_that_names_the_field(change: dict[str, Any], says: str) -> None:
    config = {key: value for key, value in (LLAMA | change).items() if value is not None}
    line = refusal(config)
    assert line.startswith("m/config.json") and says in line


@pytest.mark.parametrize(
    ("config", "change", "says"),
    [
        (GPT_OSS, {"num_local_experts": None}, "lacks n_routed_experts or num_local_experts or num_experts"),
        (GPT_OSS, {"num_experts_per_tok": 33}, "sends a token to 33 experts of 32"),
        (DEEPSEEK, {"kv_lora_rank": None}, "lacks kv_lora_rank"),
        (QWEN, {"mlp_only_layers": 3}, "mlp_only_layers 3; it must be a list of whole numbers"),
        (QWEN, {"mlp_only_layers": ["all"]}, "mlp_only_layers ['all']; it must be a list"),
        (DEEPSEEK, {"first_k_dense_replace": 62}, "first_k_dense_replace 62, more than its 61 layers"),
        (LLAMA, {"model_type": "opt", "ffn_dim": 8, "do_layer_norm_before": False}, "do_layer_norm_before false"),
        (LLAMA, {"model_type": "opt", "ffn_dim": 8, "word_embed_proj_dim": 512}, "word_embed_proj_dim"),
    ],
)
def test_what_only_some_families_need(config: dict[str, Any], change: dict[str, Any], says: str) -> None:
    assert says in refusal({key: value for key, value in (config | change).items() if value is not None})


def test_a_field_that_is_null_is_not_its_own_nearest() -> None:
    assert "vocab_size" not in refusal(LLAMA | {"vocab_size": None}).replace("lacks vocab_size", "")


@pytest.mark.parametrize("change", [{"num_hidden_layers": 2**31}, {"num_attention_heads": 2**31, "head_dim": 1}])
def test_the_largest_numbers_are_counted_at_once(change: dict[str, Any]) -> None:
    shape = ModelShape.from_config(QWEN | change, "m/config.json")
    assert shape.parameters > 0 and sharing(shape)[:2] == [1, 2]


def test_dense_layers_are_those_named_and_those_between_steps() -> None:
    for step, only in itertools.product((1, 2, 3, 5), ([], [0], [1, 3], [1, 1, 5, 47, 99, -1], list(range(48)))):
        shape = ModelShape.from_config(QWEN | {"decoder_sparse_step": step, "mlp_only_layers": only})
        assert shape.dense_layers == sum(layer in only or (layer + 1) % step > 0 for layer in range(shape.layers))


@pytest.mark.parametrize("config", [[], None, "llama", 3])
def test_what_is_no_object_is_refused(config: Any) -> None:
    assert refusal(config).startswith("m/config.json must hold an object of fields, not ")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(
    key=st.sampled_from([*LLAMA, *GPT_OSS, *DEEPSEEK, *QWEN]),
    value=VALUES,
    base=st.sampled_from([LLAMA, GPT_OSS, DEEPSEEK, QWEN]),
)
def test_any_value_of_any_field_gives_a_shape_or_one_line(key: str, value: Any, base: dict[str, Any]) -> None:
    try:
        shape = ModelShape.from_config(base | {key: value})
    except KvbenchError as error:
        message = str(error)
    else:
        assert shape.parameters > 0 and shape.kv_bytes_per_token(2) > 0
        return
    assert message and "\n" not in message


@pytest.mark.parametrize(
    ("config", "bits"),
    [
        ({"quant_method": "mxfp4"}, 4.25),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 16384),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "fbgemm_fp8"}, 8),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 4 + 20 / 64),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
        ({"load_in_4bit": True}, 4.5),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}, 4.126953125),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, 8),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
            },
            8,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}},
            },
            4 + 16 / 128,
        ),
    ],
)
def test_bits_a_value_with_scales_and_zero_points(config: dict[str, Any], bits: float) -> None:
    assert read_quantisation(config, 32).bits == bits


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        ([], LINEAR),
        (["lm_head"], LINEAR),
        (["model.layers.*.self_attn", "model.layers.*.mlp.router"], {DENSE, SHARED, EXPERTS}),
        (["re:.*mlp.gate$", "re:.*shared_expert.*"], {ATTENTION, DENSE, EXPERTS}),
        ([f"model.layers.{layer}.self_attn.q_proj" for layer in range(32)], {DENSE, SHARED, EXPERTS}),
        (["model.layers.0.self_attn", "model.layers.1.self_attn"], LINEAR),
        (["re:.*block_sparse_moe.gate"], LINEAR),
    ],
)
def test_modules_that_are_not_quantised(names: list[str], parts: set[str]) -> None:
    assert read_quantisation({"quant_method": "fp8", "modules_to_not_convert": names}, 32).parts == parts


def test_a_head_is_quantised_only_where_the_scheme_takes_all_matrices() -> None:
    whole = {"quant_method": "modelopt", "quant_algo": "FP8"}
    assert HEAD in read_quantisation(whole, 32).parts
    assert HEAD not in read_quantisation(whole | {"exclude_modules": ["lm_head"]}, 32).parts
    assert HEAD in read_quantisation({"quant_method": "gptq", "bits": 4, "lm_head": True}, 32).parts


def test_int4_weights_by_hand() -> None:
    """Llama 3.1 8B in AWQ: 6.98e9 values in layers' matrices at 4.15625 bits, the rest in 16."""
    shape = ModelShape.from_config(
        LLAMA | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    )
    layers = 32 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert sum(shape.part_bytes(2).values()) == layers * 4.15625 / 8 + 2 * (2 * 128256 * 4096 + 65 * 4096)


def test_a_folder_and_a_file_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "other.json").write_text(json.dumps(GPT_OSS))
    assert load_shape(str(folder)).name == load_shape(str(folder / "config.json")).name == "my-model"
    assert load_shape(str(folder)).source == str(folder / "config.json")
    assert load_shape(str(tmp_path / "other.json")).experts == 32


@pytest.mark.parametrize(
    "name",
    ["llama-3.1-8b", "META-LLAMA/Llama-3.1-8B", " Llama-3.1-8B ", "unsloth/llama-3.1-8b-instruct",
     "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"],
)  # fmt: skip
def test_a_name_in_any_case_and_a_hub_name_are_found(name: str) -> None:
    assert load_shape(name).name == "Llama-3.1-8B"


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    cases = {str(tmp_path): "No such file", str(tmp_path / "none.json"): "No such file", str(bad): "is not JSON"}
    cases |= {
        "Lama-3.1-8B": "the nearest built-in shape is Llama-3.1-8B",
        "": "unknown model ''",
        "a/b/c": "unknown model",
    }
    cases |= {"~nobody-of-that-name": "unknown model", "x" * 5000: "unknown model", "\0": "unknown model"}
    cases |= {"org/none-of-them": "org/none-of-them is not built in, and nothing is downloaded here"}
    for content in ("{", "\ufeff{}", '{"a": 1', "[" * 100_000):
        bad.write_text(content)
        for name, says in cases.items():
            with pytest.raises(KvbenchError) as refused:
                load_shape(name)
            assert says in str(refused.value) and "\n" not in str(refused.value)
