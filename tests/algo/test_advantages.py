from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.algo import grpo


def slow_grpo(rewards: list[float], groups: list[int]) -> list[float]:
    """Straight from the formula, one sample at a time."""
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        peers = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        deviation = statistics.stdev(peers) if len(peers) > 1 else 0.0
        result.append((reward - statistics.mean(peers)) / (deviation + 1e-6))
    return result


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 5)), min_size=1, max_size=40))
def test_grpo_equals_the_formula(pairs: list[tuple[float, int]]) -> None:
    rewards, groups = [r for r, _ in pairs], [g for _, g in pairs]
    fast = grpo(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups))
    assert fast.tolist() == pytest.approx(slow_grpo(rewards, groups), rel=1e-6, abs=1e-6)


def test_a_group_without_differences_or_of_one_teaches_nothing() -> None:
    rewards = torch.tensor([0.1, 0.1, 0.1, 5.0], dtype=torch.float64)  # whose mean is not quite 0.1
    assert grpo(rewards, torch.tensor([0, 0, 0, 1])).abs().max() == 0


def test_groups_may_come_in_any_order() -> None:
    rewards = torch.tensor([1.0, 7.0, 0.0, 9.0], dtype=torch.float64)
    mixed = grpo(rewards, torch.tensor([4, 2, 4, 2]))
    assert mixed[0] > 0 > mixed[2]
    assert mixed[3] > 0 > mixed[1]
