"""Cases that broke other engines and that no other file of tests holds (docs/cases.md has them all): which rows of the
arena a step touches, rows beyond the reach of 32 bits, and prompts at the edge of what fits, from the command line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from fakes import CACHED_KINDS, KINDS, make_pool, request, rows_of, serve_on
from fakes_device import answer, arena_for, cache_for
from test_attention import LAYOUTS
from test_sweep import sweep
from tiny_models import tiny_config, tiny_pair
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvbench.contiguous.cache import SlotCache
from kvbench.contiguous.slots import Slots
from kvbench.engine.arena import Arena, KVShape
from kvbench.engine.interfaces import Cache
from kvbench.engine.scheduler import Limits
from kvbench.engine.sequence import Sequence
from kvbench.engine.types import Batch, Chunk, Request
from kvbench.engine.weights import quiet
from kvbench.metrics.records import FINISHED, REJECTED
from kvbench.paged.blocks import BlockPool
from kvbench.paged.cache import BlockCache
from kvbench.workloads.load import ClosedLoop

PAIR = tiny_pair("llama")


def bits(memory: Tensor) -> Tensor:
    """[rows, values of a row] as integers: two NaN are equal too."""
    return memory.view(torch.int32).flatten(1)


class WatchedArena(Arena):
    """Notes which rows each write changes. Nothing else may write to an arena."""

    changed: list[set[int]]

    def write(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        before = torch.cat([bits(self.k[layer]), bits(self.v[layer])], dim=1)
        super().write(layer, rows, k, v)
        after = torch.cat([bits(self.k[layer]), bits(self.v[layer])], dim=1)
        self.changed.append(set((before != after).any(dim=1).nonzero().flatten().tolist()))


@pytest.mark.parametrize("kind", ["max", "declared", "paged-1", "paged-3", "cached-3"])
def test_a_step_writes_the_rows_of_its_own_tokens_and_no_other(kind: str) -> None:  # vllm#43810, vllm PR#57094
    """Over memory full of NaN, through chunks, preemptions and hits; the rows for padding stay untouched to the end."""
    prompts = [[*range(2 + 5 * number), 50 + number] for number in range(5)]
    pool = make_pool(kind, 48 if "-" in kind else 96, 40)
    arena = arena_for(pool, PAIR.model.kv, kind=WatchedArena)
    assert isinstance(arena, WatchedArena)
    arena.changed = []
    inner, expected = cache_for(pool, arena), list[set[int]]()
    begin = inner.begin

    def noting(batch: Batch) -> None:
        begin(batch)
        mine = [row for chunk in batch.chunks for row in rows_of(pool, chunk.sequence, chunk.end)[chunk.start :]]
        assert len(set(mine)) == len(mine) == batch.tokens, "two tokens in one row"
        for memory in (*arena.k, *arena.v):
            memory[mine] = math.nan  # so that writing what was there before shows too
        expected.append(set(mine))

    inner.begin = noting  # type: ignore[method-assign]
    run = answer(PAIR.model, pool, prompts, new_tokens=12, limits=Limits(40, 9, 4), cache=inner)
    assert all(one.status == FINISHED for one in run.requests) and len(expected) == len(run.steps)
    assert "-" not in kind or sum(one.preemptions for one in run.requests) > 0
    assert not kind.startswith("cached") or sum(one.cached_tokens for one in run.requests) > 0
    layers = PAIR.model.kv.layers
    for step, rows in enumerate(expected):
        for found in arena.changed[step * layers : (step + 1) * layers]:
            assert found == rows
    padding = range(pool.block_size) if isinstance(pool, BlockPool) else range(pool.pool_tokens, arena.rows)
    assert all(part[list(padding)].isnan().all() for part in (*arena.k, *arena.v))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("row", [-1, 10**9])
def test_a_row_outside_the_arena_is_refused_and_writes_nothing(row: int, layout: str) -> None:  # vllm#43810
    arena = arena_for(LAYOUTS[layout](), KVShape(1, 2, 4), fill=0.0)
    ones = torch.ones(1, 2, 4)
    with pytest.raises(IndexError):
        arena.write(0, torch.tensor([row]), ones, ones)
    assert not arena.k[0].any() and not arena.v[0].any()


class SparseArena(Arena):
    """An arena in files with holes: only pages that are written take any room."""

    def __init__(self, shape: KVShape, rows: int, dtype: torch.dtype, folder: Path) -> None:
        self.shape, self.rows, self.nbytes = shape, rows, rows * shape.bytes_per_token(dtype.itemsize)
        size = (rows, shape.kv_heads, shape.head_dim)
        self.k, self.v = (
            (torch.from_file(str(folder / name), shared=True, size=math.prod(size), dtype=dtype).view(size),)
            for name in "kv"
        )


@pytest.mark.parametrize("kind", ["max", "paged-16"])
def test_rows_beyond_32_bits_are_the_right_ones(kind: str, tmp_path: Path) -> None:  # vllm PR#47671
    """A sequence behind a first one of a million rows: its values lie beyond index 2**31, its bytes beyond 2**32. They
    are found in the file where they must be, and attention is bit-equal to that over a small arena."""
    shape, dtype, first = KVShape(1, 8, 256), torch.bfloat16, 2**20
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(40, heads, 256, generator=draw).to(dtype) for heads in (16, 8, 8))

    def attended(pool: Slots | BlockPool, arena: Arena) -> Tensor:
        sequence = Sequence.of(Request(1, (0,) * 40, 1))
        assert pool.reserve(sequence, 40)
        cache: Cache = SlotCache(arena, pool, 64) if isinstance(pool, Slots) else BlockCache(arena, pool, 64)
        out = []
        for start, end in ((0, 33), (33, 39), (39, 40)):
            cache.begin(Batch(0, (Chunk(sequence, start, end, samples=False),)))
            out.append(cache.attend(0, q[start:end], k[start:end], v[start:end], scale=1 / 16))
        return torch.cat(out)

    small = make_pool(kind, 64, 64)
    expected = attended(small, arena_for(small, shape, dtype))
    large = make_pool(kind, 2 * first, first)
    assert large.reserve(Sequence.of(Request(0, (0,) * first, 1)), first)
    row = first + (16 if kind == "paged-16" else 0)  # block 0 is for padding
    assert row * 8 * 256 >= 2**31
    found = attended(large, SparseArena(shape, first + 128, dtype, tmp_path))
    assert torch.equal(found, expected)
    for name, values in (("k", k), ("v", v)):
        with (tmp_path / name).open("rb") as file:
            file.seek(row * 8 * 256 * 2)
            assert file.read(values.nbytes) == values.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("kind", [*KINDS, *CACHED_KINDS])
@pytest.mark.parametrize("truncate", [False, True])
def test_a_prompt_of_which_nothing_would_be_left_is_rejected_by_name(kind: str, truncate: bool) -> None:
    """evalchemy#152"""
    requests = [request(0, 20, 31), request(1, 20, 32), request(2, 1, 32), request(3, 1, 31), request(4, 20, 40)]
    run, *_ = serve_on(make_pool(kind, 512, 32), ClosedLoop(requests, 1), Limits(32, truncate=truncate))
    cut, none, one, fits, longer = run.requests
    assert fits.status == FINISHED and fits.truncated_tokens == 0
    if truncate:
        assert (cut.status, cut.input_tokens, cut.truncated_tokens) == (FINISHED, 1, 19)
    for rejected in (none, one, longer):
        assert (rejected.status, rejected.output_tokens, rejected.truncated_tokens) == (REJECTED, 0, 0)
        assert ("nothing of the prompt would be left" in rejected.reason) == truncate
        assert f"{rejected.input_tokens} tokens and {rejected.max_tokens} declared" in rejected.reason


