"""Figures of how far the policy has moved from the tokens it learns from, by their staleness in updates.

The rule that bounds it is in loop/pipeline.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from practicum.algo.correction import CorrectionFigures
from practicum.algo.kl import k3


@dataclass(frozen=True, slots=True)
class StalenessFigures:
    """Figures of the tokens of one staleness. Parts of a batch can be combined."""

    kl: float  # KL(rollout || trainer), summed over the tokens
    weights: CorrectionFigures
    """The importance weights of tokens by themselves, before any correction."""

    @property
    def num_tokens(self) -> int:
        return self.weights.num_tokens


def figures_by_staleness(
    staleness: Tensor, log_probs: Tensor, rollout_log_probs: Tensor
) -> dict[int, StalenessFigures]:
    """Return the figures of tokens by their staleness.

    All are [tokens]; `log_probs` are the trainer's before the step, `rollout_log_probs` those that came with them.
    """
    found = {}
    for updates in torch.unique(staleness).tolist():
        own = staleness == updates
        new, old = log_probs[own].double(), rollout_log_probs[own].double()
        weights = CorrectionFigures.of(new - old, torch.zeros_like(own[own]))
        found[int(updates)] = StalenessFigures(k3(old, new).sum().item(), weights)
    return found


def combined_figures(parts: Iterable[Mapping[int, StalenessFigures]]) -> dict[int, StalenessFigures]:
    """Return the figures of several micro-batches or ranks together."""
    together: dict[int, list[StalenessFigures]] = {}
    for part in parts:
        for updates, figures in part.items():
            together.setdefault(updates, []).append(figures)
    return {
        updates: StalenessFigures(sum(one.kl for one in own), CorrectionFigures.combined(one.weights for one in own))
        for updates, own in sorted(together.items())
    }
