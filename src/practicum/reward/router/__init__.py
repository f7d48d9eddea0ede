"""The reward router: one HTTP address in front of many workers.

from practicum.reward.router import Router

with Router(workers=["http://127.0.0.1:8001", "http://127.0.0.1:8002"]).start() as router:
    ...  # send requests to router.url
"""

from practicum.reward.router.launch import Router, RouterControl, RouterHandle
from practicum.reward.router.policy import POLICIES
from practicum.reward.router.settings import RouterSettings

__all__ = ["POLICIES", "Router", "RouterControl", "RouterHandle", "RouterSettings"]
