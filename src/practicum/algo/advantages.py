"""Advantage estimators: pure functions from rewards to how much better than expected each answer was."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

GroupEstimator = Callable[[Tensor, Tensor], Tensor]


def grpo(rewards: Tensor, groups: Tensor, eps: float = 1e-6) -> Tensor:
    """Group-relative advantage (DeepSeekMath, arXiv 2402.03300, eq. 21): `(r_i - mean(r)) / (std(r) + eps)`.

    rewards [samples], groups [samples] with equal numbers for answers to the same prompt; returns [samples]. Mean and
    sample standard deviation (denominator n - 1) are taken over the group. A group of one, or one whose rewards are
    all equal, says nothing about what is better: its advantages are 0.
    """
    _, index = torch.unique(groups, return_inverse=True)
    num_groups = int(index.max()) + 1
    size = rewards.new_zeros(num_groups).index_add_(0, index, torch.ones_like(rewards))
    mean = rewards.new_zeros(num_groups).index_add_(0, index, rewards) / size
    centred = rewards - mean[index]
    variance = rewards.new_zeros(num_groups).index_add_(0, index, centred.square()) / (size - 1).clamp(min=1)
    # Equal rewards can differ from their mean by rounding, which is no signal.
    low = rewards.new_full((num_groups,), torch.inf).scatter_reduce_(0, index, rewards, "amin")
    high = rewards.new_full((num_groups,), -torch.inf).scatter_reduce_(0, index, rewards, "amax")
    return torch.where((low < high)[index], centred / (variance.sqrt()[index] + eps), 0.0)


ADVANTAGES: dict[str, GroupEstimator] = {"grpo": grpo}
