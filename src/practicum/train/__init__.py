"""Training on FSDP2."""

from practicum.train.actor import ActorSettings, ActorWorker, UpdateStats
from practicum.train.batch import MiniBatch, totals_of
from practicum.train.critic import CriticSettings, CriticStats, CriticWorker
from practicum.train.reference import ReferenceSettings, ReferenceWorker

__all__ = [
    "ActorSettings",
    "ActorWorker",
    "CriticSettings",
    "CriticStats",
    "CriticWorker",
    "MiniBatch",
    "ReferenceSettings",
    "ReferenceWorker",
    "UpdateStats",
    "totals_of",
]
