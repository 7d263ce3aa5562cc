"""Which way of attention a device gets and why, the self-test that `kvbench doctor` runs, and what torch's own kernel
for ranges is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_attention import Problem, assert_exact_enough, drawn, served, slots
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvbench.cli.app import main
from kvbench.engine.attention import cpu_path, paths, varlen_path
from kvbench.engine.attention.paths import AUTO, FASTEST, PATHS, WORDS, choose, make_path
from kvbench.engine.attention.selftest import try_paths
from kvbench.engine.attention.torch_path import TorchPath
from kvbench.engine.attention.varlen_path import VarlenPath
from kvbench.errors import KvbenchError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_every_path_is_described_and_made() -> None:
    assert set(PATHS) == set(WORDS) == set(paths._MAKERS) and set(FASTEST.values()) < set(PATHS)


def test_a_gpu_gets_triton_and_may_be_asked_for_varlen() -> None:
    pytest.importorskip("triton")
    assert choose(AUTO, GPU, torch.bfloat16, 128).name == "triton"
    assert choose("varlen", GPU, torch.bfloat16, 128).make is VarlenPath
    assert choose(AUTO, GPU, torch.float64, 128).name == "torch"


def test_what_cannot_be_had_says_why_and_auto_takes_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_path, "kernels", lambda: "no C++ compiler: install g++")
    found = choose(AUTO, CPU, torch.float32, 64)
    assert found.name == "torch" and "no C++ compiler: install g++" in found.why
    with pytest.raises(KvbenchError, match=r"--attention cpp cannot be had: no C.. compiler.*--attention auto"):
        choose("cpp", CPU, torch.float32, 64)


@pytest.mark.parametrize(
    ("name", "device", "dtype", "dim", "why"),
    [
        ("cpp", GPU, torch.float32, 64, "not on cuda"),
        ("cpp", CPU, torch.float16, 64, "not float16"),
        ("cpp", CPU, torch.float32, 512, "at most 256"),
        ("triton", CPU, torch.float32, 64, "not on cpu"),
        ("triton", GPU, torch.float64, 64, "not float64"),
        ("varlen", CPU, torch.bfloat16, 64, "not on cpu"),
        ("varlen", GPU, torch.float32, 64, "not float32"),
        ("varlen", GPU, torch.bfloat16, 512, "at most 256"),
    ],
)
def test_obstacles_are_named(name: str, device: torch.device, dtype: torch.dtype, dim: int, why: str) -> None:
    found = make_path(name, device, dtype, dim)
    assert isinstance(found, str) and why in found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_self_test_passes_here(dtype: torch.dtype) -> None:
    found = {one.path: one for one in try_paths(CPU, dtype)}
    assert set(found) == set(PATHS) and not any(one.wrong for one in found.values())
    assert found["torch"].available and not found["triton"].available


class Shifted(TorchPath):
    """Reads one row too far."""

    def attend(self, layout: Any, layer: int, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        return super().attend(layout, layer, q, k.roll(1, 0), v.roll(1, 0), **how)


class Broken(TorchPath):
    def attend(self, *_: Any, **__: Any) -> Tensor:
        raise RuntimeError("CUDA error:\nno kernel image is available")


@pytest.mark.parametrize(("kind", "said"), [(Shifted, "off by"), (Broken, "it failed: RuntimeError: CUDA error: no")])
def test_the_self_test_notices_wrong_numbers_and_failures(
    kind: type[TorchPath], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(paths._MAKERS, "torch", lambda *_: kind)
    (found,) = [one for one in try_paths(CPU, torch.float32) if one.path == "torch"]
    assert found.wrong and found.said.startswith(said)


def by_ranges(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
) -> Tensor:
    """What torch says that its kernel does, a sequence at a time."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == seqused_k.dtype == torch.int32 and window_size[1] == 0
    assert max_q == int(cu_seq_q.diff().max()) and max_k == int(seqused_k.max())
    assert enable_gqa == (query.shape[1] != key.shape[1])
    out = []
    for number, length in enumerate(seqused_k.tolist()):
        first, end, begin = int(cu_seq_q[number]), int(cu_seq_q[number + 1]), int(cu_seq_k[number])
        k, v = (x[begin : begin + length].transpose(0, 1) for x in (key, value))
        position = torch.arange(length - (end - first), length)[:, None]
        seen = torch.arange(length) <= position
        if window_size[0] >= 0:
            seen &= torch.arange(length) >= position - window_size[0]
        q = query[first:end].transpose(0, 1)
        found = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        out.append(found.transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("window", [None, 6])
def test_torchs_kernel_for_ranges_is_given_what_it_asks_for(
    window: int | None, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", by_ranges)
    problem = Problem((1, 7, 33), group=group, window=window)
    drawn(problem)
    assert_exact_enough(problem, served(problem, slots(), VarlenPath, (5, 1, 9)))


def test_ranges_are_refused_where_rows_are_scattered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(varlen_path, "why_not", lambda *_: None)
    with pytest.raises(SystemExit) as end:
        main(["sweep", "--model", "tiny", "--device", "cpu", "--attention", "varlen", "--dry-run"])
    assert end.value.code == 2
    assert "reads ranges of rows, which paged does not keep; add --backend contiguous" in capsys.readouterr().err
