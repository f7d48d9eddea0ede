"""The loss of a policy as a whole: choices from the tables, put together.

    policy loss of each token ─▶ * importance weight ─▶ + coefficient * KL ─▶ - bonus * entropy ─▶ * weight of the token

The sum over all tokens of a mini-batch, whatever its split into micro-batches and ranks, is what is minimised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from practicum.algo.aggregation import AGGREGATIONS, Totals
from practicum.algo.correction import CORRECTIONS, LEVELS, CorrectionFigures
from practicum.algo.kl import KL_ESTIMATORS
from practicum.algo.losses import LOSSES


@dataclass(frozen=True, slots=True)
class Tokens:
    """The learnt tokens of a micro-batch, [tokens] each. Only `log_probs` and `entropy` may have gradients."""

    log_probs: Tensor
    entropy: Tensor
    old_log_probs: Tensor  # of the policy that the step started from
    rollout_log_probs: Tensor  # as they came with the answers
    advantages: Tensor
    sequences: Tensor  # equal numbers for tokens of the same answer
    reference_log_probs: Tensor | None = None
    staleness: Tensor | None = None  # by how many updates the weights that wrote them are older


@dataclass(frozen=True, slots=True)
class Losses:
    total: Tensor  # scalar: this micro-batch's part of the sum
    of_tokens: Tensor  # [tokens], before they are weighed against each other
    clipped: Tensor  # [tokens] of bool
    correction: CorrectionFigures | None


@dataclass(frozen=True, slots=True)
class Objective:
    """Names from the tables and their options. `bounds` are those of the importance weights."""

    loss: str = "ppo"
    loss_options: Mapping[str, float] = field(default_factory=dict)
    aggregation: str = "token_mean"
    correction: str | None = None
    level: str = "token"
    bounds: Mapping[str, float] = field(default_factory=dict)
    kl: str | None = None  # in the loss
    entropy_bonus: float = 0.0

    def __call__(self, tokens: Tokens, totals: Totals, kl_coefficient: float = 0.0) -> Losses:
        losses, clipped = LOSSES[self.loss](
            tokens.log_probs, tokens.old_log_probs, tokens.advantages, tokens.sequences, **self.loss_options
        )
        figures = None
        if self.correction is not None:
            log_weights = LEVELS[self.level](tokens.old_log_probs, tokens.rollout_log_probs, tokens.sequences)
            weights, cut = CORRECTIONS[self.correction](log_weights, **self.bounds)
            losses = losses * weights
            figures = CorrectionFigures.of(log_weights, cut)
        if self.kl is not None:
            assert tokens.reference_log_probs is not None
            losses = losses + kl_coefficient * KL_ESTIMATORS[self.kl](tokens.log_probs, tokens.reference_log_probs)
        if self.entropy_bonus:
            losses = losses - self.entropy_bonus * tokens.entropy
        total = (losses * AGGREGATIONS[self.aggregation](tokens.sequences, totals)).sum()
        return Losses(total, losses.detach(), clipped, figures)
