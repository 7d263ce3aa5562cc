"""Attention through both caches against its definition: not more than twice the error of plain PyTorch in the same
dtype, wherever the rows lie and whatever lies between them."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from fakes_device import arena_for, cache_for
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvbench.contiguous.slots import Slots
from kvbench.engine.arena import KVShape
from kvbench.engine.attention.cpu_path import CppPath, why_not
from kvbench.engine.attention.layout import PathMaker
from kvbench.engine.attention.reference import attention
from kvbench.engine.attention.torch_path import TorchPath
from kvbench.engine.sequence import Sequence
from kvbench.engine.types import Batch, Chunk, Request
from kvbench.paged.blocks import BlockPool

POOL = 26 * 48  # whole blocks of every size below
LONGEST = 64


@dataclass(frozen=True, slots=True)
class Problem:
    """Some sequences, their heads, and what attention is asked for. Those in `spoilt` are nothing but NaN."""

    lengths: tuple[int, ...]
    kv_heads: int = 2
    group: int = 3
    dim: int = 64
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    with_sinks: bool = False
    spoilt: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Tensors:
    """For each sequence q [L, Hq, D], k and v [L, Hkv, D]; the sinks [Hq]; and the output by definition, in float64."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    sinks: Tensor | None
    exact: list[Tensor]


@functools.cache
def drawn(problem: Problem) -> Tensors:
    random_numbers = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random_numbers).to(problem.dtype)

    heads = problem.kv_heads * problem.group
    q = [2 * normal(length, heads, problem.dim) for length in problem.lengths]
    k = [normal(length, problem.kv_heads, problem.dim) for length in problem.lengths]
    v = [normal(length, problem.kv_heads, problem.dim) for length in problem.lengths]
    sinks = normal(heads) if problem.with_sinks else None
    for number in problem.spoilt:
        for part in (q, k, v):
            part[number].fill_(math.nan)
    options = {"window": problem.window, "softcap": problem.softcap, "sinks": sinks}
    exact = [attention(*qkv, scale=problem.dim**-0.5, **options) for qkv in zip(q, k, v, strict=True)]  # type: ignore[arg-type]
    return Tensors(q, k, v, sinks, exact)


def plain(problem: Problem, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """One whole sequence as anybody would write it in PyTorch, in its own dtype."""
    q, k, v = (part.transpose(0, 1) for part in (q, k, v))
    k, v = (part.repeat_interleave(problem.group, dim=0) for part in (k, v))
    position = torch.arange(q.shape[1])
    seen = position <= position[:, None]
    if problem.window is not None:
        seen &= position > position[:, None] - problem.window
    if problem.softcap is None and sinks is None:
        fused: Tensor = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=problem.dim**-0.5)
        return fused.transpose(0, 1)
    scores = q @ k.transpose(1, 2) * problem.dim**-0.5
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, q.shape[1], 1)], dim=-1)
    out: Tensor = scores.softmax(-1)[..., : k.shape[1]] @ v
    return out.transpose(0, 1)


def slots() -> Slots:
    """Ranges of which the first is taken."""
    pool = Slots(POOL, LONGEST)
    assert pool.reserve(sequence(900, 1), 1)
    return pool


def blocks(block_size: int) -> BlockPool:
    """Blocks that will be handed out in random order."""
    pool = BlockPool(POOL, block_size)
    singles = [sequence(900 + number, 1) for number in range(pool.blocks)]
    assert all(pool.reserve(single, 1) for single in singles)
    random.Random(3).shuffle(singles)
    for single in singles:
        pool.free(single)
    return pool


LAYOUTS: dict[str, Callable[[], Slots | BlockPool]] = {
    "contiguous": slots,
    "paged-1": lambda: blocks(1),
    "paged-3": lambda: blocks(3),
    "paged-16": lambda: blocks(16),
}


PATHS: dict[str, PathMaker] = {"torch": TorchPath, "cpp": CppPath}


def sequence(number: int, length: int) -> Sequence:
    return Sequence.of(Request(number, (0,) * length, 1))


