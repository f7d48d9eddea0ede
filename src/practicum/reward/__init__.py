"""The reward centre: who grades, and how. The router in front of graders is in `practicum.reward.router`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from practicum.reward.graders import GRADERS
    from practicum.reward.loop import RewardLoopManager, RewardLoopWorker, check_reward

__all__ = ["GRADERS", "RewardLoopManager", "RewardLoopWorker", "check_reward"]


def __getattr__(name: str) -> Any:
    # The managers pull in Ray, which a router does not need: only for those who ask.
    if name == "GRADERS":
        from practicum.reward.graders import GRADERS

        return GRADERS
    if name in __all__:
        from practicum.reward import loop

        return getattr(loop, name)
    raise AttributeError(f"module 'practicum.reward' has no attribute {name!r}")
