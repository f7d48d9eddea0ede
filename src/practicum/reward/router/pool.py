"""The upstream pool: each worker as the router sees it, and which of them are ready for a request."""

from __future__ import annotations

import enum
import logging
import math
import ssl
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from practicum.errors import RouterError
from practicum.reward.router.estimate import PoolAverage, ThroughputEstimate
from practicum.reward.router.settings import worker_address

if TYPE_CHECKING:
    from practicum.reward.router.connection import WorkerConnection
    from practicum.reward.router.policy import Policy

log = logging.getLogger("practicum.router")

# Counting older requests takes longer the more are in flight, so with many in flight it is done now and then.
_ALWAYS_COUNTED = 8
_COUNT_EVERY = 8
_MAX_COUNTED = 1024
NOT_PROBED = "not probed yet"


class State(enum.Enum):
    """A worker's health. What an operator has set (drain, pause) and its version are kept apart from this."""

    STARTING = "starting"  # has not answered a probe yet
    UP = "up"
    TRIAL = "trial"  # was ejected, and gets a few requests, one more with each that succeeds
    EJECTED = "ejected"


class Upstream:
    """One worker: its address, its requests in flight, its health and the connections to it."""

    def __init__(self, url: str, average: PoolAverage, limit: int) -> None:
        scheme, host, port = worker_address(url)
        self.url = url.rstrip("/")
        self.address = (host, port)
        self.tls = ssl.create_default_context() if scheme == "https" else None
        # Oldest first, each with how many were in flight when it came, itself included.
        self.in_flight: dict[WorkerConnection, int] = {}
        self.backlog = 0.0  # their cost
        self.idle: list[WorkerConnection] = []  # the one used last is at the end, and is used first
        self.estimate = ThroughputEstimate(average, time.monotonic())
        self.limit = limit  # requests at a time
        self.position: int | None = None  # in the policy's list of ready workers
        self.state = State.STARTING
        self.reason = NOT_PROBED
        self.paused = False
        self.draining = False
        self.version: int | None = None
        self.failures_in_row = 0
        self.failure_rate = 0.0  # share of its requests, lately
        self.is_late = False  # ejected for being slow: its requests are wanted from others
        self.trials_failed = 0
        self.retry_at = 0.0
        self.last_success = 0.0
        self.last_ejection = -math.inf
        self.num_requests = 0
        self.num_failures = 0
        self.num_ejections = 0
        self.seconds = 0.0  # that all its requests took together

    def num_older(self, connection: WorkerConnection) -> int | None:
        """Return how many requests came here before this one and are still here. None: not counted this time."""
        if len(self.in_flight) > _ALWAYS_COUNTED and self.num_requests % _COUNT_EVERY:
            return None
        for index, other in enumerate(islice(self.in_flight, _MAX_COUNTED)):
            if other is connection:
                return index
        return None

    def has_version(self, wanted_version: int | None) -> bool:
        return wanted_version is None or (self.version is not None and self.version >= wanted_version)


