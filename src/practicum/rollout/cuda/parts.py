"""The small operations between a step's matrix products, each in one pass; and products of a single row.

What transformers computes in several roundings is rounded here at the same places, so that both agree.
"""

from __future__ import annotations

import os
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LARGEST_WIDTH = 8192
"""Of what `product` takes."""


@cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it ends, and wait for it when it needs what that has written."""
    return os.environ.get("TRITON_INTERPRET") != "1" and torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit
def _normed(hidden, more, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    is_there = at < WIDTH
    kind = hidden.dtype.element_ty
    x = tl.load(hidden + row * WIDTH + at, mask=is_there, other=0.0)
    if ADDED > 0:
        added = tl.zeros([BLOCK], tl.float32)
        for number in tl.static_range(ADDED):
            added += tl.load(more + (row * ADDED + number) * WIDTH + at, mask=is_there, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) + added.to(kind).to(tl.float32)).to(kind)
        tl.store(hidden + row * WIDTH + at, x, mask=is_there)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    factor = tl.load(weight + at, mask=is_there, other=0.0).to(tl.float32)
    y = (x * scale).to(kind).to(tl.float32) * factor
    tl.store(out + row * WIDTH + at, y.to(kind), mask=is_there)


def normed(hidden: Tensor, more: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of hidden [rows, width], to which `more` is added first, in place: [rows, width], or several of each row
    [rows, several, width]."""
    rows, width = hidden.shape
    added = 0 if more is None else more.numel() // hidden.numel()
    out = torch.empty_like(hidden)
    block = triton.next_power_of_2(width)
    _normed[(rows,)](
        hidden, hidden if more is None else more, weight, out, eps, width, block, added,
        num_warps=min(8, max(1, block // 512)),
    )  # fmt: skip
    return out


@triton.jit
def _gated(gate, up, out, gate_stride, up_stride, num, BLOCK: tl.constexpr):
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
def _product(
    x, weight, other, norm, bias, more, out, eps, num, width,
    BLOCK: tl.constexpr, PART: tl.constexpr, NORMS: tl.constexpr, GATES: tl.constexpr, ADDS: tl.constexpr,
    HAS_BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.arange(0, PART)
    is_place, is_there = place < num, at < width
    where = place.to(tl.int64)[:, None] * width + at[None, :]
    mask = is_place[:, None] & is_there[None, :]
    kind = x.dtype.element_ty
    weights = tl.load(weight + where, mask=mask, other=0.0)
    if GATES:
        others = tl.load(other + where, mask=mask, other=0.0)
    if NORMS:
        factor = tl.load(norm + at, mask=is_there, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()  # weights do not depend on what came before
    piece = tl.load(x + at, mask=is_there, other=0.0).to(tl.float32)
    if NORMS:
        scale = tl.rsqrt(tl.sum(piece * piece, 0) / width + eps)
        piece = ((piece * scale).to(kind).to(tl.float32) * factor).to(kind).to(tl.float32)
    y = tl.sum(weights.to(tl.float32) * piece[None, :], 1)
    if HAS_BIAS:
        y += tl.load(bias + place, mask=is_place, other=0.0).to(tl.float32)
    y = y.to(kind)
    if GATES:
        wide = y.to(tl.float32)
        opened = (wide / (1 + tl.exp(-wide))).to(kind).to(tl.float32)
        raised = tl.sum(others.to(tl.float32) * piece[None, :], 1)
        y = (opened * raised.to(kind).to(tl.float32)).to(kind)
    if ADDS:
        y = (y.to(tl.float32) + tl.load(more + place, mask=is_place, other=0.0).to(tl.float32)).to(kind)
    tl.store(out + place, y, mask=is_place)


def product(
    x: Tensor,
    weight: Tensor,
    *,
    up: Tensor | None = None,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    added_to: Tensor | None = None,
) -> Tensor:
    """[1, num] from a single x [1, width] and a weight [num, width], where reading weights is all there is.

    x is normed first where `norm` has a weight and an epsilon. With `up` it is silu(x by weight) * (x by up). The
    result goes `added_to` what there is, in place.
    """
    width, num = x.shape[1], weight.shape[0]
    out = torch.empty((1, num), dtype=x.dtype, device=x.device) if added_to is None else added_to
    part = triton.next_power_of_2(width)
    block = 2 if part <= LARGEST_WIDTH // 2 else 1
    early = starts_early(x.device)
    _product[(triton.cdiv(num, block),)](
        x, weight, weight if up is None else up, x if norm is None else norm[0], x if bias is None else bias, out, out,
        0.0 if norm is None else norm[1], num, width,
        block, part, norm is not None, up is not None, added_to is not None, bias is not None, early,
        num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return out
