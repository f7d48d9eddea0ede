"""The small operations between a step's matrix products, each in one pass; and products of a single row.

What transformers computes in several roundings is rounded here at the same places, so that both agree.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _normed(  # type: ignore[no-untyped-def]
    hidden, more, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    is_there = at < WIDTH
    kind = hidden.dtype.element_ty
    x = tl.load(hidden + row * WIDTH + at, mask=is_there, other=0.0)
    if ADDS:
        added = x.to(tl.float32) + tl.load(more + row * WIDTH + at, mask=is_there, other=0.0).to(tl.float32)
        x = added.to(kind)
        tl.store(hidden + row * WIDTH + at, x, mask=is_there)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    factor = tl.load(weight + at, mask=is_there, other=0.0).to(tl.float32)
    y = (x * scale).to(kind).to(tl.float32) * factor
    tl.store(out + row * WIDTH + at, y.to(kind), mask=is_there)


def normed(hidden: Tensor, more: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of hidden [rows, width], to which `more` is added first, in place."""
    rows, width = hidden.shape
    out = torch.empty_like(hidden)
    block = triton.next_power_of_2(width)
    _normed[(rows,)](
        hidden, hidden if more is None else more, weight, out, eps, width, block, more is not None,
        num_warps=min(8, max(1, block // 512)),
    )  # fmt: skip
    return out


@triton.jit
def _gated(gate, up, out, gate_stride, up_stride, num, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < num
    x = tl.load(gate + row * gate_stride + at, mask=is_there, other=0.0)
    y = tl.load(up + row * up_stride + at, mask=is_there, other=0.0).to(tl.float32)
    wide = x.to(tl.float32)
    opened = (wide / (1 + tl.exp(-wide))).to(x.dtype).to(tl.float32)
    tl.store(out + row * num + at, (opened * y).to(x.dtype), mask=is_there)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of [rows, inner] each."""
    rows, inner = gate.shape
    out = torch.empty((rows, inner), dtype=gate.dtype, device=gate.device)
    block = min(1024, triton.next_power_of_2(inner))
    _gated[(rows, triton.cdiv(inner, block))](gate, up, out, gate.stride(0), up.stride(0), inner, block, num_warps=4)
    return out


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    x, weight, other, norm, bias, more, out, eps, num, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
    NORMS: tl.constexpr, GATES: tl.constexpr, ADDS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    is_place = place < num
    part = tl.arange(0, PART)
    kind = x.dtype.element_ty
    x += row * width
    scale = 1.0
    if NORMS:
        square = tl.zeros([PART], tl.float32)
        for begin in range(0, width, PART):
            at = begin + part
            piece = tl.load(x + at, mask=at < width, other=0.0).to(tl.float32)
            square += piece * piece
        scale = tl.rsqrt(tl.sum(square, 0) / width + eps)
    sums = tl.zeros([BLOCK, PART], tl.float32)
    others = tl.zeros([BLOCK, PART], tl.float32)
    for begin in range(0, width, PART):
        at = begin + part
        is_there = at < width
        piece = tl.load(x + at, mask=is_there, other=0.0).to(tl.float32)
        if NORMS:
            factor = tl.load(norm + at, mask=is_there, other=0.0).to(tl.float32)
            piece = ((piece * scale).to(kind).to(tl.float32) * factor).to(kind).to(tl.float32)
        where = place.to(tl.int64)[:, None] * width + at[None, :]
        mask = is_place[:, None] & is_there[None, :]
        sums += tl.load(weight + where, mask=mask, other=0.0).to(tl.float32) * piece[None, :]
        if GATES:
            others += tl.load(other + where, mask=mask, other=0.0).to(tl.float32) * piece[None, :]
    y = tl.sum(sums, 1)
    if HAS_BIAS:
        y += tl.load(bias + place, mask=is_place, other=0.0).to(tl.float32)
    y = y.to(kind)
    if GATES:
        wide = y.to(tl.float32)
        opened = (wide / (1 + tl.exp(-wide))).to(kind).to(tl.float32)
        y = (opened * tl.sum(others, 1).to(kind).to(tl.float32)).to(kind)
    if ADDS:
        y = (y.to(tl.float32) + tl.load(more + row * num + place, mask=is_place, other=0.0).to(tl.float32)).to(kind)
    tl.store(out + row * num + place, y, mask=is_place)


def product(
    x: Tensor,
    weight: Tensor,
    *,
    up: Tensor | None = None,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    added_to: Tensor | None = None,
    block: int = 4,
    part: int = 512,
    num_warps: int = 4,
) -> Tensor:
    """[rows, num] from x [rows, width] and a weight [num, width], for so few rows that reading weights is all there is.

    x is normed first where `norm` has a weight and an epsilon. With `up` it is silu(x by weight) * (x by up). The
    result goes `added_to` what there is, in place.
    """
    rows, width = x.shape
    num = weight.shape[0]
    out = torch.empty((rows, num), dtype=x.dtype, device=x.device) if added_to is None else added_to
    _product[(triton.cdiv(num, block), rows)](
        x, weight, weight if up is None else up, x if norm is None else norm[0], x if bias is None else bias, out, out,
        0.0 if norm is None else norm[1], num, width,
        rows, block, min(part, triton.next_power_of_2(width)),
        norm is not None, up is not None, added_to is not None, bias is not None, num_warps=num_warps,
    )  # fmt: skip
    return out