class UpstreamPool:
    """All workers. Counts go up in `begin` and down in `end`, nowhere else. `on_ready` is called whenever a worker
    becomes ready."""

    def __init__(self, policy: Policy, max_in_flight: int, on_ready: Callable[[], None]) -> None:
        self.policy = policy
        self._follows_load = policy.follows_load
        self.max_in_flight = max_in_flight
        self.wanted_version: int | None = None
        self.average = PoolAverage()
        self._on_ready = on_ready
        self._by_address: dict[tuple[str, int], Upstream] = {}
        self._leaving: list[Upstream] = []  # removed, but not done yet

    def __iter__(self) -> Iterator[Upstream]:
        return iter(self._by_address.values())

    def __len__(self) -> int:
        return len(self._by_address)

    @property
    def num_in_flight(self) -> int:
        return self.policy.num_in_flight

    def add(self, url: str) -> Upstream:
        if self.find(url) is not None:
            raise RouterError(f"worker {url} is here already.")
        upstream = Upstream(url, self.average, self.max_in_flight)
        log.info("worker %s is added", upstream.url)
        self._by_address[upstream.address] = upstream
        return upstream

    def find(self, url: str) -> Upstream | None:
        try:
            _, host, port = worker_address(url)
        except ValueError as error:
            raise RouterError(f"{error}.") from None
        return self._by_address.get((host, port))

    def remove(self, upstream: Upstream) -> None:
        """Remove a worker. The requests it still has are finished all the same."""
        del self._by_address[upstream.address]
        log.info("worker %s is removed", upstream.url)
        upstream.draining = True
        self.refresh(upstream)
        self.policy.forget(upstream)
        self._leaving.append(upstream)

    def tick(self, now: float) -> list[Upstream]:
        """Update all estimates. Returns all workers, and those removed that still have requests to finish."""
        for upstream in self._leaving:
            if not upstream.in_flight:
                for connection in list(upstream.idle):
                    connection.close()
        self._leaving = [upstream for upstream in self._leaving if upstream.in_flight]
        active = [*self, *self._leaving]
        busy_s = done = 0.0
        most_tried = 1
        for upstream in active:
            upstream.estimate.tick(now, len(upstream.in_flight))
            one_busy_s, one_done = upstream.estimate.evidence
            busy_s, done = busy_s + one_busy_s, done + one_done
            most_tried = max(most_tried, upstream.estimate.most_tried)
        self.average.most_tried = most_tried
        if done > 0.0:
            self.average.seconds_per_cost = busy_s / done
        return active

    def begin(self, upstream: Upstream, connection: WorkerConnection, cost: float, now: float) -> None:
        """Count a request that is sent to a worker."""
        in_flight = upstream.in_flight
        num_before = len(in_flight)
        upstream.estimate.record_time(now, num_before)
        in_flight[connection] = num_before + 1
        upstream.backlog += cost
        upstream.num_requests += 1
        self.policy.num_in_flight += 1
        if upstream.position is not None:
            if self._follows_load:
                self.policy.load_changed(upstream, num_before)
            if num_before + 1 >= upstream.limit:
                self.policy.leave(upstream)

    def end(
        self, upstream: Upstream, connection: WorkerConnection, cost: float, now: float, *, completed: bool
    ) -> None:
        """Undo what `begin` counted. Only a completed request teaches anything about the worker's speed."""
        num_before = len(upstream.in_flight)
        if completed:
            older = upstream.num_older(connection)
            came_as = upstream.in_flight.pop(connection)
            upstream.estimate.record_completion(now, num_before, cost, now - connection.started, came_as, older)
        else:
            del upstream.in_flight[connection]
            upstream.estimate.record_time(now, num_before)
        upstream.backlog = upstream.backlog - cost if num_before > 1 else 0.0  # exact when empty, whatever rounding did
        self.policy.num_in_flight -= 1
        if upstream.position is None:
            self.refresh(upstream)
        elif self._follows_load:
            self.policy.load_changed(upstream, num_before)

    def is_ready(self, upstream: Upstream) -> bool:
        return (
            len(upstream.in_flight) < upstream.limit
            and (upstream.state is State.UP or upstream.state is State.TRIAL)
            and self.is_wanted(upstream)
        )

    def is_wanted(self, upstream: Upstream) -> bool:
        """Return False for a worker that is kept from requests on purpose: what it does meanwhile is no failure."""
        return not upstream.paused and not upstream.draining and upstream.has_version(self.wanted_version)

    def refresh(self, upstream: Upstream) -> None:
        """Tell the policy whether this worker is ready, after something about it has changed."""
        ready = self.is_ready(upstream)
        if ready and upstream.position is None:
            self.policy.enter(upstream)
            self._on_ready()
        elif not ready and upstream.position is not None:
            self.policy.leave(upstream)

    def want_version(self, version: int | None) -> None:
        self.wanted_version = version
        for upstream in list(self):
            self.refresh(upstream)

    def status(self, upstream: Upstream) -> str:
        """Return in one word what keeps a worker from requests, or its health."""
        if upstream.draining:
            return "draining"
        if upstream.paused:
            return "paused"
        if not upstream.has_version(self.wanted_version):
            return "stale"
        return upstream.state.value

    def reason(self, upstream: Upstream) -> str:
        """Return the details of that."""
        if not upstream.has_version(self.wanted_version):
            return f"it has version {upstream.version}, {self.wanted_version} is wanted"
        if not upstream.reason and len(upstream.in_flight) >= upstream.limit:
            return f"full: {len(upstream.in_flight)} requests"
        return upstream.reason

    @property
    def num_connections(self) -> int:
        return self.num_in_flight + sum(len(upstream.idle) for upstream in self)

    def close_an_idle_connection(self) -> None:
        """Close the one that has been idle for longest, if there is one."""
        oldest = min((one.idle[0] for one in self if one.idle), key=lambda one: one.touched, default=None)
        if oldest is not None:
            oldest.upstream.idle.remove(oldest)
            oldest.close()

    def close_connections(self) -> None:
        for upstream in [*self, *self._leaving]:
            for connection in [*upstream.idle, *upstream.in_flight]:
                connection.close()
            upstream.idle.clear()
