"""The small operations against plain PyTorch."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from tests.rollout.cuda.kernels import EPS, random, rms

from practicum.rollout.cuda.parts import gated, normed, product  # isort: skip


def test_norms_add_what_comes_first() -> None:
    weight = random(48)
    for more in (None, random(7, 48), random(7, 4, 48)):
        hidden = random(7, 48)
        added = hidden + (0 if more is None else more.view(7, -1, 48).sum(1))
        out = normed(hidden, more, weight, EPS)
        assert torch.allclose(hidden, added, atol=1e-5)
        assert torch.allclose(out, rms(added, weight), atol=1e-5)


def test_gates_open_as_far_as_silu_says() -> None:
    gate, up = random(7, 100).chunk(2, 1)
    assert torch.allclose(gated(gate, up), silu(gate) * up, atol=1e-6)


def test_products_of_one_row() -> None:
    x, weight, up, bias, norm, hidden = (random(*s) for s in [(1, 48), (33, 48), (33, 48), (33,), (48,), (1, 33)])
    up = -up.flip(0)  # equal shapes are equal numbers
    assert torch.allclose(product(x, weight, bias=bias), x @ weight.T + bias, atol=1e-4)
    y = rms(x, norm)
    assert torch.allclose(product(x, weight, up=up, norm=(norm, EPS)), silu(y @ weight.T) * (y @ up.T), atol=1e-3)
    before = hidden.clone()
    product(x, weight, added_to=hidden)
    assert torch.allclose(hidden, before + x @ weight.T, atol=1e-4)
