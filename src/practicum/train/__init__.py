"""Training on FSDP2."""

from practicum.train.actor import ActorSettings, ActorWorker, MiniBatch, UpdateStats

__all__ = ["ActorSettings", "ActorWorker", "MiniBatch", "UpdateStats"]
