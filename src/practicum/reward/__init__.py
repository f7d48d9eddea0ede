"""The reward centre: two managers, the worker, and the router in front of models and services."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from practicum.reward.centre import check_reward, open_reward_centre
    from practicum.reward.manager import RewardLoopManager
    from practicum.reward.model_manager import RewardModelManager
    from practicum.reward.router import Router
    from practicum.reward.worker import RewardLoopWorker

# The managers pull in Ray and torch, which a router or a grading process does not need: only for those who ask.
_HOMES = {
    "RewardLoopManager": "manager",
    "RewardLoopWorker": "worker",
    "RewardModelManager": "model_manager",
    "Router": "router",
    "check_reward": "centre",
    "open_reward_centre": "centre",
}

__all__ = [
    "RewardLoopManager",
    "RewardLoopWorker",
    "RewardModelManager",
    "Router",
    "check_reward",
    "open_reward_centre",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"practicum.reward.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'practicum.reward' has no attribute {name!r}")
