"""Policy losses: pure functions on per-token tensors."""

from __future__ import annotations

from torch import Tensor


def clipped_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective with separate bounds (PPO, arXiv 1707.06347, eq. 7; clip-higher: DAPO, arXiv 2503.14476).

    `-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)` with `ratio = exp(log_probs - old_log_probs)`.
    All tensors [tokens]. Returns the loss of each token, and whether the clip cut off its gradient.
    """
    ratio = (log_probs - old_log_probs).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -unclipped.minimum(clipped), clipped < unclipped
