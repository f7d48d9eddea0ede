"""Triton kernels with their gradients: rotations, gated activations, and log-probs over a vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS = 8  # for each program
_BLOCK = 4096


@triton.jit
def _rotate_kernel(x, cosines, sines, out, stride, num_heads, sign, WIDTH: tl.constexpr, HEADS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    half: tl.constexpr = WIDTH // 2
    at = tl.arange(0, half)[None, :]
    valid = head < num_heads
    source = x + token * stride + head * WIDTH + at
    first = tl.load(source, mask=valid, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=valid, other=0.0).to(tl.float32)
    angle = token * WIDTH + at
    cosine = tl.load(cosines + angle).to(tl.float32)
    sine = tl.load(sines + angle).to(tl.float32) * sign
    dtype = out.dtype.element_ty
    target = out + (token * num_heads + head) * WIDTH + at
    tl.store(target, (first * cosine - second * sine).to(dtype), mask=valid)
    tl.store(target + half, (second * cosine + first * sine).to(dtype), mask=valid)


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor, sign: float) -> Tensor:
    tokens, heads, width = x.shape
    x = x if x.stride(1) == width and x.stride(2) == 1 else x.contiguous()
    out = torch.empty((tokens, heads, width), dtype=x.dtype, device=x.device)
    _rotate_kernel[(tokens, triton.cdiv(heads, _HEADS))](
        x, cosines, sines, out, x.stride(0), heads, sign, width, _HEADS, num_warps=2
    )  # fmt: skip
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _rotated(x, cosines, sines, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        cosines, sines = ctx.saved_tensors
        return _rotated(grads[0], cosines, sines, -1.0), None, None


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate heads [tokens, heads, width] by angles [tokens, width] of which both halves are the same."""
    return _Rotate.apply(x, cosines, sines)  # type: ignore[no-any-return]


@triton.jit
def _silu_mul_kernel(gate, up, out, num, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(gate + at, mask=at < num, other=0.0)
    wide = x.to(tl.float32)
    activated = (wide * tl.sigmoid(wide)).to(x.dtype).to(tl.float32)
    y = activated * tl.load(up + at, mask=at < num, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(x.dtype), mask=at < num)


@triton.jit
def _silu_mul_gradient_kernel(gate, up, grad, gate_grad, up_grad, num, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(gate + at, mask=at < num, other=0.0).to(tl.float32)
    y = tl.load(up + at, mask=at < num, other=0.0).to(tl.float32)
    out_grad = tl.load(grad + at, mask=at < num, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(x)
    dtype = gate_grad.dtype.element_ty
    tl.store(up_grad + at, (out_grad * x * sigmoid).to(dtype), mask=at < num)
    tl.store(gate_grad + at, (out_grad * y * sigmoid * (1 + x * (1 - sigmoid))).to(dtype), mask=at < num)


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        _silu_mul_kernel[(triton.cdiv(gate.numel(), 2048),)](gate, up, out, gate.numel(), 2048, num_warps=8)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gate, up = ctx.saved_tensors
        found = torch.empty_like(gate), torch.empty_like(up)
        num = gate.numel()
        grid = (triton.cdiv(num, 2048),)
        _silu_mul_gradient_kernel[grid](gate, up, grads[0].contiguous(), *found, num, 2048, num_warps=8)
        return found


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    return _SiluMul.apply(gate, up)  # type: ignore[no-any-return]


@triton.jit
def _statistics_kernel(logits, targets, logsumexps, log_probs, entropies, num, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * num
    at = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mean = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, num, BLOCK):
        valid = begin + at < num
        x = tl.load(logits + begin + at, mask=valid, other=float("-inf")).to(tl.float32) * scale
        now = tl.maximum(top, x)
        shrunk = tl.where(now == float("-inf"), 1.0, tl.exp(top - now))
        weight = tl.where(valid, tl.exp(x - now), 0.0)
        total = total * shrunk + weight
        mean = mean * shrunk + tl.where(weight > 0, weight * x, 0.0)
        top = now
    largest = tl.max(top, 0)
    shrunk = tl.exp(top - largest)
    whole = tl.sum(total * shrunk, 0)
    logsumexp = largest + tl.log(whole)
    chosen = tl.load(logits + tl.load(targets + row)).to(tl.float32) * scale
    tl.store(logsumexps + row, logsumexp)
    tl.store(log_probs + row, chosen - logsumexp)
    tl.store(entropies + row, logsumexp - tl.sum(mean * shrunk, 0) / whole)


@triton.jit
def _gradient_kernel(
    logits, targets, logsumexps, entropies, log_prob_grads, entropy_grads, num, scale,
    BLOCK: tl.constexpr, HAS_ENTROPY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    target_logits = logits + row * num + at
    x = tl.load(target_logits, mask=at < num, other=float("-inf"))
    chosen = tl.load(log_prob_grads + row)
    own = x.to(tl.float32) * scale - tl.load(logsumexps + row)
    probability = tl.exp(own)
    grad = tl.where(at == target, chosen, 0.0) - chosen * probability
    if HAS_ENTROPY:
        spread = tl.where(probability > 0, probability * (own + tl.load(entropies + row)), 0.0)
        grad -= tl.load(entropy_grads + row) * spread
    tl.store(target_logits, (grad * scale).to(x.dtype), mask=at < num)


def logits_statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logsumexps [n] of logits [n, vocabulary], the log-probs of targets [n], and the entropies [n]."""
    rows, num = logits.shape
    logsumexps, log_probs, entropies = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    _statistics_kernel[(rows,)](
        logits, targets, logsumexps, log_probs, entropies, num, 1.0 / temperature, _BLOCK, num_warps=8
    )  # fmt: skip
    return logsumexps, log_probs, entropies


def logits_gradient(
    logits: Tensor,
    targets: Tensor,
    logsumexps: Tensor,
    entropies: Tensor,
    log_prob_grads: Tensor,
    entropy_grads: Tensor | None,
    temperature: float,
) -> Tensor:
    """Overwrite the logits by their gradient, from the gradients of log-probs and entropies, and return it."""
    rows, num = logits.shape
    _gradient_kernel[(rows, triton.cdiv(num, _BLOCK))](
        logits, targets, logsumexps, entropies, log_prob_grads.contiguous(),
        logsumexps if entropy_grads is None else entropy_grads.contiguous(), num, 1.0 / temperature,
        _BLOCK, entropy_grads is not None, num_warps=8,
    )  # fmt: skip
    return logits
