"""Attention of a decoding step over keys and values in blocks, as Triton kernels.

    rotate_and_store   norm and rotate queries and keys of new tokens; store keys and values in their blocks
    attend             attend with one new token of each sequence to all its tokens; long contexts take several programs
                       ▼ (partial results, where there are several)
    combine            combine the partial results of a head

A block holds BLOCK_SIZE tokens of one sequence, [kv heads, tokens, width]; the block table of a sequence names its
blocks in order. Positions and tables are indexed by slot, so that nothing moves when a sequence ends.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from practicum.rollout.engine.cuda.elementwise import launches_early

BLOCK_SIZE = 64  # tokens in a block of keys and values
_SHARED_BYTES = 96 << 10  # of a multiprocessor, on every device that is supported
_LEAST_GROUP = 16  # rows of a matrix unit's tile


@triton.jit
def _half_normed(x, scale, weight, is_normed, like):
    """Norm in two roundings to the dtype of `like`, as transformers does."""
    dtype = like.dtype.element_ty
    y = (x * scale).to(dtype).to(tl.float32) * tl.load(weight, mask=is_normed, other=1.0).to(tl.float32)
    return tl.where(is_normed, y.to(dtype).to(tl.float32), x)


@triton.jit
def _rotate_and_store_kernel(
    query, key, value, query_norm, key_norm, cosines, sines, slots, positions, tables, blocks, out_query, out_key,
    query_stride, key_stride, value_stride, table_stride, block_stride, value_offset, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    HAS_NORM: tl.constexpr, KEEPS: tl.constexpr, GIVES_KEYS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    half: tl.constexpr = WIDTH // 2
    at = tl.arange(0, half)[None, :]
    is_query = head < HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    kv_head = tl.where(is_key, head - HEADS, head - HEADS - KV_HEADS)
    source = tl.where(
        is_query, query + token * query_stride + head * WIDTH,
        tl.where(
            is_key, key + token * key_stride + kv_head * WIDTH, value + token * value_stride + kv_head * WIDTH
        ),
    )  # fmt: skip
    valid = is_query | is_key | is_value
    stored = tl.load(source + at, mask=valid, other=0.0), tl.load(source + half + at, mask=valid, other=0.0)
    first, second = stored[0].to(tl.float32), stored[1].to(tl.float32)
    dtype = query.dtype.element_ty
    if HAS_NORM:
        square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(square / WIDTH + eps)[:, None]
        norm = tl.where(is_query, query_norm + at, key_norm + at)
        first = _half_normed(first, scale, norm, is_query | is_key, query)
        second = _half_normed(second, scale, norm + half, is_query | is_key, query)
    position = tl.load(positions + token)
    angle = position.to(tl.int64) * half + at
    cosine = tl.load(cosines + angle).to(tl.float32)
    sine = tl.load(sines + angle).to(tl.float32)
    rotated_first = first * cosine - second * sine
    rotated_second = second * cosine + first * sine
    rotates = is_query | is_key
    first = tl.where(rotates, rotated_first, first).to(dtype)
    second = tl.where(rotates, rotated_second, second).to(dtype)
    out = out_query + (token * HEADS + head) * WIDTH + at
    tl.store(out, first, mask=is_query)
    tl.store(out + half, second, mask=is_query)
    if GIVES_KEYS:
        out = out_key + (token * KV_HEADS + kv_head) * WIDTH + at
        tl.store(out, first, mask=is_key)
        tl.store(out + half, second, mask=is_key)
    if KEEPS:
        slot = tl.load(slots + token).to(tl.int64)
        block = tl.load(tables + slot * table_stride + position // BLOCK_SIZE).to(tl.int64)
        place = block * block_stride + kv_head * (BLOCK_SIZE * WIDTH) + (position % BLOCK_SIZE) * WIDTH + at
        place += tl.where(is_value, value_offset, 0)
        tl.store(blocks + place, first, mask=is_key | is_value)
        tl.store(blocks + place + half, second, mask=is_key | is_value)


def rotate_and_store(
    query: Tensor, key: Tensor, value: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float,
    angles: tuple[Tensor, Tensor], slots: Tensor, positions: Tensor, tables: Tensor | None, blocks: Tensor | None,
    gives_keys: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return rotated queries and keys, of the shapes of the projections [tokens, heads, width].

    `angles` are the cosines and sines of all positions [positions, width / 2]. Keys and values are stored in `blocks`
    [blocks, 2, kv heads, BLOCK_SIZE, width], where given, at the `positions` of the sequences in `slots`. The returned
    keys mean nothing unless `gives_keys`.
    """
    tokens, heads, width = query.shape
    kv_heads = key.shape[1]
    out_query = torch.empty((tokens, heads, width), dtype=query.dtype, device=query.device)
    out_key = (
        torch.empty((tokens, kv_heads, width), dtype=query.dtype, device=query.device) if gives_keys else out_query
    )
    tile = 8
    unused, early = query, launches_early(query.device)
    _rotate_and_store_kernel[(tokens, triton.cdiv(heads + 2 * kv_heads, tile))](
        query, key, value, *(norms or (unused, unused)), *angles, slots, positions,
        slots if tables is None else tables, unused if blocks is None else blocks, out_query, out_key,
        query.stride(0), key.stride(0), value.stride(0), 0 if tables is None else tables.stride(0),
        0 if blocks is None else blocks.stride(0), 0 if blocks is None else blocks.stride(1), eps,
        heads, kv_heads, width, BLOCK_SIZE, tile, norms is not None, blocks is not None, gives_keys,
        early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return out_query, out_key


@triton.jit
def _attend_kernel(
    query, blocks, block_stride, value_offset, slots, positions, tables, table_stride, out, parts, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    slot = tl.load(slots + row).to(tl.int64)
    length = tl.load(positions + slot) + 1
    table = tables + slot * table_stride
    each: tl.constexpr = HEADS // KV_HEADS
    member = tl.arange(0, GROUP)
    width = tl.arange(0, WIDTH)
    column = tl.arange(0, TILE)
    heads = kv_head * each + member
    is_head = (member < each)[:, None]
    asked = tl.load(query + (row * HEADS + heads)[:, None] * WIDTH + width[None, :], mask=is_head, other=0.0)
    scale *= 1.4426950408889634  # for powers of two instead of e
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    num_tiles = tl.cdiv(length, TILE) - first // TILE
    each_split = tl.cdiv(num_tiles, SPLITS)
    start = (first // TILE + split * each_split) * TILE
    end = tl.minimum(start + each_split * TILE, length)
    largest = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    sums = tl.zeros([GROUP, WIDTH], tl.float32)
    for begin in range(start, end, TILE):
        block = tl.load(table + begin // BLOCK_SIZE).to(tl.int64)
        base = block * block_stride + kv_head * (BLOCK_SIZE * WIDTH) + (begin % BLOCK_SIZE) * WIDTH
        at = base + column[:, None] * WIDTH + width[None, :]
        place = begin + column
        is_seen = place < length
        if WINDOW > 0:
            is_seen = is_seen & (place >= first)
        keys = tl.load(blocks + at)
        scores = tl.dot(asked, tl.trans(keys), input_precision=PRECISION) * scale
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        values = tl.load(blocks + value_offset + at, mask=is_seen[:, None], other=0.0)
        now = tl.maximum(largest, tl.max(scores, 1))
        shrunk = tl.exp2(largest - now)
        weights = tl.exp2(scores - now[:, None])
        total = total * shrunk + tl.sum(weights, 1)
        sums = sums * shrunk[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        largest = now
    if SPLITS == 1:
        target = out + (row * HEADS + heads)[:, None] * WIDTH + width[None, :]
        tl.store(target, (sums / total[:, None]).to(out.dtype.element_ty), mask=is_head)
    else:
        base = ((row * HEADS + heads) * SPLITS + split) * (WIDTH + 2)
        tl.store(parts + base[:, None] + width[None, :], sums, mask=is_head)
        tl.store(parts + base + WIDTH, largest, mask=member < each)
        tl.store(parts + base + WIDTH + 1, total, mask=member < each)


@triton.jit
def _combine_kernel(parts, out, WIDTH: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    width = tl.arange(0, WIDTH)
    base = parts + (head * SPLITS + split) * (WIDTH + 2)
    largest = tl.load(base + WIDTH)
    total = tl.load(base + WIDTH + 1)
    shrunk = tl.exp2(largest - tl.max(largest, 0))
    sums = tl.load(base[:, None] + width[None, :])
    whole = tl.sum(sums * shrunk[:, None], 0) / tl.sum(total * shrunk, 0)
    tl.store(out + head * WIDTH + width, whole.to(out.dtype.element_ty))


def tile_size(rows: int) -> int:
    """Return how many tokens a program attends to at a time: few where multiprocessors would have nothing to do."""
    return BLOCK_SIZE // 2 if rows == 1 else BLOCK_SIZE


def attend(
    query: Tensor, blocks: Tensor, slots: Tensor, positions: Tensor, tables: Tensor, scale: float, window: int | None,
    num_splits: int,
) -> Tensor:  # fmt: skip
    """Return the attention [rows, heads, width] of queries [rows, heads, width] over the sequences in `slots` so far.

    `blocks` are [blocks, 2, kv heads, BLOCK_SIZE, width]; `positions` and `tables` are indexed by slot.
    """
    rows, heads, width = query.shape
    kv_heads = blocks.shape[2]
    out = torch.empty_like(query)
    parts, early = out, launches_early(query.device)
    if num_splits > 1:
        parts = torch.empty((rows, heads, num_splits, width + 2), dtype=torch.float32, device=query.device)
    stages = max(1, min(3, _SHARED_BYTES // (2 * BLOCK_SIZE * width * query.element_size())))
    group = max(_LEAST_GROUP, triton.next_power_of_2(heads // kv_heads))
    _attend_kernel[(rows, kv_heads, num_splits)](
        query, blocks, blocks.stride(0), blocks.stride(1), slots, positions, tables, tables.stride(0), out, parts,
        scale, heads, kv_heads, group, width, BLOCK_SIZE, tile_size(rows), num_splits, window or 0,
        "ieee" if query.dtype == torch.float32 else "tf32", early, num_warps=4, num_stages=stages, launch_pdl=early,
    )  # fmt: skip
    if num_splits > 1:
        _combine_kernel[(rows * heads,)](parts, out, width, num_splits, early, num_warps=2, launch_pdl=early)
    return out
