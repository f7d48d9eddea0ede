"""A small HTTP server for reward models that transformers has: classifiers, and causal models that judge in words."""

from practicum.reward.serving.placed import PlacedReplica
from practicum.reward.serving.replica import ReplicaMemory, RewardModelReplica
from practicum.reward.serving.server import ModelServer
from practicum.reward.serving.watch import Watch

__all__ = ["ModelServer", "PlacedReplica", "ReplicaMemory", "RewardModelReplica", "Watch"]
