"""How far the policy has moved from the tokens it learns from, by how many updates old they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from practicum.algo.correction import CorrectionFigures
from practicum.algo.kl import k3


@dataclass(frozen=True, slots=True)
class AgeFigures:
    """Of tokens of one age. Parts of a batch can be combined."""

    kl: float  # KL(rollout || trainer), summed over the tokens
    weights: CorrectionFigures
    """Of the importance weights of tokens by themselves, before any correction."""

    @property
    def num_tokens(self) -> int:
        return self.weights.num_tokens


def figures_by_age(ages: Tensor, log_probs: Tensor, rollout_log_probs: Tensor) -> dict[int, AgeFigures]:
    """All [tokens]; `log_probs` are the trainer's before the step, `rollout_log_probs` those that came with them."""
    found = {}
    for age in torch.unique(ages).tolist():
        own = ages == age
        new, old = log_probs[own].double(), rollout_log_probs[own].double()
        weights = CorrectionFigures.of(new - old, torch.zeros_like(own[own]))
        found[int(age)] = AgeFigures(k3(old, new).sum().item(), weights)
    return found


def combined_ages(parts: Iterable[Mapping[int, AgeFigures]]) -> dict[int, AgeFigures]:
    """Over micro-batches and ranks."""
    together: dict[int, list[AgeFigures]] = {}
    for part in parts:
        for age, figures in part.items():
            together.setdefault(age, []).append(figures)
    return {
        age: AgeFigures(sum(one.kl for one in own), CorrectionFigures.combined(one.weights for one in own))
        for age, own in sorted(together.items())
    }
