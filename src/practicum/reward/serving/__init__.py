"""Replicas of a reward model in their places; what serves them is `practicum.rollout.serving`."""

from practicum.reward.serving.placed import PlacedReplica
from practicum.reward.serving.replica import ReplicaMemory, RewardModelReplica
from practicum.reward.serving.watch import Watch

__all__ = ["PlacedReplica", "ReplicaMemory", "RewardModelReplica", "Watch"]
