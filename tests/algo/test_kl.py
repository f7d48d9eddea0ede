from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.algo import KL_ESTIMATORS, AdaptiveKL, k1, k2, k3
from tests.algo.ragged import Answers, answers, assert_close, flat


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


@given(answers(st.floats(-60, 0), st.floats(-60, 0)))
def test_each_follows_its_formula(batch: Answers) -> None:
    pairs = [pair for row in batch.tokens for pair in row]
    p, q = flat(batch.column(0)), flat(batch.column(1))
    assert_close(k1(p, q), [a - b for a, b in pairs])
    assert_close(k2(p, q), [(a - b) ** 2 / 2 for a, b in pairs])
    assert_close(k3(p, q), [math.exp(b - a) - 1 - (b - a) if abs(b - a) > 1e-3 else (b - a) ** 2 / 2 for a, b in pairs])


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_gradients_equal_finite_differences(name: str) -> None:
    p, q = -torch.rand(2, 20, dtype=torch.float64) * 5
    assert torch.autograd.gradcheck(lambda p: KL_ESTIMATORS[name](p, q), (p.requires_grad_(),))
    assert KL_ESTIMATORS[name](torch.tensor([-50.0, -1.0]), torch.tensor([-1.0, -50.0])).isfinite().all()


def test_in_the_loss_k2_has_the_gradient_of_the_divergence_and_k1_none() -> None:
    torch.manual_seed(0)
    logits, q = torch.randn(8, dtype=torch.float64, requires_grad=True), torch.randn(8, dtype=torch.float64)
    q = q.log_softmax(-1)

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    p = logits.log_softmax(-1)
    exact = gradient((p.exp() * (p - q)).sum())
    chances = p.exp().detach()  # tokens are drawn from p: the expectation is over them, not differentiated
    assert_close(gradient((chances * k2(p, q)).sum()), exact.tolist())
    assert gradient((chances * k1(p, q)).sum()).abs().max() < 1e-12


def test_the_coefficient_seeks_the_target_in_small_steps() -> None:
    control = AdaptiveKL(0.5, target=0.1, rate=0.1)
    control.update(0.11)
    assert control.coefficient == pytest.approx(0.5 * (1 + 0.1 * 0.1))
    control.update(50.0)
    assert control.coefficient == pytest.approx(0.505 * 1.02)
    control.update(-3.0)  # estimates may be negative
    assert control.coefficient == pytest.approx(0.505 * 1.02 * 0.98)


def test_the_coefficient_finds_its_place() -> None:
    """In a world where the divergence is one over the coefficient."""
    control = AdaptiveKL(1.0, target=0.25)
    for _ in range(300):
        control.update(1 / control.coefficient)
    assert control.coefficient == pytest.approx(4.0, rel=0.01)


def test_the_coefficient_goes_on_after_a_restart() -> None:
    before, after = AdaptiveKL(0.5, target=0.1), AdaptiveKL(0.5, target=0.1)
    before.update(1.0)
    after.coefficient = before.coefficient  # all that a checkpoint keeps
    assert after.coefficient == before.coefficient != 0.5


def test_a_divergence_that_is_no_number_is_refused() -> None:
    control = AdaptiveKL(0.5, target=0.1)
    with pytest.raises(ValueError, match="nothing to adapt to"):
        control.update(math.nan)
    assert control.coefficient == 0.5
    with pytest.raises(ValueError, match="positive"):
        AdaptiveKL(0.5, target=0.0)
