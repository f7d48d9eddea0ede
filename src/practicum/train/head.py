"""Log-probs and entropies over a large vocabulary, so many rows at a time: the logits are never there as a whole.

The backward pass computes them again. On a CUDA device with Triton a kernel reads them once, and their gradient takes
their place; elsewhere PyTorch's operations do the same.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

MAX_LOGITS = 1 << 28
"""The most logits that are there at a time."""


def log_probs_of(
    hidden: Tensor, head: nn.Linear, targets: Tensor, temperature: float, learns_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Return log-probs of targets [n] and entropies [n] after `head` of hidden [n, width], in float32.

    Entropies have gradients only if they are learnt.
    """
    found = _LogProbs.apply(hidden, head.weight, head.bias, targets, temperature, learns_entropy)
    log_probs, entropies = found
    return log_probs, entropies


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, learns: bool
    ) -> tuple[Tensor, Tensor]:
        logsumexps, log_probs, entropies = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        for rows in _parts(len(hidden), weight.shape[0]):
            logits = linear(hidden[rows], weight, bias)
            logsumexps[rows], log_probs[rows], entropies[rows] = _logits_statistics(logits, targets[rows], temperature)
        ctx.save_for_backward(hidden, weight, bias, targets, logsumexps, entropies)
        ctx.temperature, ctx.learns = temperature, learns
        if not learns:
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight, bias, targets, logsumexps, entropies = ctx.saved_tensors
        hidden_grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        bias_grad = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for rows in _parts(len(hidden), weight.shape[0]):
            logits = linear(hidden[rows], weight, bias)
            of_entropy = grads[1][rows] if ctx.learns else None
            logits_grad = _logits_gradient(
                logits, targets[rows], logsumexps[rows], entropies[rows], grads[0][rows], of_entropy, ctx.temperature
            )
            if hidden_grad is not None:
                hidden_grad[rows] = logits_grad @ weight
            if weight_grad is not None:
                weight_grad += logits_grad.T @ hidden[rows]
            if bias_grad is not None:
                bias_grad += logits_grad.sum(0)
        return (
            hidden_grad,
            None if weight_grad is None else weight_grad.to(weight.dtype),
            None if bias_grad is None else bias_grad.to(bias.dtype),
            None,
            None,
            None,
        )


def _parts(num_rows: int, vocab_size: int) -> list[slice]:
    each = max(1, MAX_LOGITS // vocab_size)
    return [slice(start, start + each) for start in range(0, num_rows, each)]


def _has_kernels(logits: Tensor) -> bool:
    return logits.is_cuda and find_spec("triton") is not None


def _logits_statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    if _has_kernels(logits):
        from practicum.train.cuda.kernels import logits_statistics

        return logits_statistics(logits, targets, temperature)
    scaled = logits.float() / temperature
    logsumexps = scaled.logsumexp(-1)
    log_probs = scaled - logsumexps[:, None]
    return logsumexps, log_probs.gather(1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def _logits_gradient(
    logits: Tensor,
    targets: Tensor,
    logsumexps: Tensor,
    entropies: Tensor,
    grads: Tensor,
    of_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    if _has_kernels(logits):
        from practicum.train.cuda.kernels import logits_gradient

        return logits_gradient(logits, targets, logsumexps, entropies, grads, of_entropy, temperature)
    log_probs = logits.float() / temperature - logsumexps[:, None]
    probs = log_probs.exp()
    grad = -grads[:, None] * probs
    grad.scatter_add_(1, targets[:, None], grads[:, None])
    if of_entropy is not None:
        grad -= of_entropy[:, None] * probs * (log_probs + entropies[:, None])
    return (grad / temperature).to(logits.dtype)
