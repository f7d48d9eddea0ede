"""Policy losses: pure functions on per-token tensors.

One shape fits all of `LOSSES`: `(log_probs, old_log_probs, advantages, sequences, **options)`, each [tokens], give the
loss of each token and whether the loss held its gradient back, both [tokens]. `sequences` tells the tokens of different
answers apart; a sequence must be whole in the batch given. `old_log_probs` and `advantages` carry no gradient.
Keyword-only parameters are the options. How the losses of tokens become one number is `aggregation`'s matter.

Ratios are `exp(log_probs - old_log_probs)`, held within e^-80 and e^80 (without gradient beyond): the losses and their
gradients stay finite in float32 whatever the log-probs, short of advantages above a thousand.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from practicum.algo.segments import means

PolicyLoss = Callable[..., tuple[Tensor, Tensor]]
MAX_LOG_RATIO = 80.0


def clipped_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective with separate bounds (PPO, arXiv 1707.06347, eq. 7; clip-higher: DAPO, arXiv 2503.14476).

    `-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)` with `ratio = exp(log_probs - old_log_probs)`.
    All tensors [tokens]. Returns the loss of each token, and whether the clip cut off its gradient.

    With `dual_clip` c > 1, where A < 0 the objective is not let below `c * A` (dual-clip PPO, arXiv 1912.09729): a
    token that has become far likelier than it was, though it should not, does not outweigh all others.
    """
    losses, clipped = _clipped(_ratio(log_probs - old_log_probs), advantages, clip_low, clip_high)
    if dual_clip is None:
        return losses, clipped
    ceiling = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
    return losses.minimum(ceiling), clipped | (losses > ceiling)


def ppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`clipped_policy_loss`: each token by itself, whatever its sequence. The bounds are DAPO's; PPO's were 0.2."""
    return clipped_policy_loss(log_probs, old_log_probs, advantages, clip_low, clip_high, dual_clip)


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[Tensor, Tensor]:
    """Group sequence policy optimisation (arXiv 2507.18071, eq. 5 and 7): the sequence is clipped as a whole.

    `-min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A)` with `s = exp(mean over the sequence of log ratios)`. All
    tokens of a sequence have the same loss and share its gradient, so that the paper's mean over sequences is the
    aggregation `sequence_mean`. The bounds are far tighter than PPO's since s is a mean. One advantage a sequence is
    meant; for advantages of tokens see `gspo_token`.
    """
    return _clipped(_ratio(means(log_probs - old_log_probs, sequences)), advantages, clip_low, clip_high)


def gspo_token(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[Tensor, Tensor]:
    """GSPO for advantages that differ within a sequence (arXiv 2507.18071, eq. 13 and 14).

    As `gspo` with `s_t = sg(s) * p_t / sg(p_t)` for s, sg stopping the gradient: the value of s, and a gradient through
    the token's own probability p_t. With one advantage a sequence and `sequence_mean` it is `gspo`.
    """
    of_sequence = means((log_probs - old_log_probs).detach(), sequences)
    return _clipped(_ratio(of_sequence + log_probs - log_probs.detach()), advantages, clip_low, clip_high)


def gmpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> tuple[Tensor, Tensor]:
    """Geometric-mean policy optimisation (arXiv 2507.20673, section 3): tokens are clipped, then their mean is taken.

    `-A * exp(mean over the sequence of c_t)`, where c_t is the token's log ratio, held at or below `clip_high` where A
    is not negative and at or above `-clip_low` where it is: the bounds are those of the logarithm, (e^-0.4, e^0.4) in
    the paper. As with `gspo`, one advantage a sequence is meant, and `sequence_mean`.
    """
    log_ratio = log_probs - old_log_probs
    is_good = advantages >= 0
    held = torch.where(is_good, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    clipped = torch.where(is_good, log_ratio > clip_high, log_ratio < -clip_low)
    return -advantages * _ratio(means(held, sequences)), clipped


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> tuple[Tensor, Tensor]:
    """CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5): the weight is clipped, the gradient never cut off.

    `-sg(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * log_probs`, sg stopping the gradient. As in the paper there is
    no bound from below by default (`clip_low` 1 is a ratio of 0). The second result tells whose weight was clipped.
    """
    ratio = _ratio(log_probs - old_log_probs).detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * log_probs, weight != ratio


def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> tuple[Tensor, Tensor]:
    """Soft adaptive policy optimisation (arXiv 2511.20347, section 3): a gate that closes softly instead of a clip.

    `-A * 4 / tau * sigmoid(tau * (ratio - 1))`, tau being `tau_positive` where A > 0 and `tau_negative` elsewhere. On
    policy its gradient is the policy gradient; away from it, it is weighted by `1 / cosh^2(tau / 2 * (ratio - 1))`. The
    second result tells where that weight is below a half.
    """
    tau = torch.where(advantages > 0, tau_positive, tau_negative).to(advantages)
    gate = (tau * (_ratio(log_probs - old_log_probs) - 1)).sigmoid()
    return -advantages * 4 / tau * gate, (4 * gate * (1 - gate)).detach() < 0.5


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -unclipped.minimum(clipped), clipped < unclipped


LOSSES: dict[str, PolicyLoss] = {
    "ppo": ppo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
}
