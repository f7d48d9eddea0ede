"""Router replay: which experts tokens were sent to, recorded and chosen again."""

from practicum.replay.format import RecordingHeader
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
from practicum.replay.session import Placed, ReplaySession, ReplaySettings, ReplayStats, recording_header
from practicum.replay.store import Recording, RouteWriter

__all__ = [
    "Placed",
    "Recording",
    "RecordingHeader",
    "ReplayPass",
    "ReplaySession",
    "ReplaySettings",
    "ReplayStats",
    "RouteRecorder",
    "RouteReplayer",
    "RouteWriter",
    "RouterShape",
    "check_replayable",
    "coded",
    "decoded",
    "find_routers",
    "recording_header",
    "router_shape",
]
