"""The dispatcher: takes requests in, finds a worker for each, keeps those that must wait, and watches the clock.

dispatch ─▶ policy ─▶ ProxiedRequest.attempt
    └─ no worker is ready ─▶ wait queue ─ one is ─▶ policy
tick: silent workers, stragglers to hedge, requests that have waited too long, probes, idle connections
"""

from __future__ import annotations

import math
import sys
import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from practicum.reward.router.connection import Failure, WorkerConnection
from practicum.reward.router.estimate import CostModel
from practicum.reward.router.health import Health
from practicum.reward.router.http1 import (
    NUM_PRIORITIES,
    BadMessage,
    HeadCache,
    RequestHead,
    RequestParser,
    parse_response,
)
from practicum.reward.router.policy import POLICIES
from practicum.reward.router.pool import State, Upstream, UpstreamPool
from practicum.reward.router.request import ProxiedRequest
from practicum.reward.router.settings import RouterSettings
from practicum.secret import TOKEN_HEADER, is_secret

if TYPE_CHECKING:
    from practicum.reward.router.client import ClientConnection

T = TypeVar("T")

TICK_S = 0.05
# An idle connection is closed before the worker would: servers often give them five seconds.
IDLE_S = 4.0
_LATE_TICKS = 4  # ticks between two checks of those who wait
_SLOW_TICKS = 20  # ticks between two checks of clients and idle connections
BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0
)  # fmt: skip


class Stats:
    """Counts of what requests do: plain numbers, which `admin.Metrics` lays out for Prometheus when asked."""

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}  # of the workers' responses that were forwarded
        self.latencies = [0] * (len(BOUNDS_S) + 1)  # of these, up to each bound and beyond
        self.seconds = 0.0
        self.refusals: Counter[str] = Counter()  # responses of the router's own, by code
        self.retries = 0
        self.hedges = 0
        self.abandoned = 0  # the client hung up
        self.truncated = 0  # a worker failed in the middle of its response

    def record(self, status: int, latency_s: float) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1
        self.latencies[bisect_left(BOUNDS_S, latency_s)] += 1
        self.seconds += latency_s


class Quantile:
    """A quantile of recent values, right to about a tenth: counts in steps of a fifth of an octave, halved now and
    then."""

    _STEPS_PER_OCTAVE = 5
    _WINDOW = 1000
    _ENOUGH = 50

    def __init__(self) -> None:
        self._counts: dict[int, float] = {}
        self._total = 0.0

    def add(self, value: float) -> None:
        step = math.ceil(math.log2(max(value, 1e-9)) * self._STEPS_PER_OCTAVE)
        self._counts[step] = self._counts.get(step, 0.0) + 1.0
        self._total += 1.0
        if self._total >= self._WINDOW:
            self._counts = {key: count / 2.0 for key, count in self._counts.items() if count > 0.1}
            self._total = sum(self._counts.values())

    def value(self, quantile: float) -> float | None:
        """Return None while too few values are known."""
        if self._total < self._ENOUGH:
            return None
        left = quantile * self._total
        for step in sorted(self._counts):
            left -= self._counts[step]
            if left <= 0.0:
                break
        return float(2.0 ** (step / self._STEPS_PER_OCTAVE))


