"""Estimates of the Kullback-Leibler divergence from samples, and how much of it to allow.

Two places for it, KL being one of `KL_ESTIMATORS` between policy and reference:

    in the reward   `Outcomes.penalties = coefficient * KL` of log-probs without gradient; use k1
    in the loss     `losses + coefficient * KL` of log-probs with gradient; use k2 or k3

What estimates a value well need not have the right gradient (Rethinking KL Regularization in RLHF, arXiv 2510.01555):
on policy the gradient of k2 in the loss is, in expectation, that of the divergence, as is k1's in the reward. That of
k3 is so to first order, and that of k1 in the loss is noise around 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

KLEstimator = Callable[[Tensor, Tensor], Tensor]


def k1(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """Per-token estimate of KL(p || q) from tokens drawn from p: `log(p/q)` (joschu.net/blog/kl-approx.html).

    Unbiased, of high variance, and negative for many tokens. `log_probs` are p's, `other_log_probs` q's.
    """
    return log_probs - other_log_probs


def k2(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """Per-token estimate of KL(p || q) from tokens drawn from p: `log(p/q)^2 / 2` (joschu.net/blog/kl-approx.html).

    Never negative, of low variance, a little biased where p and q are close and much where they are not.
    """
    return (log_probs - other_log_probs).square() / 2


def k3(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """Per-token estimate of KL(p || q) from tokens drawn from p: `q/p - 1 - log(q/p)` (joschu.net/blog/kl-approx.html).

    Unbiased and never negative. `log_probs` are p's, `other_log_probs` q's, both of the drawn tokens. Where q is e^88
    times as likely as p or more, it is beyond float32: infinite.
    """
    log_ratio = other_log_probs - log_probs
    return log_ratio.expm1() - log_ratio


KL_ESTIMATORS: dict[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3}


class AdaptiveKL:
    """A coefficient that seeks a divergence (Fine-Tuning LMs from Human Preferences, arXiv 1909.08593, section 2.2).

    After each step `coefficient *= 1 + rate * clip(KL / target - 1, -0.2, 0.2)`: by at most `0.2 * rate`, up when the
    policy has strayed further than `target` and down when less. Its only state is the coefficient.
    """

    def __init__(self, coefficient: float, target: float, rate: float = 0.1) -> None:
        if not (coefficient > 0 and target > 0 and 0 < rate < 5):
            raise ValueError(f"coefficient {coefficient} and target {target} must be positive, rate {rate} in (0, 5)")
        self.coefficient = coefficient
        self.target = target
        self.rate = rate

    def update(self, kl: float) -> None:
        """Told the mean divergence per token, or per answer, in which `target` is given."""
        if not math.isfinite(kl):
            raise ValueError(f"the divergence from the reference is {kl}: there is nothing to adapt to")
        self.coefficient *= 1 + self.rate * min(max(kl / self.target - 1, -0.2), 0.2)
