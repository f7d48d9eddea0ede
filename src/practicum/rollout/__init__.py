"""Rollout: prompts in, samples out, by whichever engine."""

from practicum.rollout.base import BaseRollout
from practicum.rollout.worker import ENGINES, RolloutWorker

__all__ = ["ENGINES", "BaseRollout", "RolloutWorker"]
