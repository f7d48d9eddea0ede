"""A worker as the router sees it: its address, what it has in hand, how it is, and the connections to it."""

from __future__ import annotations

import enum
import math
import ssl
import time
from itertools import islice
from typing import TYPE_CHECKING

from practicum.reward.router.pace import Average, Pace
from practicum.reward.router.settings import worker_address

if TYPE_CHECKING:
    from practicum.reward.router.connection import WorkerConnection

# Counting the older ones takes longer the more are in flight, so that with many it is done now and then.
_ALWAYS_COUNTED = 8
_COUNT_EVERY = 8
_MAX_COUNTED = 1024
NOT_PROBED = "not probed yet"


class State(enum.Enum):
    """How a worker is. What an operator has asked of it (drain, pause) and its version are told apart from this."""

    STARTING = "starting"  # has not answered a probe yet
    UP = "up"
    TRIAL = "trial"  # was ejected, and gets a few requests, one more with each that succeeds
    EJECTED = "ejected"


class Upstream:
    __slots__ = (
        "address",
        "backlog",
        "draining",
        "failing",
        "failures_in_row",
        "idle",
        "in_flight",
        "is_late",
        "last_ejection",
        "last_success",
        "limit",
        "num_ejections",
        "num_failures",
        "num_requests",
        "pace",
        "paused",
        "position",
        "reason",
        "retry_at",
        "seconds",
        "state",
        "tls",
        "trials_failed",
        "url",
        "version",
    )

    def __init__(self, url: str, average: Average, limit: int) -> None:
        scheme, host, port = worker_address(url)
        self.url = url.rstrip("/")
        self.address = (host, port)
        self.tls = ssl.create_default_context() if scheme == "https" else None
        self.in_flight: dict[WorkerConnection, int] = {}  # oldest first; as which of those in flight it came
        self.backlog = 0.0  # their cost
        self.idle: list[WorkerConnection] = []  # used last comes last, and is used first
        self.pace = Pace(average, time.monotonic())
        self.limit = limit  # requests at a time
        self.position: int | None = None  # among the ready ones
        self.state = State.STARTING
        self.reason = NOT_PROBED
        self.paused = False
        self.draining = False
        self.version: int | None = None
        self.failures_in_row = 0
        self.failing = 0.0  # share of its requests, lately
        self.is_late = False  # ejected for being slow: what it has in hand is wanted from others
        self.trials_failed = 0
        self.retry_at = 0.0
        self.last_success = 0.0
        self.last_ejection = -math.inf
        self.num_requests = 0
        self.num_failures = 0
        self.num_ejections = 0
        self.seconds = 0.0  # all its requests took together

    def num_older(self, connection: WorkerConnection) -> int | None:
        """How many requests came here before this one and are still here. None: not counted this time."""
        num = len(self.in_flight)
        if num > _ALWAYS_COUNTED and self.num_requests % _COUNT_EVERY:
            return None
        for index, other in enumerate(islice(self.in_flight, _MAX_COUNTED)):
            if other is connection:
                return index
        return None

    def has_version(self, wanted_version: int | None) -> bool:
        """Are its weights as new as wanted?"""
        return wanted_version is None or (self.version is not None and self.version >= wanted_version)
