"""The reward centre: who grades, and how. The router in front of graders is in `practicum.reward.router`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from practicum.reward.centre import check_reward, open_reward_centre
    from practicum.reward.graded import GradedBatch, GradingReport, Progress
    from practicum.reward.graders import GRADERS
    from practicum.reward.manager import GradingPolicy, GradingRound, RewardLoopManager
    from practicum.reward.model_manager import RewardModelManager
    from practicum.reward.worker import RewardLoopWorker

__all__ = [
    "GRADERS",
    "GradedBatch",
    "GradingPolicy",
    "GradingReport",
    "GradingRound",
    "Progress",
    "RewardLoopManager",
    "RewardLoopWorker",
    "RewardModelManager",
    "check_reward",
    "open_reward_centre",
]

# The managers pull in Ray and torch, which a router or a grading process does not need: only for those who ask.
_HOMES = {
    "GRADERS": "graders",
    "GradedBatch": "graded",
    "GradingPolicy": "manager",
    "GradingReport": "graded",
    "GradingRound": "manager",
    "Progress": "graded",
    "RewardLoopManager": "manager",
    "RewardLoopWorker": "worker",
    "RewardModelManager": "model_manager",
    "check_reward": "centre",
    "open_reward_centre": "centre",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"practicum.reward.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'practicum.reward' has no attribute {name!r}")