class RetryBudget:
    """Retries, as a share of requests: when everything fails, sending it all again would only make it worse."""

    BURST = 100.0

    def __init__(self, share: float) -> None:
        self._share = share
        self._left = self.BURST

    def earn(self) -> None:
        if self._left < self.BURST:
            self._left += self._share

    def take(self) -> bool:
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class WaitQueue(Generic[T]):
    """Requests that wait while no worker is ready for them: the most urgent first, and only so many."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._by_priority: list[OrderedDict[T, None]] = [OrderedDict() for _ in range(NUM_PRIORITIES)]
        self.num = 0

    def put(self, waiting: T, priority: int) -> T | None:
        """Add a request. A full queue returns the one that must go for it: the newest of the least urgent, which may
        be the new one itself."""
        dropped = None
        if self.num >= self._size:
            line = next((line for line in self._by_priority[:priority] if line), None)
            if line is None:
                return waiting
            dropped, _ = line.popitem()
            self.num -= 1
        self._by_priority[priority][waiting] = None
        self.num += 1
        return dropped

    def first(self) -> T:
        """Return the next request of a queue that is not empty."""
        return next(iter(next(line for line in reversed(self._by_priority) if line)))

    def remove(self, waiting: T, priority: int) -> None:
        del self._by_priority[priority][waiting]
        self.num -= 1

    def all(self) -> list[T]:
        return [waiting for line in self._by_priority for waiting in line]


class Dispatcher:
    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.stats = Stats()
        self.costs = CostModel()
        self.budget = RetryBudget(settings.retry_share)
        self.policy = POLICIES[settings.policy](settings)
        self.pool = UpstreamPool(self.policy, settings.max_in_flight, self._serve_waiting)
        self.health = Health(settings, self.pool, self.connect)
        self.clients: set[ClientConnection] = set()
        self.parse_request = HeadCache(RequestParser(settings.session_header))
        self.draining = False
        self.is_crowded = False  # clients wait to be accepted
        self.most_connections = sys.maxsize  # to workers
        self.on_room: Callable[[], None] = lambda: None  # a client has gone
        self._paths = frozenset(path.encode() for path in settings.paths)
        self._parse_response = HeadCache(parse_response)
        self._queue: WaitQueue[ProxiedRequest] = WaitQueue(settings.max_waiting)
        self._latencies = Quantile() if settings.hedge_quantile is not None else None
        self._num_ticks = 0
        for url in settings.workers:
            self.pool.add(url)

    @property
    def num_waiting(self) -> int:
        return self._queue.num

    @property
    def num_unfinished(self) -> int:
        return self.pool.num_in_flight + self._queue.num

    @property
    def hangs_up(self) -> bool:
        """Tell whether a client's connection is closed after a response: it may come again, behind those that wait."""
        return self.draining or self.is_crowded

    def refusal(self, head: RequestHead) -> BadMessage | None:
        """Return why a request is not for the workers."""
        settings = self.settings
        if settings.token_for == "all" and not is_secret(head.token or b"", settings.token or ""):
            return BadMessage(401, f"send the token of this router in the header {TOKEN_HEADER}")
        if self._paths and head.target.partition(b"?")[0] not in self._paths:
            return BadMessage(404, f"this router passes on requests for {', '.join(settings.paths)}, and no others")
        return None

    def client_left(self, client: ClientConnection) -> None:
        self.clients.discard(client)
        self.on_room()

    def connect(self, upstream: Upstream) -> WorkerConnection:
        if self.pool.num_connections >= self.most_connections:
            self.pool.close_an_idle_connection()
        return WorkerConnection(upstream, self._parse_response)

    def dispatch(self, request: ProxiedRequest) -> None:
        """Send a request to a worker, or let it wait for one."""
        upstream = None if self._queue.num and request.waiting_since is None else self._choose(request)
        if upstream is not None:
            request.attempt(upstream)
        elif not len(self.pool):
            request.give_up(503, "no_workers", "this router has no workers: add one to it")
        else:
            self._let_wait(request)

    def least_loaded_untried(self, request: ProxiedRequest) -> Upstream | None:
        """Return a ready worker that the request has not been sent to yet."""
        others = [upstream for upstream in self.policy.ready if upstream not in request.tried]
        return min(others, key=lambda upstream: len(upstream.in_flight), default=None)

    def stop_waiting(self, request: ProxiedRequest) -> None:
        if request.waiting_since is not None:
            request.waited_s += time.monotonic() - request.waiting_since
            request.waiting_since = None
            self._queue.remove(request, request.head.priority)

    def record(self, request: ProxiedRequest, connection: WorkerConnection, status: int) -> None:
        """Learn from a complete response."""
        now = connection.touched
        upstream, latency_s = connection.upstream, now - connection.started
        upstream.seconds += latency_s
        self.stats.record(status, now - request.arrived)
        self.budget.earn()
        if status < 500:
            self.health.succeeded(upstream, now, latency_s, request.cost)
        if status >= 400:
            upstream.estimate.record_error()
        else:
            self.costs.record(request.cost_source, latency_s)
            self.pool.average.record(request.cost, latency_s)
            if self._latencies is not None:
                self._latencies.add(latency_s / request.cost)

    def tick(self) -> None:
        now = time.monotonic()
        self._num_ticks += 1
        for upstream in self.pool.tick(now):
            for connection in list(upstream.in_flight):
                self._check_silence(connection, now)
            if upstream.is_late:  # those who wait for a worker that has become slow need not wait for it alone
                for connection in list(upstream.in_flight):
                    self._hedge(_request_on(connection), upstream)
        self.costs.tick()
        self.health.tick(now)
        if self._num_ticks % _LATE_TICKS == 0:
            self._refuse_late_ones(now)
        if self._latencies is not None:
            self._hedge_stragglers(now, self._latencies)
        if self._num_ticks % _SLOW_TICKS == 0:
            self._close_silent_connections(now)

    def _choose(self, request: ProxiedRequest) -> Upstream | None:
        if request.tried and (other := self.least_loaded_untried(request)) is not None:
            return other
        return self.policy.choose(request)

    def _let_wait(self, request: ProxiedRequest) -> None:
        request.waiting_since = time.monotonic()
        dropped = self._queue.put(request, request.head.priority)
        if dropped is not None:
            dropped.waiting_since = None
            if any(upstream.state is not State.EJECTED for upstream in self.pool):
                reason = f"all workers are busy and {self._queue.num} requests wait already"
                dropped.give_up(429, "queue_full", reason)
            else:
                dropped.give_up(503, "no_healthy_workers", self._why_none_is_ready())

    def _serve_waiting(self) -> None:
        while self._queue.num:
            request = self._queue.first()
            upstream = self._choose(request)
            if upstream is None:
                return
            self.stop_waiting(request)
            request.attempt(upstream)

    def _refuse_late_ones(self, now: float) -> None:
        for request in self._queue.all() if self._queue.num else ():
            since = request.waiting_since
            if since is not None and now - since + request.waited_s > self.settings.wait_timeout_s:
                self.stop_waiting(request)
                waited = f"no worker was free within {self.settings.wait_timeout_s:g} s"
                request.give_up(503, "wait_timeout", f"{waited}; {self._why_none_is_ready()}")

    def _why_none_is_ready(self) -> str:
        reasons = []
        for upstream in self.pool:
            reason = self.pool.reason(upstream)
            reasons.append(f"{upstream.url} is {self.pool.status(upstream)}" + (f" ({reason})" if reason else ""))
        more = f" and {len(reasons) - 8} more" if len(reasons) > 8 else ""
        return f"worker {', '.join(reasons[:8])}{more}"

    def _check_silence(self, connection: WorkerConnection, now: float) -> None:
        settings, silent_s = self.settings, now - connection.touched
        if connection.transport is None:
            if silent_s > settings.connect_timeout_s:
                busy = len(connection.upstream.in_flight) > 1
                reason = f"no connection within {settings.connect_timeout_s:g} s"
                connection.fail(Failure("full" if busy else "refused", reason))
        elif (connection.request_sent or not connection.can_write) and silent_s > settings.response_timeout_s:
            if connection.paused:
                _request_on(connection).stalled()
            else:
                connection.fail(Failure("timeout", f"silent for {settings.response_timeout_s:g} s"))

    def _hedge_stragglers(self, now: float, latencies: Quantile) -> None:
        assert self.settings.hedge_quantile is not None
        limit = latencies.value(self.settings.hedge_quantile)
        if limit is None:
            return
        for upstream in self.pool:
            for connection in list(upstream.in_flight):
                request = _request_on(connection)
                if now - connection.started > limit * request.cost:
                    self._hedge(request, upstream)

    def _hedge(self, request: ProxiedRequest, upstream: Upstream) -> None:
        if request.can_be_hedged:
            others = [other for other in self.policy.ready if other is not upstream and other not in request.tried]
            if not upstream.is_late:  # a copy in a full queue would only make all requests wait
                others = [other for other in others if len(other.in_flight) < other.estimate.slots]
            if others and (upstream.is_late or self.budget.take()):
                request.tried |= {upstream}
                request.hedge(min(others, key=lambda other: len(other.in_flight)))

    def _close_silent_connections(self, now: float) -> None:
        for upstream in self.pool:
            for connection in list(upstream.idle):
                if now - connection.touched > IDLE_S:
                    upstream.idle.remove(connection)
                    connection.close()
        for client in list(self.clients):
            client.tick(now)


def _request_on(connection: WorkerConnection) -> ProxiedRequest:
    assert isinstance(connection.handler, ProxiedRequest)
    return connection.handler
