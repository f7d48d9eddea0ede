from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.algo import ADVANTAGES, Outcomes, dr_grpo, gae, grpo, pass_at_k, remax, rloo, whiten
from tests.algo.ragged import NUMBERS, Answers, answers, assert_close, flat, tensor


def slow_grpo(rewards: list[float], groups: list[int]) -> list[float]:
    """Straight from the formula, one sample at a time."""
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        peers = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        deviation = statistics.stdev(peers) if len(peers) > 1 else 0.0
        result.append((reward - statistics.mean(peers)) / (deviation + 1e-6))
    return result


def slow_centred(rewards: list[float], groups: list[int]) -> list[float]:
    pairs = list(zip(rewards, groups, strict=True))
    return [reward - statistics.mean(r for r, g in pairs if g == group) for reward, group in pairs]


def slow_rloo(rewards: list[float], groups: list[int]) -> list[float]:
    result = []
    for i, group in enumerate(groups):
        others = [r for j, r in enumerate(rewards) if groups[j] == group and j != i]
        result.append(rewards[i] - statistics.mean(others) if others else 0.0)
    return result


def slow_pass_at_k(rewards: list[float], groups: list[int], k: int) -> list[float]:
    """The paper's two formulas, with exact binomials."""
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        peers = [r > 0.5 for r, g in zip(rewards, groups, strict=True) if g == group]
        size, wrong = len(peers), len(peers) - sum(peers)
        mean = 1 - math.comb(wrong, k) / math.comb(size, k) if size >= k else 0.0
        deviation = math.sqrt(mean * (1 - mean))
        if deviation == 0:
            result.append(0.0)
        elif reward > 0.5:
            result.append((1 - mean) / deviation)
        else:
            result.append((1 - mean - math.comb(wrong - 1, k - 1) / math.comb(size - 1, k - 1)) / deviation)
    return result


