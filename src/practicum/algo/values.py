"""The critic's loss, and how much it explains."""

from __future__ import annotations

from torch import Tensor


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Squared error, clipped as in PPO's code (Implementation Matters, arXiv 2005.12729, section 3).

    `max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2`. All tensors [tokens]; only `values` has a
    gradient. Returns the loss of each token, and whether the clip cut off its gradient.
    """
    held = old_values + (values - old_values).clamp(-clip, clip)
    unclipped, clipped = (values - returns).square(), (held - returns).square()
    return unclipped.maximum(clipped) / 2, clipped > unclipped


def explained_variance(values: Tensor, returns: Tensor) -> float | None:
    """`1 - var(R - V) / var(R)` over tokens: 1 for a perfect critic, 0 for one that knows the mean, below for worse.

    None where the returns are all equal and there is nothing to explain.
    """
    if len(returns) == 0 or returns.min() == returns.max():
        return None
    returns = returns.double()
    left = (returns - values.double()).var(correction=0) / returns.var(correction=0)
    return 1 - left.item()
