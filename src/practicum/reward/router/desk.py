"""The front desk: takes requests in, finds a worker for each, keeps those that must wait, and watches the clock.

dispatch ─▶ policy ─▶ Exchange.attempt
    └─ nobody is ready ─▶ waiting room ─ somebody is ─▶ policy
tick: silent workers, stragglers to hedge, those who have waited too long, probes, idle connections
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from practicum.reward.router.connection import Failure, WorkerConnection
from practicum.reward.router.cost import Costs
from practicum.reward.router.exchange import Exchange
from practicum.reward.router.fleet import Fleet
from practicum.reward.router.heads import Remembered, RequestReader, read_response
from practicum.reward.router.health import Health
from practicum.reward.router.policy import POLICIES
from practicum.reward.router.settings import RouterSettings
from practicum.reward.router.stats import Quantile, Stats
from practicum.reward.router.upstream import State, Upstream
from practicum.reward.router.waiting import WaitingRoom

if TYPE_CHECKING:
    from practicum.reward.router.client import ClientConnection

TICK_S = 0.05
# An idle connection is closed before the worker would: servers often give them five seconds.
IDLE_S = 4.0
_LATE_TICKS = 4  # ticks between two looks at those who wait
_SLOW_TICKS = 20  # ticks between two looks at clients and idle connections


class Budget:
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


class Desk:
    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.stats = Stats()
        self.costs = Costs()
        self.budget = Budget(settings.retry_share)
        self.policy = POLICIES[settings.policy](settings)
        self.fleet = Fleet(self.policy, settings.max_in_flight, self._serve_waiting)
        self.health = Health(settings, self.fleet, self.connect)
        self.clients: set[ClientConnection] = set()
        self.read_request = Remembered(RequestReader(settings.session_header))
        self.draining = False
        self._read_response = Remembered(read_response)
        self._room: WaitingRoom[Exchange] = WaitingRoom(settings.max_waiting)
        self._latencies = Quantile() if settings.hedge_quantile is not None else None
        self._num_ticks = 0
        for url in settings.workers:
            self.fleet.add(url)

    @property
    def num_waiting(self) -> int:
        return self._room.num

    @property
    def num_under_way(self) -> int:
        return self.fleet.num_in_flight + self._room.num

    def connect(self, upstream: Upstream) -> WorkerConnection:
        return WorkerConnection(upstream, self._read_response)

    def dispatch(self, exchange: Exchange) -> None:
        """Send a request to a worker, or let it wait for one."""
        upstream = None if self._room.num and exchange.waiting_since is None else self._choose(exchange)
        if upstream is not None:
            exchange.attempt(upstream)
        elif not len(self.fleet):
            exchange.give_up(503, "no_workers", "this router has no workers: add one to it")
        else:
            self._let_wait(exchange)

    def untried(self, exchange: Exchange) -> Upstream | None:
        """Somebody ready who has not been asked yet."""
        others = [upstream for upstream in self.policy.ready if upstream not in exchange.tried]
        return min(others, key=lambda upstream: len(upstream.in_flight), default=None)

    def stop_waiting(self, exchange: Exchange) -> None:
        if exchange.waiting_since is not None:
            exchange.waited_s += time.monotonic() - exchange.waiting_since
            exchange.waiting_since = None
            self._room.remove(exchange, exchange.head.priority)

    def answered(self, exchange: Exchange, connection: WorkerConnection, status: int) -> None:
        """A worker has answered to the end."""
        now = connection.touched
        upstream, latency_s = connection.upstream, now - connection.started
        upstream.seconds += latency_s
        self.stats.answered(status, now - exchange.arrived)
        self.budget.earn()
        if status < 500:
            self.health.succeeded(upstream, now, latency_s, exchange.cost)
        if status >= 400:
            upstream.pace.wasted()
        else:
            self.costs.learn(exchange.kind, latency_s)
            self.fleet.average.learn(exchange.cost, latency_s)
            if self._latencies is not None:
                self._latencies.add(latency_s / exchange.cost)

    def tick(self) -> None:
        now = time.monotonic()
        self._num_ticks += 1
        for upstream in self.fleet.tick(now):
            for connection in list(upstream.in_flight):
                self._check_silence(connection, now)
            if upstream.is_late and upstream.in_flight:
                self._ask_others_too(upstream)
        self.costs.tick()
        self.health.tick(now)
        if self._num_ticks % _LATE_TICKS == 0:
            self._turn_away_late_ones(now)
        if self._latencies is not None:
            self._hedge_stragglers(now, self._latencies)
        if self._num_ticks % _SLOW_TICKS == 0:
            self._close_silent_connections(now)

    def _choose(self, exchange: Exchange) -> Upstream | None:
        if exchange.tried and (other := self.untried(exchange)) is not None:
            return other
        return self.policy.choose(exchange)

    def _let_wait(self, exchange: Exchange) -> None:
        exchange.waiting_since = time.monotonic()
        gone = self._room.put(exchange, exchange.head.priority)
        if gone is not None:
            gone.waiting_since = None
            if any(upstream.state is not State.EJECTED for upstream in self.fleet):
                gone.give_up(429, "queue_full", f"all workers are busy and {self._room.num} requests wait already")
            else:
                gone.give_up(503, "no_healthy_workers", self._why_nobody())

    def _serve_waiting(self) -> None:
        while self._room.num:
            exchange = self._room.first()
            upstream = self._choose(exchange)
            if upstream is None:
                return
            self.stop_waiting(exchange)
            exchange.attempt(upstream)

    def _turn_away_late_ones(self, now: float) -> None:
        if self._room.num:
            for exchange in self._room.everyone():
                since = exchange.waiting_since
                if since is not None and now - since + exchange.waited_s > self.settings.wait_timeout_s:
                    self.stop_waiting(exchange)
                    waited = f"no worker was free within {self.settings.wait_timeout_s:g} s"
                    exchange.give_up(503, "wait_timeout", f"{waited}; {self._why_nobody()}")

    def _why_nobody(self) -> str:
        told = []
        for upstream in self.fleet:
            why = self.fleet.why(upstream)
            told.append(f"{upstream.url} is {self.fleet.status_of(upstream)}" + (f" ({why})" if why else ""))
        more = f" and {len(told) - 8} more" if len(told) > 8 else ""
        return f"worker {', '.join(told[:8])}{more}"

    def _check_silence(self, connection: WorkerConnection, now: float) -> None:
        settings, silent_s = self.settings, now - connection.touched
        if connection.transport is None:
            if silent_s > settings.connect_timeout_s:
                at_work = len(connection.upstream.in_flight) > 1
                reason = f"no connection within {settings.connect_timeout_s:g} s"
                connection.fail(Failure("full" if at_work else "refused", reason))
        elif (connection.request_sent or not connection.can_write) and silent_s > settings.response_timeout_s:
            if connection.paused:
                exchange = connection.customer
                assert isinstance(exchange, Exchange)
                exchange.stalled()
            else:
                connection.fail(Failure("timeout", f"silent for {settings.response_timeout_s:g} s"))

    def _hedge_stragglers(self, now: float, latencies: Quantile) -> None:
        assert self.settings.hedge_quantile is not None
        limit = latencies.value(self.settings.hedge_quantile)
        if limit is None:
            return
        for upstream in self.fleet:
            for connection in list(upstream.in_flight):
                exchange = connection.customer
                assert isinstance(exchange, Exchange)
                if now - connection.started > limit * exchange.cost:
                    self._hedge(exchange, upstream)

    def _ask_others_too(self, upstream: Upstream) -> None:
        """A worker has become slow: those who wait for it need not wait for it alone."""
        for connection in list(upstream.in_flight):
            exchange = connection.customer
            assert isinstance(exchange, Exchange)
            self._hedge(exchange, upstream)

    def _hedge(self, exchange: Exchange, upstream: Upstream) -> None:
        if exchange.can_be_hedged:
            others = [other for other in self.policy.ready if other is not upstream and other not in exchange.tried]
            if not upstream.is_late:  # a copy in a full queue would only make everybody wait
                others = [other for other in others if len(other.in_flight) < other.pace.slots]
            if others and (upstream.is_late or self.budget.take()):
                exchange.tried |= {upstream}
                exchange.hedge(min(others, key=lambda other: len(other.in_flight)))

    def _close_silent_connections(self, now: float) -> None:
        for upstream in self.fleet:
            for connection in list(upstream.idle):
                if now - connection.touched > IDLE_S:
                    upstream.idle.remove(connection)
                    connection.close()
        for client in list(self.clients):
            client.tick(now)
