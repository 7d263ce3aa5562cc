"""The Triton kernels in Triton's interpreter against attention's definition: not more than twice the error of plain
PyTorch in the same dtype. float16 and float32: of bfloat16 the interpreter multiplies the bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from test_attention import Problem, assert_exact_enough, blocks, drawn, served, slots

pytest.importorskip("triton")

from kvbench.contiguous.slots import Slots
from kvbench.engine.arena import Arena, KVShape
from kvbench.engine.attention import triton_path
from kvbench.engine.attention.configuration import Asked, Target, configuration, segments
from kvbench.engine.attention.layout import Layout
from kvbench.engine.attention.reference import attention
from kvbench.engine.attention.triton_path import TritonPath
from kvbench.paged.blocks import BlockPool

CPU = torch.device("cpu")
MAPS: dict[str, Callable[[], Slots | BlockPool]] = {"contiguous": slots, "paged": lambda: blocks(3)}
FLOATS = (torch.float16, torch.float32)
LENGTHS = (1, 19)
CHUNKS = (7, 1)


def close(problem: Problem, allocator: Slots | BlockPool, chunks: tuple[int, ...] = CHUNKS) -> None:
    assert_exact_enough(problem, served(problem, allocator, TritonPath, chunks))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", MAPS)
@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 256])
def test_heads_of_every_size(dim: int, layout: str, dtype: torch.dtype) -> None:
    close(Problem(LENGTHS, kv_heads=1, group=2, dim=dim, dtype=dtype), MAPS[layout]())


@pytest.mark.parametrize("group", [1, 3, 7, 8, 16, 32])
def test_groups_of_every_size(group: int) -> None:
    for number, layout in enumerate(MAPS.values()):
        close(Problem(LENGTHS, kv_heads=2, group=group, dtype=FLOATS[number]), layout())


@pytest.mark.parametrize("size", [1, 8, 16, 24, 48])
def test_blocks_of_every_size(size: int) -> None:
    close(Problem((5, 40), kv_heads=1, group=2), blocks(size), chunks=(17, 1))


@pytest.mark.parametrize("layout", MAPS)
@pytest.mark.parametrize("window", [1, 6, 18])
def test_a_window_hides_what_lies_before_it(window: int, layout: str) -> None:
    close(Problem((17, 19), kv_heads=1, group=2, window=window), MAPS[layout](), chunks=(5, 1))


@pytest.mark.parametrize("layout", MAPS)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(1.5, False), (None, True), (1.5, True)])
def test_soft_caps_and_sinks(softcap: float | None, with_sinks: bool, window: int | None, layout: str) -> None:
    problem = Problem(LENGTHS, kv_heads=1, window=window, softcap=softcap, with_sinks=with_sinks)
    close(problem, MAPS[layout]())


@pytest.mark.parametrize("pieces", [2, 8])
@pytest.mark.parametrize("layout", MAPS)
def test_keys_in_pieces_some_of_them_empty(layout: str, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_path, "segments", lambda *_: pieces)
    for more in ({}, {"with_sinks": True, "window": 40}):
        close(Problem((1, 47), kv_heads=1, group=2, **more), MAPS[layout](), chunks=(46, 1))  # type: ignore[arg-type]


def test_a_long_sequence_is_cut_by_itself() -> None:
    """260 keys, four turns of 64 and one of 4, in two pieces, and a prompt of several tiles."""
    assert segments(1, 1, 260, 64, "cuda") == 2
    pool = BlockPool(480, 16)
    close(Problem((260,), kv_heads=1, group=1, dtype=torch.float16), pool, chunks=(259, 1))


@pytest.mark.parametrize("layout", MAPS)
@pytest.mark.parametrize("problem", [Problem(LENGTHS, window=6), Problem(LENGTHS, softcap=1.5, with_sinks=True)])
def test_what_lies_in_unused_rows_changes_no_bit(problem: Problem, layout: str) -> None:
    over_nan, over_much = (served(problem, MAPS[layout](), TritonPath, CHUNKS, fill) for fill in (math.nan, 1e30))
    for first, second in zip(over_nan, over_much, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("layout", MAPS)
def test_a_neighbour_of_nan_changes_no_bit(layout: str) -> None:
    problem = Problem(LENGTHS, kv_heads=1)
    calm, rough = (served(one, MAPS[layout](), TritonPath, CHUNKS) for one in (problem, replace(problem, spoilt=(0,))))
    assert rough[0].isnan().all() and torch.equal(calm[1], rough[1])


def one_sequence(tokens: int) -> Layout:
    """A prompt that lies in rows 2 and on."""
    import numpy as np

    whole = torch.tensor([tokens], dtype=torch.int32)
    return Layout(
        starts=torch.tensor([0, tokens], dtype=torch.int32),
        ends=whole,
        writes=torch.arange(2, tokens + 2),
        queries=np.array([tokens]),
        keys=np.array([tokens]),
        longest_queries=tokens,
        longest_keys=tokens,
        bases=torch.tensor([2]),
    )


def test_bytes_are_rounded_as_torch_rounds_them_and_read_exactly() -> None:
    """Every e4m3 number, the midpoints between two, subnormals, and what is beyond the largest."""
    values = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (values[1:] + values[:-1]) / 2
    numbers = torch.cat([values, between, between * (1 + 1e-6), between * (1 - 1e-6), values * 1.37, values * 1e-3])
    numbers = torch.cat([numbers, -numbers, torch.tensor([449.0, 464.0, -1e9])])
    numbers = torch.cat([numbers, torch.zeros(-len(numbers) % 64)]).view(-1, 1, 64)
    arena = Arena(KVShape(1, 1, 64), len(numbers) + 3, torch.float8_e4m3fn, CPU)
    path = TritonPath(arena, len(numbers))
    path._write(one_sequence(len(numbers)), 0, numbers, -numbers)
    expected = numbers.clamp(-448, 448).to(torch.float8_e4m3fn)
    rows = slice(2, len(numbers) + 2)
    assert torch.equal(arena.k[0][rows].float(), expected.float())
    assert torch.equal(arena.v[0][rows].float(), -expected.float())
    # attending to one key alone reads its value back
    query = torch.zeros(1, 1, 64)
    for row in (0, len(numbers) - 1):
        alone = replace(one_sequence(1), writes=torch.tensor([row + 2]), bases=torch.tensor([row + 2]))
        found = path._attend(alone, 0, query, 1.0, None, None, None)
        assert torch.equal(found, -expected[row : row + 1].float())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_eight_bits_cost_what_the_format_costs_and_nothing_else(dtype: torch.dtype) -> None:
    """Against the definition over the keys and values that the format leaves, with a scale for each head."""
    problem = Problem((21,), kv_heads=2, group=2, dtype=dtype)
    tensors = drawn(problem)
    q, k, v = tensors.q[0], tensors.k[0], tensors.v[0]
    scales = torch.tensor([0.5, 0.02]), torch.tensor([0.25, 3.0])
    arena = Arena(KVShape(1, 2, 64), 24, torch.float8_e4m3fn, CPU)
    path = TritonPath(arena, 24, k_scales=scales[0], v_scales=scales[1])
    found = path.attend(one_sequence(21), 0, q, k, v, scale=64**-0.5, window=None, softcap=None, sinks=None)
    kept = [
        (x.float() / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale[:, None]
        for x, scale in zip((k, v), scales, strict=True)
    ]
    exact = attention(q, *kept, scale=64**-0.5)
    assert (found.double() - exact).abs().max() <= (2e-5 if dtype == torch.float32 else 1e-2)


def test_what_breaks_the_contract_is_noticed() -> None:
    arena = Arena(KVShape(1, 2, 64), 12, torch.float32, CPU)
    path, layout = TritonPath(arena, 10), one_sequence(3)
    q, k = torch.zeros(3, 4, 64), torch.zeros(3, 2, 64)
    how = {"scale": 1.0, "window": None, "softcap": None, "sinks": None}
    bad = [
        (layout, q.half(), k, k, how),
        (layout, q[:2], k, k, how),
        (layout, torch.zeros(3, 3, 64), k, k, how),
        (layout, torch.zeros(3, 64, 4).transpose(1, 2), k, k, how),
        (layout, q, k[:, :1], k, how),
        (layout, q, k, k, how | {"window": 0}),
        (layout, q, k, k, how | {"softcap": 0.0}),
        (layout, q, k, k, how | {"sinks": torch.zeros(3)}),
        (replace(layout, bases=None), q, k, k, how),
        (replace(layout, tables=torch.zeros(1, 4, dtype=torch.int32)), q, k, k, how),
        (replace(layout, keys=layout.keys * 0), q, k, k, how),
    ]
    path.attend(layout, 0, q, k, k, **how)  # type: ignore[arg-type]
    for broken, *tensors, words in bad:
        with pytest.raises(AssertionError):
            path.attend(broken, 0, *tensors, **words)  # type: ignore[arg-type]


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_configuration_fits_every_card_and_every_model(itemsize: int, decode: bool) -> None:
    targets = [Target("cuda", arch) for arch in (75, 80, 86, 89, 90, 100, 120)] + [Target("hip", "gfx942")]
    for target in targets:
        for dim in (64, 80, 96, 112, 128, 192, 256):
            for group in (1, 3, 7, 8, 16, 32, 71):
                found = configuration(Asked(2 * group, 2, dim, itemsize, decode, paged=True), target)
                assert found.queries(group) >= 1 and found.dim_pad >= dim
                for size in (found.tile_m, found.tile_n, found.dim_pad):
                    assert size >= 16 and size & (size - 1) == 0


def test_keys_are_cut_only_where_there_is_room_and_use() -> None:
    assert segments(256, 8, 100_000, 64, "cuda") == 1  # enough programs already
    assert segments(1, 8, 100, 64, "cuda") == 1  # too short
    assert segments(1, 8, 100_000, 64, "cuda") == 16
    assert segments(4, 8, 100_000, 64, "cuda") == 8
    assert segments(1, 8, 520, 64, "cuda") == 4
