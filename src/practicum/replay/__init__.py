"""Router replay: which experts tokens were sent to, kept so that it can be repeated."""

from practicum.replay.hooks import RouteRecorder, find_routers

__all__ = ["RouteRecorder", "find_routers"]
