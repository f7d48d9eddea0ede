"""Triton kernels with their gradients: rotations, gated activations, and log-probs over a vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS = 8  # of a program
_WORDS = 4096


@triton.jit
def _turned(x, cosines, sines, out, stride, num_heads, sign, WIDTH: tl.constexpr, HEADS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    half: tl.constexpr = WIDTH // 2
    at = tl.arange(0, half)[None, :]
    is_there = head < num_heads
    source = x + token * stride + head * WIDTH + at
    first = tl.load(source, mask=is_there, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=is_there, other=0.0).to(tl.float32)
    angle = token * WIDTH + at
    cosine = tl.load(cosines + angle).to(tl.float32)
    sine = tl.load(sines + angle).to(tl.float32) * sign
    kind = out.dtype.element_ty
    target = out + (token * num_heads + head) * WIDTH + at
    tl.store(target, (first * cosine - second * sine).to(kind), mask=is_there)
    tl.store(target + half, (second * cosine + first * sine).to(kind), mask=is_there)


def _turn(x: Tensor, cosines: Tensor, sines: Tensor, sign: float) -> Tensor:
    tokens, heads, width = x.shape
    x = x if x.stride(1) == width and x.stride(2) == 1 else x.contiguous()
    out = torch.empty((tokens, heads, width), dtype=x.dtype, device=x.device)
    _turned[(tokens, triton.cdiv(heads, _HEADS))](
        x, cosines, sines, out, x.stride(0), heads, sign, width, _HEADS, num_warps=2
    )  # fmt: skip
    return out


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _turn(x, cosines, sines, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        cosines, sines = ctx.saved_tensors
        return _turn(grads[0], cosines, sines, -1.0), None, None


def turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return heads [tokens, heads, width] rotated by angles [tokens, width], of which both halves are the same."""
    return _Turn.apply(x, cosines, sines)  # type: ignore[no-any-return]


@triton.jit
def _gate(gate, up, out, num, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(gate + at, mask=at < num, other=0.0)
    wide = x.to(tl.float32)
    opened = (wide * tl.sigmoid(wide)).to(x.dtype).to(tl.float32)
    y = opened * tl.load(up + at, mask=at < num, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(x.dtype), mask=at < num)


@triton.jit
def _ungate(gate, up, grad, gate_grad, up_grad, num, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(gate + at, mask=at < num, other=0.0).to(tl.float32)
    y = tl.load(up + at, mask=at < num, other=0.0).to(tl.float32)
    slope = tl.load(grad + at, mask=at < num, other=0.0).to(tl.float32)
    open = tl.sigmoid(x)
    kind = gate_grad.dtype.element_ty
    tl.store(up_grad + at, (slope * x * open).to(kind), mask=at < num)
    tl.store(gate_grad + at, (slope * y * open * (1 + x * (1 - open))).to(kind), mask=at < num)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        _gate[(triton.cdiv(gate.numel(), 2048),)](gate, up, out, gate.numel(), 2048, num_warps=8)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gate, up = ctx.saved_tensors
        found = torch.empty_like(gate), torch.empty_like(up)
        num = gate.numel()
        _ungate[(triton.cdiv(num, 2048),)](gate, up, grads[0].contiguous(), *found, num, 2048, num_warps=8)
        return found


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    return _Gated.apply(gate, up)  # type: ignore[no-any-return]


@triton.jit
def _forward_rows(logits, targets, logsumexps, log_probs, entropies, num, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * num
    at = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mean = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, num, BLOCK):
        is_there = begin + at < num
        x = tl.load(logits + begin + at, mask=is_there, other=float("-inf")).to(tl.float32) * scale
        now = tl.maximum(top, x)
        shrunk = tl.where(now == float("-inf"), 1.0, tl.exp(top - now))
        share = tl.where(is_there, tl.exp(x - now), 0.0)
        total = total * shrunk + share
        mean = mean * shrunk + tl.where(share > 0, share * x, 0.0)
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
def _grad_rows(
    logits, targets, logsumexps, entropies, log_prob_grads, entropy_grads, num, scale,
    BLOCK: tl.constexpr, HAS_ENTROPY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    place = logits + row * num + at
    x = tl.load(place, mask=at < num, other=float("-inf"))
    chosen = tl.load(log_prob_grads + row)
    own = x.to(tl.float32) * scale - tl.load(logsumexps + row)
    probability = tl.exp(own)
    grad = tl.where(at == target, chosen, 0.0) - chosen * probability
    if HAS_ENTROPY:
        spread = tl.where(probability > 0, probability * (own + tl.load(entropies + row)), 0.0)
        grad -= tl.load(entropy_grads + row) * spread
    tl.store(place, (grad * scale).to(x.dtype), mask=at < num)


def log_probs_and_entropies(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return logsumexp [n] of logits [n, vocabulary], log-probs of targets [n], entropies [n]."""
    rows, num = logits.shape
    logsumexps, log_probs, entropies = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    _forward_rows[(rows,)](
        logits, targets, logsumexps, log_probs, entropies, num, 1.0 / temperature, _WORDS, num_warps=8
    )
    return logsumexps, log_probs, entropies


def logits_grad(
    logits: Tensor,
    targets: Tensor,
    logsumexps: Tensor,
    entropies: Tensor,
    log_prob_grads: Tensor,
    entropy_grads: Tensor | None,
    temperature: float,
) -> Tensor:
    """Return the gradient of the logits, in their place, from those of log-probs and entropies."""
    rows, num = logits.shape
    _grad_rows[(rows, triton.cdiv(num, _WORDS))](
        logits, targets, logsumexps, entropies, log_prob_grads.contiguous(),
        logsumexps if entropy_grads is None else entropy_grads.contiguous(), num, 1.0 / temperature,
        _WORDS, entropy_grads is not None, num_warps=8,
    )  # fmt: skip
    return logits
