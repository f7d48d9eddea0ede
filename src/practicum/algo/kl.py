"""Estimates of the Kullback-Leibler divergence from samples."""

from __future__ import annotations

from torch import Tensor


def k3(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """Per-token estimate of KL(p || q) from tokens drawn from p: `q/p - 1 - log(q/p)` (joschu.net/blog/kl-approx.html).

    Unbiased and never negative. `log_probs` are p's, `other_log_probs` q's, both of the drawn tokens.
    """
    log_ratio = other_log_probs - log_probs
    return log_ratio.expm1() - log_ratio
