from __future__ import annotations

import pytest
import torch
from hypothesis import given

from practicum.algo import clipped_value_loss, explained_variance
from tests.algo.ragged import NUMBERS, Answers, answers, assert_close, flat, tensor


@given(answers(NUMBERS, NUMBERS, NUMBERS))
def test_the_loss_follows_the_formula(batch: Answers) -> None:
    losses, cut = clipped_value_loss(*(flat(batch.column(i)) for i in range(3)), clip=0.2)
    tokens = [token for row in batch.tokens for token in row]
    held = [min(max(value, old - 0.2), old + 0.2) for value, old, _ in tokens]
    assert_close(losses, [max((t[0] - t[2]) ** 2, (h - t[2]) ** 2) / 2 for t, h in zip(tokens, held, strict=True)])
    far = [abs(abs(h - t[2]) - abs(t[0] - t[2])) > 1e-9 for t, h in zip(tokens, held, strict=True)]
    for i, (token, h) in enumerate(zip(tokens, held, strict=True)):
        assert not far[i] or bool(cut[i]) == (abs(h - token[2]) > abs(token[0] - token[2]))


def test_the_gradient_equals_finite_differences_and_stops_beyond_the_clip() -> None:
    old, returns = tensor([0.0, 0.0, 0.0]), tensor([1.0, 1.0, -1.0])
    values = tensor([0.1, 0.5, 0.5]).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: clipped_value_loss(v, old, returns, 0.2)[0], (values,))
    losses, cut = clipped_value_loss(values, old, returns, 0.2)
    losses.sum().backward()
    assert values.grad is not None
    assert_close(values.grad, [-0.9, 0.0, 1.5])
    assert cut.tolist() == [False, True, False]


def test_how_much_a_critic_explains() -> None:
    returns = tensor([0.0, 1.0, 2.0, 5.0])
    assert explained_variance(returns, returns) == pytest.approx(1.0)
    assert explained_variance(torch.full((4,), 2.0), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, torch.ones(4)) is None
