"""Rollout: prompts in, samples out, by whichever engine."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from practicum.rollout.base import BaseRollout
    from practicum.rollout.manager import RolloutManager
    from practicum.rollout.replica import RolloutReplica
    from practicum.rollout.worker import ENGINES, RolloutWorker

__all__ = ["ENGINES", "BaseRollout", "RolloutManager", "RolloutReplica", "RolloutWorker"]

# Engines pull in torch and transformers, which the processes that run tools do not need: only for those who ask.
_HOMES = {
    "ENGINES": "worker",
    "BaseRollout": "base",
    "RolloutManager": "manager",
    "RolloutReplica": "replica",
    "RolloutWorker": "worker",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"practicum.rollout.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'practicum.rollout' has no attribute {name!r}")
