from __future__ import annotations

import pytest
import torch

from practicum.algo import k3


def test_the_mean_over_samples_is_the_divergence() -> None:
    torch.manual_seed(0)
    p, q = torch.randn(2, 12, dtype=torch.float64).log_softmax(-1)
    exact = (p.exp() * (p - q)).sum().item()
    drawn = torch.multinomial(p.exp(), 400_000, replacement=True)
    assert k3(p[drawn], q[drawn]).mean().item() == pytest.approx(exact, rel=0.02)


def test_never_negative_and_zero_for_equals() -> None:
    p, q = -torch.rand(2, 1000, dtype=torch.float64) * 5
    assert (k3(p, q) >= 0).all()
    assert k3(p, p).abs().max() == 0
