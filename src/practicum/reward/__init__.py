"""The reward centre: who grades, and how."""

from practicum.reward.graders import GRADERS
from practicum.reward.loop import RewardLoopManager, RewardLoopWorker, check_reward

__all__ = ["GRADERS", "RewardLoopManager", "RewardLoopWorker", "check_reward"]
