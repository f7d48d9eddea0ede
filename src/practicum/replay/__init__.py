"""Router replay: which experts tokens were sent to, recorded and chosen again."""

from practicum.replay.hooks import (
    ReplayPass,
    RouteRecorder,
    RouteReplayer,
    RouterShape,
    check_replayable,
    find_routers,
    router_shape,
)
from practicum.replay.routes import coded, decoded

__all__ = [
    "ReplayPass",
    "RouteRecorder",
    "RouteReplayer",
    "RouterShape",
    "check_replayable",
    "coded",
    "decoded",
    "find_routers",
    "router_shape",
]
