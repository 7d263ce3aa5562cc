"""Attention over the shared arena in Triton: one kernel for decode, chunks and whole prompts, for both address maps.

A program computes a tile of queries of one sequence for one key head, over one segment of its keys. The query heads of
a group stand beside each other in the tile's rows, so each key and value is read once for its whole group. Where there
are few tiles the keys are cut into segments, which a second kernel puts together. Nothing is chosen here: what is
constant at compile time comes from `configuration.py`.

Keys and values may be 8-bit floats (e4m3, no infinities), kept as bytes: their bits, moved into a float16, are the
value ÷ 256, on any card, exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
BYTE_SCALE = tl.constexpr(256.0)
BYTE_MAX = tl.constexpr(448.0)
ROUNDER = tl.constexpr(12582912.0)
"""1.5 x 2²³: added to a float32 below 2²² and taken away again it leaves the nearest whole number, ties to even."""


@triton.jit
def _from_bytes(bits):
    """e4m3 bytes as float16, ÷ 256."""
    wide = bits.to(tl.int16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def _to_bytes(x):
    """float32 as e4m3 bytes, the nearest (ties to even), beyond ±448 those."""
    x = tl.minimum(tl.maximum(x, -BYTE_MAX), BYTE_MAX)
    exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 0xFF, 127 - 6)  # below are its subnormals
    quantum = ((exponent - 3) << 23).to(tl.float32, bitcast=True)
    x = ((x / quantum + ROUNDER) - ROUNDER) * quantum
    half = (x / BYTE_SCALE).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return (((half >> 8) & 0x80) | ((half >> 7) & 0x7F)).to(tl.uint8)


@triton.jit
def _tanh(x):
    """By the exponential of what is not positive, so that nothing overflows."""
    small = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)


@triton.jit
def _row(key, sequence, bases, tables, width, PAGED: tl.constexpr, BLOCK: tl.constexpr):
    """The arena rows of a sequence's positions: the address map."""
    if PAGED:
        block = tl.load(tables + sequence.to(tl.int64) * width + key // BLOCK)
        return block.to(tl.int64) * BLOCK + key % BLOCK
    return tl.load(bases + sequence) + key.to(tl.int64)


@triton.jit
def write_kernel(
    k,
    v,
    cache_k,
    cache_v,
    writes,
    k_scales,
    v_scales,
    k_token,
    k_head,
    v_token,
    v_head,
    row_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Keys and values of one token and head go to the token's row."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, DIM_PAD)
    inside = column < DIM
    key = tl.load(k + token * k_token + head * k_head + column, mask=inside, other=0.0)
    value = tl.load(v + token * v_token + head * v_head + column, mask=inside, other=0.0)
    at = tl.load(writes + token) * row_stride + head * DIM + column
    if BYTES:
        key = _to_bytes(key.to(tl.float32) / tl.load(k_scales + head))
        value = _to_bytes(value.to(tl.float32) / tl.load(v_scales + head))
    tl.store(cache_k + at, key, mask=inside)
    tl.store(cache_v + at, value, mask=inside)


@triton.jit
def attention_kernel(
    q,
    cache_k,
    cache_v,
    out,
    part_max,
    part_sum,
    starts,
    ends,
    tiles,
    bases,
    tables,
    sinks,
    k_scales,
    v_scales,
    width,
    q_token,
    q_head,
    row_stride,
    scale,
    window,
    softcap,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    DECODE: tl.constexpr,
    PAGED: tl.constexpr,
    BYTES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Tile `program_id(0)` (of a decode batch: that sequence; else `tiles` [n, 2] names sequence and first query), key
    head 1, segment 2. With one segment `out` [T, Hq, D] is the result; with more it is float32 [T, Hq, SEGMENTS, D],
    each segment's sum over its own weights, beside the largest score and the sum of weights [T, Hq, SEGMENTS]."""
    kv_head = tl.program_id(1)
    segment = tl.program_id(2)
    if DECODE:
        sequence = tl.program_id(0)
        skipped = 0
    else:
        sequence = tl.load(tiles + 2 * tl.program_id(0))
        skipped = tl.load(tiles + 2 * tl.program_id(0) + 1)
    first = tl.load(starts + sequence)
    queries = tl.load(starts + sequence + 1) - first
    length = tl.load(ends + sequence)

    line = tl.arange(0, TILE_M)
    column = tl.arange(0, DIM_PAD)
    query = skipped + line // GROUP
    real = (query < queries) & (line < TILE_M // GROUP * GROUP)
    position = length - queries + query
    head = kv_head * GROUP + line % GROUP
    token = (first + query).to(tl.int64)
    cell = real[:, None] & (column < DIM)[None, :]
    asked = tl.load(q + token[:, None] * q_token + (head * q_head)[:, None] + column[None, :], mask=cell, other=0.0)

    last = length - queries + tl.minimum(skipped + TILE_M // GROUP, queries)  # keys that the last query sees
    begin = 0
    if WINDOW:
        begin = tl.maximum(length - queries + skipped - window + 1, 0) // TILE_N * TILE_N
    if SEGMENTS > 1:
        share = tl.cdiv(tl.cdiv(last - begin, TILE_N), SEGMENTS) * TILE_N
        begin += segment * share
        end = tl.minimum(begin + share, last)
    else:
        end = last

    factor = scale
    if BYTES:
        factor = scale * BYTE_SCALE * tl.load(k_scales + kv_head)
    top = tl.full([TILE_M], float("-inf"), tl.float32)
    weight = tl.zeros([TILE_M], tl.float32)
    total = tl.zeros([TILE_M, DIM_PAD], tl.float32)
    for at in range(begin, end, TILE_N):
        key = at + tl.arange(0, TILE_N)
        row = _row(tl.minimum(key, last - 1), sequence, bases, tables, width, PAGED, BLOCK) * row_stride + kv_head * DIM
        if DIM == DIM_PAD:
            keys = tl.load(cache_k + row[None, :] + column[:, None])
            values = tl.load(cache_v + row[:, None] + column[None, :])
        else:
            keys = tl.load(cache_k + row[None, :] + column[:, None], mask=(column < DIM)[:, None], other=0)
            values = tl.load(cache_v + row[:, None] + column[None, :], mask=(column < DIM)[None, :], other=0)
        if BYTES:
            keys = _from_bytes(keys).to(asked.dtype)
            values = _from_bytes(values).to(asked.dtype)
        score = tl.dot(asked, keys, input_precision=PRECISION) * factor
        if SOFTCAP:
            score = softcap * _tanh(score / softcap)
        seen = (key[None, :] <= position[:, None]) & (key < end)[None, :] & real[:, None]
        if WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        part = tl.exp2((score - base[:, None]) * LOG2E)
        shrink = tl.exp2((top - base) * LOG2E)
        weight = weight * shrink + tl.sum(part, 1)
        total = total * shrink[:, None]
        total += tl.dot(part.to(values.dtype), values, input_precision=PRECISION)
        top = higher

    if BYTES:
        total = total * (BYTE_SCALE * tl.load(v_scales + kv_head))
    if SEGMENTS > 1:
        place = (token * HEADS + head) * SEGMENTS + segment
        tl.store(part_max + place, top, mask=real)
        tl.store(part_sum + place, weight, mask=real)
        tl.store(out + place[:, None] * DIM + column[None, :], total, mask=cell)
    else:
        if SINKS:
            sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
            higher = tl.maximum(top, sink)
            shrink = tl.exp2((top - higher) * LOG2E)
            weight = weight * shrink + tl.exp2((sink - higher) * LOG2E)
            total = total * shrink[:, None]
        result = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
        place = (token * HEADS + head) * DIM
        tl.store(out + place[:, None] + column[None, :], result.to(out.dtype.element_ty), mask=cell)


@triton.jit
def reduce_kernel(
    part,
    part_max,
    part_sum,
    sinks,
    out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """The segments of one token and head, put together."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    segment = tl.arange(0, SEGMENTS)
    column = tl.arange(0, DIM_PAD)
    place = (token * HEADS + head) * SEGMENTS + segment
    top = tl.load(part_max + place)
    weight = tl.load(part_sum + place)
    highest = tl.max(top, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        highest = tl.maximum(highest, sink)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    share = tl.exp2((top - base) * LOG2E)  # 0 for a segment without keys
    whole = tl.sum(weight * share, 0)
    if SINKS:
        whole += tl.exp2((sink - base) * LOG2E)
    sums = tl.load(part + place[:, None] * DIM + column[None, :], mask=(column < DIM)[None, :], other=0.0)
    result = tl.sum(sums * share[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out + (token * HEADS + head) * DIM + column, result.to(out.dtype.element_ty), mask=column < DIM)
