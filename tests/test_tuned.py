"""A tuned model computes what its own code does: fused where its kind is known, packed everywhere, nothing twice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fakes_device import answer, arena_for, cache_for
from test_parity import BACKENDS, LIMITS, NEW_TOKENS, case
from tiny_models import departures
from torch import nn

from kvbench.engine import decoder, linear
from kvbench.engine.attention.paths import choose
from kvbench.engine.decoder import KIND
from kvbench.engine.linear import Linear, pack, packable
from kvbench.engine.model import FAMILIES, BoundModel, Dense

DTYPES = (torch.float32, torch.bfloat16)


def tuned(family: str, dtype: torch.dtype = torch.float32) -> BoundModel:
    module: Any = copy.deepcopy(case(family).pair.model.module).to(dtype)
    model = BoundModel(module, module.config)
    model.tune()
    return model


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_tokens_of_a_tuned_model_equal_those_of_generate(family: str) -> None:
    this, model = case(family), tuned(family)
    assert model.fused == (type(model.module).__name__ in KIND)
    for backend in BACKENDS:
        allocator = BACKENDS[backend]()
        path = choose("auto", model.device, model.dtype, model.kv.head_dim).make
        cache = cache_for(allocator, arena_for(allocator, model.kv), path)
        run = answer(model, allocator, this.prompts, new_tokens=NEW_TOKENS, limits=LIMITS, cache=cache)
        assert departures(run, this.expected) == []


def test_the_main_kinds_are_fused() -> None:
    assert {type(case(family).pair.model.module).__name__ for family in ("llama", "mistral", "qwen2", "qwen3")} == KIND


def logits(model: BoundModel) -> torch.Tensor:
    ids = torch.arange(3, 20)
    return model.forward(ids, torch.arange(len(ids)), torch.tensor([5, 16]), Dense())


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_fused_logits_in_bfloat16_are_as_near_as_the_format_allows(family: str) -> None:
    module: Any = copy.deepcopy(case(family).pair.model.module)
    exact = logits(BoundModel(module, module.config))
    half: Any = copy.deepcopy(module).to(torch.bfloat16)
    own = (logits(BoundModel(half, half.config)).float() - exact).abs().max()
    fused = tuned(family, torch.bfloat16)
    assert fused.fused
    assert (logits(fused).float() - exact).abs().max() <= 1.5 * own


def test_a_decoder_that_gives_other_logits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "_turned", lambda x, cos, sin: x)  # it forgets where tokens stand
    this, model = case("llama"), tuned("llama")
    assert not model.fused
    run = answer(model, BACKENDS["contiguous"](), this.prompts, new_tokens=NEW_TOKENS, limits=LIMITS)
    assert departures(run, this.expected) == []


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_no_weight_is_there_twice_but_a_tied_head(family: str) -> None:
    module: Any = copy.deepcopy(case(family).pair.model.module)
    model = BoundModel(module, module.config)
    before = (model.parameters, model.fingerprint, model.nbytes)
    head, embedding = module.lm_head.weight, module.get_input_embeddings().weight
    copied = head.nbytes if head is embedding and packable(head) else 0
    model.tune()
    assert (model.parameters, model.fingerprint) == before[:2]
    assert model.nbytes == before[2] + copied
    left = [one for one in model.module.modules() if type(one) is nn.Linear and one.weight is not embedding]
    assert left or not model.fused
    assert all(one.weight.numel() == 0 or not packable(one.weight) for one in left)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_joined_product_is_its_parts_side_by_side(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(1)
    parts = [nn.Linear(24, out, bias=bias, dtype=dtype) for out in (5, 8, 3)]
    wide = torch.randn(7, 48, dtype=dtype)
    with torch.inference_mode():
        for x in (wide[:, :24], wide[:1, ::2], wide.view(7, 2, 24)):
            expected = torch.cat([part(x) for part in parts], dim=-1)
            whole = Linear(copy.deepcopy(parts))
            to = torch.randn_like(expected)
            near = 1e-5 if dtype == torch.float32 else 0.02  # a sum is rounded once where its parts are rounded twice
            torch.testing.assert_close(whole(x), expected, atol=near, rtol=near)
            torch.testing.assert_close(whole.added(x, to), expected + to, atol=near, rtol=near)
        assert whole.out_features == 16


def test_parts_give_up_their_weights_unless_others_read_them() -> None:
    own, tied = nn.Linear(8, 4), nn.Linear(8, 4)
    assert Linear([own]).copied_bytes == 0 and own.weight.numel() == 0
    kept = Linear([tied], shared=True)
    assert tied.weight.shape == (4, 8)
    assert kept.copied_bytes == (tied.weight.nbytes if packable(tied.weight) else 0)


def test_where_nothing_packs_the_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_packs", lambda dtype: False)
    module = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    first = module[0]
    assert pack(module, None) == 0 and module[0] is first
    torch.manual_seed(2)
    parts = [nn.Linear(8, 4), nn.Linear(8, 4)]
    x = torch.randn(3, 8)
    with torch.inference_mode():
        expected = torch.cat([part(x) for part in parts], dim=-1)
        whole = Linear(parts)
        torch.testing.assert_close(whole(x), expected)
        torch.testing.assert_close(whole.added(x, expected), 2 * expected)
    model = tuned("qwen2")
    assert model.fused and model.nbytes == BoundModel(case("qwen2").pair.model.module, model.config).nbytes


def test_a_build_of_torch_without_these_operations_packs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    linear._packs.cache_clear()
    monkeypatch.setattr(linear, "_pack", lambda weight: (_ for _ in ()).throw(RuntimeError("no such operation")))
    assert not linear._packs(torch.float32)
    linear._packs.cache_clear()
