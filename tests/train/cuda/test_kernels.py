"""Kernels with gradients against autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from tests.rollout.engine.cuda.device import DEVICE, HAS_KERNELS, random

if not HAS_KERNELS:
    pytest.skip("no CUDA device, or no Triton", allow_module_level=True)

from practicum.train.cuda.kernels import logits_gradient, logits_statistics, rotate, silu_mul


def grads_of(out: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad((out * random(*out.shape)).sum(), inputs)


def test_rotations() -> None:
    x, angles = random(7, 12, 32).requires_grad_(), random(7, 16)
    own = torch.cat([angles, angles], 1)
    first, second = x.chunk(2, -1)
    expected = x * own.cos()[:, None] + torch.cat([-second, first], -1) * own.sin()[:, None]
    out = rotate(x, own.cos(), own.sin())
    assert torch.allclose(out, expected, atol=1e-5)
    for ours, theirs in zip(grads_of(out, x), grads_of(expected, x), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_gates() -> None:
    gate, up = random(5, 70).requires_grad_(), (random(5, 70) * 2).requires_grad_()
    out, expected = silu_mul(gate, up), silu(gate) * up
    assert torch.allclose(out, expected, atol=1e-5)
    for ours, theirs in zip(grads_of(out, gate, up), grads_of(expected, gate, up), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("learns", [False, True])
def test_log_probs_and_entropies(learns: bool) -> None:
    logits, targets = (random(6, 5000) * 3).requires_grad_(), torch.arange(6, device=DEVICE) * 900
    log_probs = (logits / 0.7).log_softmax(-1)
    chosen = log_probs.gather(1, targets[:, None])[:, 0]
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    logsumexps, ours, own_entropies = logits_statistics(logits.detach(), targets, 0.7)
    assert torch.allclose(ours, chosen, atol=1e-4)
    assert torch.allclose(own_entropies, entropies, atol=1e-4)
    weights: Any = random(6), random(6) * 0.5
    loss = (chosen * weights[0]).sum() + ((entropies * weights[1]).sum() if learns else 0)
    (expected,) = torch.autograd.grad(loss, logits)
    found = logits_gradient(
        logits.detach().clone(), targets, logsumexps, own_entropies, weights[0], weights[1] if learns else None, 0.7
    )  # fmt: skip
    assert torch.allclose(found, expected, atol=1e-5)
