"""Rollout: prompt groups in, the same groups with their answers out, by whichever engine.

engine = NativeRollout("./my-model", device=torch.device("cpu"), dtype=torch.float32, max_batch=64)
group = PromptGroup("q1", prompt, prompt_ids, SamplingParams(64, num_answers=8), seed=1)
for finished in engine.generate_all([group]):
    print([trajectory.last.text for trajectory in finished.trajectories])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from practicum.rollout.base import BaseRollout
    from practicum.rollout.engines import ENGINES
    from practicum.rollout.manager import RolloutManager
    from practicum.rollout.replica import RolloutReplica
    from practicum.rollout.worker import RolloutWorker

__all__ = ["ENGINES", "BaseRollout", "RolloutManager", "RolloutReplica", "RolloutWorker"]

# Engines pull in torch and transformers, which the processes that run tools do not need: only for those who ask.
_MODULES = {
    "ENGINES": "engines",
    "BaseRollout": "base",
    "RolloutManager": "manager",
    "RolloutReplica": "replica",
    "RolloutWorker": "worker",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"practicum.rollout.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'practicum.rollout' has no attribute {name!r}")
