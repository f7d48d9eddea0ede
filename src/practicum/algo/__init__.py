"""Advantages, losses, KL: pure functions on tensors that know no config."""

from practicum.algo.advantages import ADVANTAGES, grpo
from practicum.algo.kl import k3
from practicum.algo.losses import clipped_policy_loss

__all__ = ["ADVANTAGES", "clipped_policy_loss", "grpo", "k3"]