def slow_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Of one sequence, term by term."""
    following = [*values, 0.0][1:]
    errors = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    return [
        sum((gamma * lam) ** (later - t) * errors[later] for later in range(t, len(errors))) for t in range(len(errors))
    ]


def slow_white(numbers: list[float]) -> list[float]:
    if len(numbers) == 0:
        return []
    deviation = statistics.pstdev(numbers)
    return [(x - statistics.mean(numbers)) / (deviation + 1e-6) for x in numbers]


def outcomes(batch: Answers) -> Outcomes:
    """First column penalties, second values; the greedy answer to prompt g was worth g / 2."""
    return Outcomes(
        tensor(batch.rewards),
        torch.tensor(batch.groups),
        torch.tensor(batch.sequences, dtype=torch.int64),
        penalties=flat(batch.column(0)),
        values=flat(batch.column(1)),
        baselines=tensor([group / 2 for group in batch.groups]),
    )


def spread(per_answer: list[float], batch: Answers) -> list[float]:
    return [x for x, tokens in zip(per_answer, batch.tokens, strict=True) for _ in tokens]


def graded_tokens(batch: Answers) -> list[list[float]]:
    """Rewards by token: less the penalty, and the grade at the end."""
    rows = [[-penalty for penalty in row] for row in batch.column(0)]
    for reward, row in zip(batch.rewards, rows, strict=True):
        if row:
            row[-1] += reward
    return rows


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 5)), min_size=1, max_size=40))
def test_grpo_equals_the_formula(pairs: list[tuple[float, int]]) -> None:
    rewards, groups = [r for r, _ in pairs], [g for _, g in pairs]
    fast = grpo(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups))
    assert fast.tolist() == pytest.approx(slow_grpo(rewards, groups), rel=1e-6, abs=1e-6)


def test_a_group_without_differences_or_of_one_teaches_nothing() -> None:
    rewards = torch.tensor([0.1, 0.1, 0.1, 5.0], dtype=torch.float64)  # whose mean is not quite 0.1
    groups = torch.tensor([0, 0, 0, 1])
    for estimate in (grpo, dr_grpo, rloo, pass_at_k):
        assert estimate(rewards, groups).abs().max() == 0


def test_groups_may_come_in_any_order() -> None:
    rewards = torch.tensor([1.0, 7.0, 0.0, 9.0], dtype=torch.float64)
    mixed = grpo(rewards, torch.tensor([4, 2, 4, 2]))
    assert mixed[0] > 0 > mixed[2]
    assert mixed[3] > 0 > mixed[1]


@given(answers(NUMBERS))
def test_estimators_of_answers_equal_their_formulas(batch: Answers) -> None:
    rewards, groups = batch.rewards, batch.groups
    fast = tensor(rewards), torch.tensor(groups)
    assert_close(grpo(*fast), slow_grpo(rewards, groups))
    assert_close(grpo(*fast, with_std=False), slow_centred(rewards, groups))
    assert_close(dr_grpo(*fast), slow_centred(rewards, groups))
    assert_close(rloo(*fast), slow_rloo(rewards, groups))
    assert_close(remax(fast[0], fast[0] / 2), [r - r / 2 for r in rewards])
    for k in (1, 2, 3):
        assert_close(pass_at_k(*fast, k=k), slow_pass_at_k(rewards, groups, k))


@pytest.mark.parametrize("size, right, k", [(32, 1, 4), (64, 63, 1), (64, 30, 16), (512, 3, 128), (1500, 20, 700)])
def test_pass_at_k_of_large_groups(size: int, right: int, k: int) -> None:
    rewards = [1.0] * right + [0.0] * (size - right)
    assert_close(pass_at_k(tensor(rewards), torch.zeros(size), k=k), slow_pass_at_k(rewards, [0] * size, k))


def test_pass_at_k_is_the_mean_over_all_sets_of_k() -> None:
    rewards, k = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0], 3
    sets = list(itertools.combinations(range(len(rewards)), k))
    passed = {members: max(rewards[i] for i in members) for members in sets}
    mean, deviation = statistics.mean(passed.values()), statistics.pstdev(passed.values())
    slow = [statistics.mean((p - mean) / deviation for m, p in passed.items() if i in m) for i in range(len(rewards))]
    assert_close(pass_at_k(tensor(rewards), torch.zeros(len(rewards)), k=k), slow)


@given(answers(NUMBERS, NUMBERS, st.booleans()), st.sampled_from([(1.0, 0.95), (0.9, 1.0), (0.5, 0.0), (1.0, 1.0)]))
def test_gae_follows_the_formula_and_bridges_what_the_model_did_not_write(
    batch: Answers, options: tuple[float, float]
) -> None:
    gamma, lam = options
    slow: list[float] = []
    for row in batch.tokens:
        rewards: list[float] = []  # of the model's own tokens; what came after one of them is its
        for reward, _, is_own in row:
            if is_own:
                rewards.append(reward)
            elif rewards:
                rewards[-1] += reward
        advantages = iter(slow_gae(rewards, [value for _, value, is_own in row if is_own], gamma, lam))
        slow += [next(advantages) if is_own else 0.0 for _, _, is_own in row]
    mask = torch.tensor([bool(is_own) for row in batch.column(2) for is_own in row], dtype=torch.bool)
    sequences = torch.tensor(batch.sequences, dtype=torch.int64)
    fast = gae(flat(batch.column(0)), flat(batch.column(1)), sequences, mask, gamma=gamma, lam=lam)
    assert_close(fast, slow)


def test_with_lambda_1_the_returns_are_what_was_earned_from_there_on() -> None:
    rewards, values = tensor([0.0, 1.0, 0.0, 2.0]), tensor([5.0, -1.0, 3.0, 0.5])
    advantages = gae(rewards, values, torch.tensor([0, 0, 0, 1]), lam=1.0)
    assert (advantages + values).tolist() == [1.0, 1.0, 0.0, 2.0]


SLOW: dict[str, Callable[[Answers], list[float]]] = {
    "grpo": lambda b: spread(slow_grpo(whole(b), b.groups), b),
    "dr_grpo": lambda b: spread(slow_centred(whole(b), b.groups), b),
    "rloo": lambda b: spread(slow_rloo(whole(b), b.groups), b),
    "remax": lambda b: spread([r - g / 2 for r, g in zip(whole(b), b.groups, strict=True)], b),
    "gae": lambda b: [
        x
        for rewards, values in zip(graded_tokens(b), b.column(1), strict=True)
        for x in slow_gae(rewards, values, 1.0, 0.95)
    ],
    "reinforce_plus_plus": lambda b: slow_white([sum(row[t:]) for row in graded_tokens(b) for t in range(len(row))]),
    "reinforce_plus_plus_baseline": lambda b: slow_white(
        [
            reward - sum(row[t:])
            for reward, row in zip(slow_centred(b.rewards, b.groups), b.column(0), strict=True)
            for t in range(len(row))
        ]
    ),
}


def whole(batch: Answers) -> list[float]:
    return [reward - sum(row) for reward, row in zip(batch.rewards, batch.column(0), strict=True)]


@pytest.mark.parametrize("name", SLOW)
@given(batch=answers(NUMBERS, NUMBERS))
def test_every_estimator_of_the_table_takes_the_same_outcomes(name: str, batch: Answers) -> None:
    assert_close(ADVANTAGES[name].advantages(outcomes(batch)), SLOW[name](batch))


def test_the_table_is_tested_whole() -> None:
    assert set(SLOW) | {"pass_at_k"} == set(ADVANTAGES)


def test_pass_at_k_from_the_table_has_no_place_for_penalties() -> None:
    rewards, groups, sequences = tensor([1.0, 0, 0, 0]), torch.zeros(4), torch.tensor([0, 0, 1, 2, 3, 3])
    slow = slow_pass_at_k(rewards.tolist(), [0] * 4, 2)
    fast = ADVANTAGES["pass_at_k"].advantages(Outcomes(rewards, groups, sequences), k=2)
    assert_close(fast, [slow[i] for i in sequences])
    assert not ADVANTAGES["pass_at_k"].takes_penalties
    with pytest.raises(ValueError, match="put them in the loss"):
        ADVANTAGES["pass_at_k"].advantages(Outcomes(rewards, groups, sequences, penalties=torch.zeros(6)), k=2)


@pytest.mark.parametrize("name, needs", [("gae", "critic"), ("remax", "greedy")])
def test_what_an_estimator_needs_and_does_not_get_is_named(name: str, needs: str) -> None:
    bare = Outcomes(tensor([1.0]), torch.tensor([0]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=needs):
        ADVANTAGES[name].advantages(bare)


def test_whitening_leaves_equals_alone() -> None:
    assert whiten(tensor([0.1] * 7)).tolist() == [0.0] * 7
    assert whiten(tensor([])).tolist() == []
    white = whiten(tensor([1.0, 2.0, 6.0]))
    assert white.mean().item() == pytest.approx(0, abs=1e-12)
    assert white.std(correction=0).item() == pytest.approx(1, rel=1e-5)
