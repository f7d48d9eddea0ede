"""Importance weights for tokens that another policy wrote: an older one, or the same one computed otherwise.

    log weights [tokens] = LEVELS[level](log_probs, rollout_log_probs, sequences)
    weights, cut         = CORRECTIONS[kind](log weights, low=..., high=...)
    losses * weights;      CorrectionFigures.of(log weights, cut) tells whether it bites

`log_probs` are the trainer's of the policy it starts the step from, `rollout_log_probs` those that came with the
answers. Weights carry no gradient. A token that is masked out adds nothing to the loss and still counts in its mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from practicum.algo.segments import means, sums

Level = Callable[[Tensor, Tensor, Tensor], Tensor]
Correction = Callable[..., tuple[Tensor, Tensor]]
_MAX_LOG_WEIGHT = 80.0  # beyond it a weight says only that something is broken; its square still is a number


def token_level(log_probs: Tensor, rollout_log_probs: Tensor, sequences: Tensor) -> Tensor:
    """`log(p_t / q_t)` of each token by itself: little variance, and biased, as what came before it is not weighed."""
    return log_probs.detach().double() - rollout_log_probs.double()


def sequence_level(log_probs: Tensor, rollout_log_probs: Tensor, sequences: Tensor) -> Tensor:
    """`sum over the sequence of log(p_t / q_t)`, the same for all its tokens: unbiased, and its variance grows fast
    with the length."""
    return sums(token_level(log_probs, rollout_log_probs, sequences), sequences)


def geometric_level(log_probs: Tensor, rollout_log_probs: Tensor, sequences: Tensor) -> Tensor:
    """`mean over the sequence of log(p_t / q_t)`, the geometric mean of its ratios: long answers are not cut for being
    long, so its bounds are close to 1."""
    return means(token_level(log_probs, rollout_log_probs, sequences), sequences)


def truncated(log_weights: Tensor, *, low: float = 0.0, high: float = 2.0) -> tuple[Tensor, Tensor]:
    """Weights held within bounds: `clip(w, low, high)` (IMPALA, arXiv 1802.01561, section 4.1; TIS for rollouts:
    fengyao.notion.site/off-policy-rl, where there is no bound from below).

    Returns the weights, [tokens] of float32, and where they were cut.
    """
    weights = _weights(log_weights)
    return weights.clamp(low, high).float(), (weights < low) | (weights > high)


def masked(log_weights: Tensor, *, low: float = 0.5, high: float = 5.0) -> tuple[Tensor, Tensor]:
    """Weights out of bounds are 0: `w if low <= w <= high else 0` (IcePop: Ring-1T, arXiv 2510.18855, for tokens, with
    these bounds; MIS for sequences: "When Speed Kills Stability", yingru.notion.site).

    Where rollout and trainer disagree so much, it is more likely an error of one of them than news. Returns the
    weights, [tokens] of float32, and where they were cut.
    """
    weights = _weights(log_weights)
    cut = (weights < low) | (weights > high)
    return torch.where(cut, 0.0, weights).float(), cut


def _weights(log_weights: Tensor) -> Tensor:
    return log_weights.double().clamp(-_MAX_LOG_WEIGHT, _MAX_LOG_WEIGHT).exp()


@dataclass(frozen=True, slots=True)
class CorrectionFigures:
    """Figures of the distance of two policies, in weights before they were cut. Parts of a batch can be combined."""

    num_tokens: int
    num_cut: int
    weight_sum: float
    square_sum: float
    max_weight: float  # at most e^80

    @classmethod
    def of(cls, log_weights: Tensor, cut: Tensor) -> CorrectionFigures:
        """Return the figures of a part of a batch, [tokens] each; it may be empty."""
        weights = _weights(log_weights)
        highest = weights.max().item() if len(weights) else 0.0
        return cls(len(weights), int(cut.sum()), weights.sum().item(), weights.square().sum().item(), highest)

    @classmethod
    def combined(cls, parts: Iterable[CorrectionFigures]) -> CorrectionFigures:
        """Over micro-batches and ranks."""
        parts = list(parts)
        return cls(
            num_tokens=sum(part.num_tokens for part in parts),
            num_cut=sum(part.num_cut for part in parts),
            weight_sum=sum(part.weight_sum for part in parts),
            square_sum=sum(part.square_sum for part in parts),
            max_weight=max((part.max_weight for part in parts), default=0.0),
        )

    @property
    def cut_share(self) -> float:
        """Share of tokens whose weight was truncated, or that were masked out."""
        return self.num_cut / max(1, self.num_tokens)

    @property
    def mean_weight(self) -> float:
        """About 1 where the rollout's log-probs are what they claim to be."""
        return self.weight_sum / self.num_tokens if self.num_tokens else 1.0

    @property
    def effective_share(self) -> float:
        """Effective sample size as a share of the tokens: `(sum w)^2 / (n * sum w^2)`. 1 where all weigh the same."""
        return self.weight_sum**2 / (self.num_tokens * self.square_sum) if self.num_tokens else 1.0


LEVELS: dict[str, Level] = {"token": token_level, "sequence": sequence_level, "geometric": geometric_level}
CORRECTIONS: dict[str, Correction] = {"truncated": truncated, "masked": masked}
