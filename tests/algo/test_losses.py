from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from practicum.algo import AGGREGATIONS, LOSSES, Totals, clipped_policy_loss
from tests.algo.ragged import NUMBERS, Answers, answers, assert_close, flat, slopes, tensor

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


Slow = Callable[..., tuple[list[float], list[bool]]]


def mean_log_ratio(new: list[float], old: list[float]) -> float:
    return sum(n - o for n, o in zip(new, old, strict=True)) / len(new)


def bounded(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def slow_clip(ratio: float, a: float, low: float, high: float) -> tuple[float, bool]:
    clipped = bounded(ratio, 1 - low, 1 + high) * a
    return -min(ratio * a, clipped), clipped < ratio * a


# Each takes one sequence. `at` is where the policy stands: what the gradient does not see is computed from there.


def slow_ppo(
    new: list[float], old: list[float], adv: list[float], at: list[float], dual_clip: float | None = None
) -> tuple[list[float], list[bool]]:
    losses, cut = [], []
    for n, o, a in zip(new, old, adv, strict=True):
        loss, is_cut = slow_clip(math.exp(n - o), a, 0.2, 0.28)
        if dual_clip is not None and a < 0 and loss > -dual_clip * a:
            loss, is_cut = -dual_clip * a, True
        losses.append(loss)
        cut.append(is_cut)
    return losses, cut


def slow_gspo(
    new: list[float],
    old: list[float],
    adv: list[float],
    at: list[float],
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[list[float], list[bool]]:
    ratio = math.exp(mean_log_ratio(new, old)) if new else 1.0
    pairs = [slow_clip(ratio, a, clip_low, clip_high) for a in adv]
    return [loss for loss, _ in pairs], [cut for _, cut in pairs]


def slow_gspo_token(
    new: list[float],
    old: list[float],
    adv: list[float],
    at: list[float],
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[list[float], list[bool]]:
    ratio = math.exp(mean_log_ratio(at, old)) if new else 1.0
    pairs = [
        slow_clip(ratio * math.exp(n) / math.exp(p), a, clip_low, clip_high)
        for n, a, p in zip(new, adv, at, strict=True)
    ]
    return [loss for loss, _ in pairs], [cut for _, cut in pairs]


def slow_gmpo(new: list[float], old: list[float], adv: list[float], at: list[float]) -> tuple[list[float], list[bool]]:
    """A product of clipped ratios and its root, token by token as the paper has it."""
    product, cut = 1.0, []
    for n, o, a in zip(new, old, adv, strict=True):
        ratio, sign = math.exp(n - o), 1.0 if a >= 0 else -1.0
        chosen = min(sign * ratio, sign * bounded(ratio, math.exp(-0.4), math.exp(0.4)))
        product *= abs(chosen) ** (1 / len(new))
        cut.append(chosen != sign * ratio)
    return [-a * product for a in adv], cut


def slow_cispo(new: list[float], old: list[float], adv: list[float], at: list[float]) -> tuple[list[float], list[bool]]:
    ratios = [math.exp(p - o) for p, o in zip(at, old, strict=True)]
    return (
        [-bounded(r, 0.0, 5.0) * a * n for r, a, n in zip(ratios, adv, new, strict=True)],
        [not 0.0 <= r <= 5.0 for r in ratios],
    )


def slow_sapo(new: list[float], old: list[float], adv: list[float], at: list[float]) -> tuple[list[float], list[bool]]:
    losses, cut = [], []
    for n, o, a in zip(new, old, adv, strict=True):
        tau = 1.0 if a > 0 else 1.05
        x = tau * (math.exp(n - o) - 1)
        losses.append(-a * 4 / tau / (1 + math.exp(-min(x, 700))))
        cut.append(1 / math.cosh(min(x, 700) / 2) ** 2 < 0.5)
    return losses, cut


CASES: dict[str, tuple[str, Slow, dict[str, float]]] = {
    "ppo": ("ppo", slow_ppo, {}),
    "ppo, dual clip": ("ppo", slow_ppo, {"dual_clip": 3.0}),
    "gspo": ("gspo", slow_gspo, {}),
    "gspo, wide": ("gspo", slow_gspo, {"clip_low": 0.2, "clip_high": 0.3}),
    "gspo_token": ("gspo_token", slow_gspo_token, {}),
    "gspo_token, wide": ("gspo_token", slow_gspo_token, {"clip_low": 0.2, "clip_high": 0.3}),
    "gmpo": ("gmpo", slow_gmpo, {}),
    "cispo": ("cispo", slow_cispo, {}),
    "sapo": ("sapo", slow_sapo, {}),
}


def test_every_loss_of_the_table_has_a_case() -> None:
    assert {name for name, _, _ in CASES.values()} == set(LOSSES)


# Log ratios from none to extreme; off the bounds themselves, where rounding decides what counts as clipped.
RATIOS = st.one_of(st.just(0.0), st.floats(-1, 1), st.sampled_from([-50.0, 50.0, -8.0, 8.0])).filter(
    lambda x: all(abs(x - math.log(bound)) > 1e-9 for bound in (0.8, 1.2, 3.0, 5.0)) and abs(abs(x) - 0.4) > 1e-9
)


@pytest.mark.parametrize("case", CASES)
@given(batch=answers(st.floats(-60, 0), RATIOS, NUMBERS))
@settings(max_examples=60)
def test_each_loss_follows_its_formula_on_ragged_batches(case: str, batch: Answers) -> None:
    name, slow, options = CASES[case]
    old, shift, advantages = batch.column(0), batch.column(1), batch.column(2)
    new = [[o + s for o, s in zip(*row, strict=True)] for row in zip(old, shift, strict=True)]
    sequences = torch.tensor(batch.sequences, dtype=torch.int64)
    losses, cut = LOSSES[name](flat(new), flat(old), flat(advantages), sequences, **options)
    rows = [slow(n, o, a, n, **options) for n, o, a in zip(new, old, advantages, strict=True)]
    assert_close(losses, [loss for row, _ in rows for loss in row])
    if "gspo" not in name:  # whose mean may fall on a bound, where rounding decides
        assert cut.tolist() == [c for _, row in rows for c in row]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(4))
def test_each_gradient_equals_finite_differences(case: str, seed: int) -> None:
    name, slow, options = CASES[case]
    generator = random.Random(seed)
    lengths = [3, 1, 0, 5, 4]
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    spans = [slice(a, b) for a, b in itertools.pairwise(ends)]
    old = [generator.uniform(-4, -1) for _ in range(ends[-1])]
    advantages = [generator.uniform(-2, 2) for _ in old]
    weights = [generator.uniform(0.1, 1) for _ in old]  # so that no two tokens can be mistaken for each other
    at = [o + generator.choice([0.05, 0.3, 1.2]) * generator.uniform(-1, 1) for o in old]

    def whole(new: list[float]) -> float:
        losses = [x for s in spans for x in slow(new[s], old[s], advantages[s], at[s], **options)[0]]
        return sum(weight * loss for weight, loss in zip(weights, losses, strict=True))

    new = tensor(at).requires_grad_()
    sequences = torch.tensor([i for i, length in enumerate(lengths) for _ in range(length)])
    losses, _ = LOSSES[name](new, tensor(old), tensor(advantages), sequences, **options)
    (losses * tensor(weights)).sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx(slopes(whole, at), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("shift", [-50.0, 50.0, -1000.0, 1000.0])
def test_extreme_ratios_leave_losses_and_gradients_finite(name: str, shift: float) -> None:
    for advantage in (-1.0, 0.0, 1.0):
        new = torch.full((4,), -2.0, requires_grad=True)  # float32, as in training
        losses, _ = LOSSES[name](new, new.detach() - shift, torch.full((4,), advantage), torch.tensor([0, 0, 1, 2]))
        losses.sum().backward()
        assert losses.isfinite().all()
        assert new.grad is not None and new.grad.isfinite().all()
        assert advantage != 0 or new.grad.abs().max() == 0


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_each_is_the_policy_gradient(name: str) -> None:
    """Over whole sequences with one advantage each: the gradient of a token is minus its advantage."""
    sequences = torch.tensor([0, 0, 0, 1, 2, 2])
    advantages = tensor([2.0, -1.0, 0.5])[sequences]
    new = tensor([-1.0, -2.0, -0.5, -3.0, -1.5, -0.1]).requires_grad_()
    losses, cut = LOSSES[name](new, new.detach(), advantages, sequences)
    losses.sum().backward()
    assert new.grad is not None
    assert_close(new.grad, (-advantages).tolist())
    assert not cut.any()


def test_gspo_of_tokens_is_gspo_where_sequences_have_one_advantage() -> None:
    torch.manual_seed(0)
    sequences = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    old = -torch.rand(9, dtype=torch.float64) - 1
    start = old + torch.randn(9, dtype=torch.float64) * 0.3
    advantages = tensor([1.0, -2.0, 0.5])[sequences]
    weights = AGGREGATIONS["sequence_mean"](sequences, Totals(9, 3, 100))
    gradients = []
    for name in ("gspo", "gspo_token"):
        new = start.clone().requires_grad_()
        losses, _ = LOSSES[name](new, old, advantages, sequences, clip_low=0.2, clip_high=0.2)
        (losses * weights).sum().backward()
        assert new.grad is not None
        gradients.append(new.grad.tolist())
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_a_micro_batch_without_tokens_has_no_losses_and_a_gradient_of_nothing(name: str) -> None:
    new = torch.zeros(0, requires_grad=True)
    losses, cut = LOSSES[name](new, torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    losses.sum().backward()
    assert len(losses) == len(cut) == 0