def served(
    problem: Problem,
    allocator: Slots | BlockPool,
    path: str | PathMaker,
    chunks: tuple[int, ...],
    fill: float = math.nan,
) -> list[Tensor]:
    """Each sequence's output [L, Hq, D], computed in batches that give every unfinished sequence one chunk, `chunks`
    tokens long in turn. Layer 0 attends without a window, layer 1 as the problem says."""
    tensors = drawn(problem)
    arena = arena_for(allocator, KVShape(2, problem.kv_heads, problem.dim), problem.dtype, fill=fill)
    if path == "cpp" and (obstacle := why_not(arena.k[0].device, problem.dtype, problem.dim)):
        pytest.skip(obstacle)
    cache = cache_for(allocator, arena, PATHS[path] if isinstance(path, str) else path)
    sequences = [sequence(number, length) for number, length in enumerate(problem.lengths)]
    outputs: list[list[Tensor]] = [[] for _ in sequences]
    options = {"scale": problem.dim**-0.5, "softcap": problem.softcap, "sinks": tensors.sinks}
    sizes = itertools.cycle(chunks)
    while batch := _batch([one for one in sequences if one.computed < one.known], allocator, sizes):
        cache.begin(batch)
        q, k, v = (
            torch.cat([whole[chunk.sequence.id][chunk.start : chunk.end] for chunk in batch.chunks])
            for whole in (tensors.q, tensors.k, tensors.v)
        )
        cache.attend(0, q, k, v, **options)
        out = cache.attend(1, q, k, v, window=problem.window, **options)
        for chunk, part in zip(batch.chunks, out.split([chunk.length for chunk in batch.chunks]), strict=True):
            chunk.sequence.computed = chunk.end
            outputs[chunk.sequence.id].append(part)
    return [torch.cat(parts) for parts in outputs]


def _batch(unfinished: list[Sequence], allocator: Slots | BlockPool, sizes: itertools.cycle[int]) -> Batch | None:
    chunks = []
    for one in unfinished:
        end = min(one.known, one.computed + next(sizes))
        assert allocator.reserve(one, end)
        chunks.append(Chunk(one, one.computed, end, samples=end == one.known))
    return Batch(0, tuple(chunks)) if chunks else None


def assert_exact_enough(problem: Problem, outputs: list[Tensor]) -> None:
    tensors = drawn(problem)
    naive = [plain(problem, *qkv, tensors.sinks) for qkv in zip(tensors.q, tensors.k, tensors.v, strict=True)]
    ours, theirs = (
        max(float((found.double() - exact).abs().max()) for found, exact in zip(some, tensors.exact, strict=True))
        for some in (outputs, naive)
    )
    assert ours <= 2 * theirs


ODD_LENGTHS = (1, 7, 33)
FLOATS = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("group", "kv_heads"), [(1, 4), (3, 3), (7, 2), (8, 1)])
@pytest.mark.parametrize("dim", [64, 80, 96])
def test_heads_of_every_size(dim: int, group: int, kv_heads: int, dtype: torch.dtype, layout: str, path: str) -> None:
    problem = Problem(ODD_LENGTHS, kv_heads=kv_heads, group=group, dim=dim, dtype=dtype)
    assert_exact_enough(problem, served(problem, LAYOUTS[layout](), path, chunks=(5, 1, 9)))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chunk", [1, 5, 7, 18])
@pytest.mark.parametrize("window", [1, 6, 18])
def test_a_window_hides_what_lies_before_it(  # transformers PR#47708
    window: int, chunk: int, layout: str, path: str
) -> None:
    problem = Problem(tuple(range(1, 19)), kv_heads=1, group=2, window=window)
    assert_exact_enough(problem, served(problem, LAYOUTS[layout](), path, chunks=(chunk,)))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(1.5, False), (None, True), (1.5, True)])
def test_soft_caps_and_sinks(
    softcap: float | None, with_sinks: bool, window: int | None, dtype: torch.dtype, layout: str, path: str
) -> None:
    problem = Problem(ODD_LENGTHS, dtype=dtype, window=window, softcap=softcap, with_sinks=with_sinks)
    assert_exact_enough(problem, served(problem, LAYOUTS[layout](), path, chunks=(5, 1, 9)))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "problem", [Problem(ODD_LENGTHS, window=6), Problem(ODD_LENGTHS, softcap=1.5, with_sinks=True)]
)
def test_what_lies_in_unused_rows_changes_no_bit(problem: Problem, layout: str, path: str) -> None:  # vllm PR#47305
    over_nan, over_zero, over_much = (
        served(problem, LAYOUTS[layout](), path, chunks=(5, 1, 9), fill=fill) for fill in (math.nan, 0.0, 1e30)
    )
    for first, second, third in zip(over_nan, over_zero, over_much, strict=True):
        assert torch.equal(first, second) and torch.equal(first, third)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "problem", [Problem(ODD_LENGTHS, window=6), Problem(ODD_LENGTHS, softcap=1.5, with_sinks=True)]
)
@pytest.mark.parametrize("spoilt", [(0, 1), (2,)])
def test_a_neighbour_of_nan_changes_no_bit(  # vllm PR#47305, vllm PR#57094
    spoilt: tuple[int, ...], problem: Problem, layout: str, path: str
) -> None:
    """What a batch is padded with, or one broken sequence in it, is as good as not there for the others."""
    calm, rough = (
        served(one, LAYOUTS[layout](), path, chunks=(5, 1, 9)) for one in (problem, replace(problem, spoilt=spoilt))
    )
    for number, (expected, found) in enumerate(zip(calm, rough, strict=True)):
        assert found.isnan().all() if number in spoilt else torch.equal(found, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("group", "dim"), [(16, 112), (32, 128), (1, 256), (2, 8), (3, 20), (71, 64)])