EDGE = (
    *("--model", "tiny", "--dtype", "float32", "--max-model-len", "12"),
    *("--concurrency", "2", "--num-prompts", "3", "--repeats", "1", "--num-warmups", "0"),
)


@pytest.mark.parametrize("overflow", ["reject", "truncate"])
def test_prompts_around_the_longest_from_the_command_line(  # vllm#16445
    overflow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = sweep(*EDGE, "--input-len", "11,12,13", "--output-len", "1", "--overflow", overflow)
    rows = folder.rows()
    assert sorted(row["input_tokens"] for row in rows) == [11, 11, 12, 12, 13, 13]
    for row in rows:
        if row["input_tokens"] > 11 and overflow == "reject":
            assert (row["status"], row["requests_rejected"], row["ttft_p50_s"]) == ("rejected", 3, None)
            assert f"prompt of {row['input_tokens']} tokens and 1 declared go beyond max_model_len 12" in row["reason"]
        else:
            assert (row["status"], row["requests_finished"]) == ("ok", 3)
            assert row["requests_truncated"] == (3 if row["input_tokens"] > 11 else 0)
            assert [one.input_tokens for one in folder.run(row["cell"]).requests] == [11] * 3


def test_an_answer_that_leaves_no_room_for_a_prompt_ends_with_1_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """evalchemy#152"""
    monkeypatch.chdir(tmp_path)
    flags = ("--input-len", "5", "--output-len", "12", "--overflow", "truncate")
    for row in sweep(*EDGE, *flags, code=1).rows():
        assert row["status"] == "rejected" and "nothing of the prompt would be left" in row["reason"]


def test_a_model_that_overflows_fails_its_cells_and_gives_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm#14126: real weights that overflow fp16, through the command line."""
    quiet()
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(tiny_config("olmo2")).save_pretrained("model")
    flags = ("--model", "./model", "--input-len", "8", "--output-len", "4", "--concurrency", "2", "--repeats", "1")
    folder = sweep(*flags, "--num-warmups", "0", "--dtype", "float16", code=1)
    for row in folder.rows():
        assert row["status"] == "failed" and "logits that are NaN or infinite" in row["reason"]
        assert not folder.has_run(row["cell"]) and "output_tokens_per_s" not in row
