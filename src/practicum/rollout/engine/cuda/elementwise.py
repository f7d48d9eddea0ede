"""Elementwise kernels between a step's matrix products, each in one pass; and the products of a matrix with one vector.

They round where transformers rounds, so that both agree.
"""

from __future__ import annotations

import os
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_WIDTH = 8192  # of the vectors that `matvec` takes


@cache
def launches_early(device: torch.device) -> bool:
    """Return whether a kernel may start while the one before it ends: it waits where it needs what that one wrote."""
    return os.environ.get("TRITON_INTERPRET") != "1" and torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit
def _rms_norm_kernel(
    hidden, delta, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, NUM_DELTAS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    valid = at < WIDTH
    dtype = hidden.dtype.element_ty
    x = tl.load(hidden + row * WIDTH + at, mask=valid, other=0.0)
    if NUM_DELTAS > 0:
        delta_sum = tl.zeros([BLOCK], tl.float32)
        for number in tl.static_range(NUM_DELTAS):
            delta_sum += tl.load(delta + (row * NUM_DELTAS + number) * WIDTH + at, mask=valid, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) + delta_sum.to(dtype).to(tl.float32)).to(dtype)
        tl.store(hidden + row * WIDTH + at, x, mask=valid)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    factor = tl.load(weight + at, mask=valid, other=0.0).to(tl.float32)
    y = (x * scale).to(dtype).to(tl.float32) * factor
    tl.store(out + row * WIDTH + at, y.to(dtype), mask=valid)


def rms_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of hidden [rows, width].

    `delta`, [rows, width] or several for each row [rows, several, width], is added to `hidden` first, in place.
    """
    rows, width = hidden.shape
    num_deltas = 0 if delta is None else delta.numel() // hidden.numel()
    out = torch.empty_like(hidden)
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(rows,)](
        hidden, hidden if delta is None else delta, weight, out, eps, width, block, num_deltas,
        num_warps=min(8, max(1, block // 512)),
    )  # fmt: skip
    return out


@triton.jit
def _silu_mul_kernel(gate, up, out, gate_stride, up_stride, num, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = at < num
    x = tl.load(gate + row * gate_stride + at, mask=valid, other=0.0)
    y = tl.load(up + row * up_stride + at, mask=valid, other=0.0).to(tl.float32)
    wide = x.to(tl.float32)
    activated = (wide / (1 + tl.exp(-wide))).to(x.dtype).to(tl.float32)
    tl.store(out + row * num + at, (activated * y).to(x.dtype), mask=valid)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, of [rows, inner] each."""
    rows, inner = gate.shape
    out = torch.empty((rows, inner), dtype=gate.dtype, device=gate.device)
    block = min(1024, triton.next_power_of_2(inner))
    grid = rows, triton.cdiv(inner, block)
    _silu_mul_kernel[grid](gate, up, out, gate.stride(0), up.stride(0), inner, block, num_warps=4)
    return out


@triton.jit
def _matvec_kernel(
    x, weight, up, norm, bias, delta, out, eps, num, width,
    BLOCK: tl.constexpr, WIDTH_BLOCK: tl.constexpr, NORMS: tl.constexpr, GATES: tl.constexpr, ADDS: tl.constexpr,
    HAS_BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.arange(0, WIDTH_BLOCK)
    is_column, valid = column < num, at < width
    where = column.to(tl.int64)[:, None] * width + at[None, :]
    mask = is_column[:, None] & valid[None, :]
    dtype = x.dtype.element_ty
    weights = tl.load(weight + where, mask=mask, other=0.0)
    if GATES:
        up_weights = tl.load(up + where, mask=mask, other=0.0)
    if NORMS:
        factor = tl.load(norm + at, mask=valid, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()  # weights do not depend on what came before
    inputs = tl.load(x + at, mask=valid, other=0.0).to(tl.float32)
    if NORMS:
        scale = tl.rsqrt(tl.sum(inputs * inputs, 0) / width + eps)
        inputs = ((inputs * scale).to(dtype).to(tl.float32) * factor).to(dtype).to(tl.float32)
    y = tl.sum(weights.to(tl.float32) * inputs[None, :], 1)
    if HAS_BIAS:
        y += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
    y = y.to(dtype)
    if GATES:
        wide = y.to(tl.float32)
        activated = (wide / (1 + tl.exp(-wide))).to(dtype).to(tl.float32)
        up_value = tl.sum(up_weights.to(tl.float32) * inputs[None, :], 1)
        y = (activated * up_value.to(dtype).to(tl.float32)).to(dtype)
    if ADDS:
        y = (y.to(tl.float32) + tl.load(delta + column, mask=is_column, other=0.0).to(tl.float32)).to(dtype)
    tl.store(out + column, y, mask=is_column)


def matvec(
    x: Tensor, weight: Tensor, *, up: Tensor | None = None, bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None, add_to: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return x @ weight.T [1, num] for a single x [1, width] and a weight [num, width]: the work is to read weights.

    `norm`, a weight and an epsilon, norms x first. With `up` the result is silu(x @ weight.T) * (x @ up.T). The result
    is added to `add_to` in place, where that is given.
    """
    width, num = x.shape[1], weight.shape[0]
    out = torch.empty((1, num), dtype=x.dtype, device=x.device) if add_to is None else add_to
    width_block = triton.next_power_of_2(width)
    block = 2 if width_block <= MAX_WIDTH // 2 else 1
    early = launches_early(x.device)
    _matvec_kernel[(triton.cdiv(num, block),)](
        x, weight, weight if up is None else up, x if norm is None else norm[0], x if bias is None else bias, out, out,
        0.0 if norm is None else norm[1], num, width,
        block, width_block, norm is not None, up is not None, add_to is not None, bias is not None, early,
        num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return out