def test_the_kernel_takes_heads_of_any_size(group: int, dim: int, dtype: torch.dtype, layout: str) -> None:
    problem = Problem(ODD_LENGTHS, kv_heads=1, group=group, dim=dim, dtype=dtype)
    assert_exact_enough(problem, served(problem, LAYOUTS[layout](), "cpp", chunks=(5, 1, 9)))


@pytest.mark.parametrize("block_size", [0, 1, 5, 16, 48, 100, 256])
@pytest.mark.parametrize("problem", [Problem((600,), kv_heads=1), Problem((600,), kv_heads=1, window=300)])
def test_the_kernel_splits_few_long_sequences(
    problem: Problem, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among many threads: a decode, a short chunk and a whole prompt, over blocks of any size (0: a range)."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for chunks in ((590, 1, 1, 8), (600,)):
        allocator = blocks(block_size) if block_size else Slots(POOL, 600)
        assert_exact_enough(problem, served(problem, allocator, "cpp", chunks=chunks))


def test_tables_are_really_shuffled() -> None:
    pool, one = blocks(3), sequence(0, 40)
    assert pool.reserve(one, 40)
    assert pool.table(one) != sorted(pool.table(one)) and len(set(pool.table(one))) == 14


def row(*values: float) -> Tensor:
    """[tokens, 1, 1]: one head of one dimension."""
    return torch.tensor(values, dtype=torch.float64).view(-1, 1, 1)


def test_reference_weighs_by_the_exponential_of_the_score() -> None:
    """Scores 0 and ln 3 weigh 1 : 3."""
    out = attention(row(0, 1), row(0, math.log(3)), row(4, 8), scale=1.0)
    assert out.flatten().tolist() == pytest.approx([4, (4 + 3 * 8) / 4])


def test_reference_scales_scores() -> None:
    out = attention(row(2), row(0, math.log(3)), row(4, 8), scale=0.5)
    assert out.flatten().tolist() == pytest.approx([7])


def test_reference_sees_no_later_token_and_nothing_before_the_window() -> None:
    q, k, v = row(0, 0, 0, 0), row(0, 0, 0, 0), row(1, 2, 4, 8)
    assert attention(q, k, v, scale=1.0).flatten().tolist() == pytest.approx([1, 3 / 2, 7 / 3, 15 / 4])
    assert attention(q, k, v, scale=1.0, window=2).flatten().tolist() == pytest.approx([1, 3 / 2, 3, 6])
    assert attention(q[:2], k, v, scale=1.0, window=1).flatten().tolist() == pytest.approx([4, 8])


def test_reference_caps_scores() -> None:
    """2 tanh(s / 2) is ln 3 where s = 2 artanh(ln 3 / 2)."""
    raw = 2 * math.atanh(math.log(3) / 2)
    out = attention(row(1), row(0, raw), row(4, 8), scale=1.0, softcap=2.0)
    assert out.flatten().tolist() == pytest.approx([7])


def test_reference_gives_a_sink_weight_and_no_value() -> None:
    """Scores 0 and ln 2 beside a sink of 0 weigh 1 : 2 : 1."""
    out = attention(row(1), row(0, math.log(2)), row(4, 8), scale=1.0, sinks=torch.zeros(1))
    assert out.flatten().tolist() == pytest.approx([(4 + 2 * 8) / 4])


def test_reference_gives_neighbouring_query_heads_one_key_head() -> None:
    out = attention(torch.zeros(1, 4, 1), torch.zeros(1, 2, 1), torch.tensor([[[3.0], [5.0]]]), scale=1.0)
    assert out.flatten().tolist() == [3, 3, 5, 5]


def test_reference_agrees_with_torch_in_float64() -> None:
    problem = Problem((17,), dtype=torch.float64, window=6)
    tensors = drawn(problem)
    torch.testing.assert_close(
        tensors.exact[0], plain(problem, tensors.q[0], tensors.k[0], tensors.v[0], None), rtol=1e-12, atol=1e-12
    )
