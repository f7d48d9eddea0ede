from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.algo import clipped_policy_loss

TOKEN = st.tuples(st.floats(-8, 0), st.floats(-8, 0), st.floats(-3, 3))


@given(st.lists(TOKEN, min_size=1, max_size=20))
def test_each_token_follows_the_formula(tokens: list[tuple[float, float, float]]) -> None:
    new, old, advantages = (torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True))
    losses, clipped = clipped_policy_loss(new, old, advantages, 0.2, 0.28)
    for i, (n, o, a) in enumerate(tokens):
        ratio = math.exp(n - o)
        bounded = min(max(ratio, 0.8), 1.28)
        assert losses[i].item() == pytest.approx(-min(ratio * a, bounded * a), rel=1e-9, abs=1e-12)
        assert bool(clipped[i]) == (bounded * a < ratio * a)


def test_the_gradient_is_the_policy_gradient_on_policy_and_stops_beyond_the_bounds() -> None:
    old = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    new = torch.tensor([-1.0, -0.5, -0.5, -2.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([2.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    losses, clipped = clipped_policy_loss(new, old, advantages, 0.2, 0.28)
    losses.sum().backward()
    assert new.grad is not None
    assert new.grad[0].item() == pytest.approx(-2.0)  # on policy: -A
    assert new.grad[1].item() == 0.0  # already much likelier than before: no further
    assert new.grad[2].item() == pytest.approx(math.exp(0.5))  # worse than expected and likelier: pushed back
    assert new.grad[3].item() == pytest.approx(-math.exp(-1.0))  # better than expected and rarer: pulled up
    assert clipped.tolist() == [False, True, False, False]
