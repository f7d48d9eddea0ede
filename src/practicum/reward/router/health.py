"""Who is alive: failures and slowness put a worker out, probes and trials let it back in.

    starting ─ a probe is answered ─▶ up ─ failures in a row, or far slower than usual ─▶ ejected
                                      ▲                                                     │ after a while: a probe
                     enough successes └────────────── trial ◀──────────── answered ─────────┘ is sent
                                                        └─ a failure, or still slow ─▶ ejected, for longer

On trial a worker gets one request at a time, and one more with each that succeeds: it is tried and started slowly by
the same rule, under any policy. Answers of 4xx are the client's affair, and a planned pause is nobody's failure.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from operator import itemgetter
from statistics import median

from practicum.reward.router.connection import Failure, WorkerConnection
from practicum.reward.router.fleet import Fleet
from practicum.reward.router.heads import ResponseHead
from practicum.reward.router.settings import RouterSettings
from practicum.reward.router.upstream import State, Upstream

log = logging.getLogger("practicum.router")

# Requests at a time up to which a worker on trial has to work its way up, if the others have no more than half of it.
MIN_TRIAL = 8
# Seconds without an ejection after which earlier ones are forgotten.
FORGIVEN_S = 30.0
# Nobody is ejected for being slow when fewer than this share of the workers would be left.
MIN_SHARE_LEFT = 0.5
# Shorter than this no delay is held against a worker on trial: its caches may be cold.
MIN_PATIENCE_S = 0.1
# So many requests must be waiting for a worker before their age counts: a single one may just be a hard one.
MIN_WAITING = 3
_MAX_DOUBLINGS = 2
# A worker that fails more than this share of its requests stands out. Where a third of the requests are at fault
# themselves, hardly any worker gets there by chance.
MAX_FAILING = 0.6
_RATE = 1.0 / 16.0  # share of the latest request in that


class Probe:
    """A customer of a connection that only wants to know whether the worker answers."""

    expects_no_body = False

    def __init__(self, upstream: Upstream, done: Callable[[Upstream, str | None], None]) -> None:
        self._upstream = upstream
        self._done = done  # with what is wrong, or None
        self._verdict: str | None = None

    def interim(self, connection: WorkerConnection, head: ResponseHead) -> None:
        pass

    def whole(self, connection: WorkerConnection, head: ResponseHead, data: bytes) -> None:
        self._done(self._upstream, None)

    def begins(self, connection: WorkerConnection, head: ResponseHead) -> bool:
        self._verdict = f"its probe was answered {head.status}" if head.status >= 500 else None
        if head.framing.kind == "until_close":  # nothing more is to be learned from it
            self._done(self._upstream, self._verdict)
            return False
        return True

    def piece(self, connection: WorkerConnection, data: bytes) -> None:
        pass

    def ends(self, connection: WorkerConnection) -> None:
        self._done(self._upstream, self._verdict)

    def failed(self, connection: WorkerConnection, failure: Failure) -> None:
        # Many graders answer nothing else while they are at work. With requests in hand, only their being late counts.
        busy = failure.kind == "timeout" and self._upstream.in_flight
        self._done(self._upstream, None if busy else failure.reason)

    def writable(self, connection: WorkerConnection, can_write: bool) -> None:
        pass


class Health:
    def __init__(self, settings: RouterSettings, fleet: Fleet, connect: Callable[[Upstream], WorkerConnection]) -> None:
        self._settings = settings
        self._fleet = fleet
        self._connect = connect
        self._probes: dict[Upstream, WorkerConnection] = {}

    # What requests tell

    def succeeded(self, upstream: Upstream, now: float, latency_s: float, cost: float) -> None:
        upstream.failures_in_row = 0
        upstream.failing -= upstream.failing * _RATE
        upstream.last_success = now
        if upstream.state is State.TRIAL:
            if latency_s > self._patience_s(upstream, cost):
                self._eject(upstream, f"still slow: a request took {latency_s:.3g} s", late=True)
                return
            upstream.limit += 1
            average = self._fleet.num_in_flight / max(1, len(self._fleet))
            if upstream.limit > max(MIN_TRIAL, 2.0 * average):
                self._let_in(upstream)
            self._fleet.refresh(upstream)

    def refused(self, upstream: Upstream, reason: str) -> None:
        """Nobody is there. Whoever comes back may be a new process, with weights that nobody knows."""
        self.failed(upstream, reason, certain=True)
        if self._fleet.wanted_version is not None:
            upstream.version = None
            self._fleet.refresh(upstream)

    def failed(self, upstream: Upstream, reason: str, *, certain: bool = False, weight: int = 1) -> None:
        """A request failed there. `certain`: it is the worker, whatever was asked of it. `weight`: failures it counts
        for in its share of failures."""
        if not self._fleet.is_wanted(upstream):
            return
        upstream.num_failures += 1
        upstream.failures_in_row += 1
        upstream.failing = 1.0 - (1.0 - upstream.failing) * (1.0 - _RATE) ** weight
        enough = upstream.state is State.TRIAL or (
            upstream.state is State.UP and upstream.failures_in_row >= self._settings.eject_after
        )
        if enough and (certain or self._stands_out(upstream)):
            self._eject(upstream, reason)

    def forgive(self, upstream: Upstream) -> None:
        """Take back a failure that turned out not to be its own."""
        upstream.failures_in_row = max(0, upstream.failures_in_row - 1)
        upstream.failing = max(0.0, 1.0 - (1.0 - upstream.failing) / (1.0 - _RATE))

    def _stands_out(self, upstream: Upstream) -> bool:
        """Does it fail most of its requests, while others don't? If all do, it is the requests that are bad."""
        if upstream.failing <= MAX_FAILING:
            return False
        others = [other.failing for other in self._fleet if other is not upstream and other.state is State.UP]
        return upstream.failing > 2.0 * min(others, default=1.0)

    # What time tells

    def tick(self, now: float) -> None:
        settings = self._settings
        for connection in list(self._probes.values()):
            if now - connection.started > settings.probe_timeout_s:
                connection.fail(Failure("timeout", f"its probe was not answered in {settings.probe_timeout_s:g} s"))
        for upstream in self._fleet:
            if upstream in self._probes:
                continue
            if upstream.state in (State.STARTING, State.EJECTED):
                due = upstream.retry_at
            else:
                due = max(upstream.last_success, upstream.retry_at) + settings.probe_interval_s
            if now >= due:
                self._probe(upstream, now)
        self._eject_slow_ones(now)
        self._eject_late_trials(now)

    def stop(self) -> None:
        for connection in self._probes.values():
            connection.close()
        self._probes.clear()

    def _probe(self, upstream: Upstream, now: float) -> None:
        host, port = upstream.address
        request = (
            f"GET {self._settings.probe_path} HTTP/1.1\r\nhost: {host if ':' not in host else f'[{host}]'}:{port}\r\n"
            "user-agent: practicum-router\r\n\r\n"
        )
        # A connection of its own: one used before may be closed just now, which would tell nothing.
        connection = self._probes[upstream] = self._connect(upstream)
        connection.begin(Probe(upstream, self._probed), request.encode(), complete=True, now=now)

    def _probed(self, upstream: Upstream, wrong: str | None) -> None:
        self._probes.pop(upstream, None)
        now = time.monotonic()
        upstream.retry_at = now
        if upstream.draining:
            upstream.retry_at = now + self._settings.probe_interval_s
            for connection in list(upstream.idle):
                connection.close()
            return
        if wrong is None:
            if upstream.state is State.STARTING:
                self._let_in(upstream)
            elif upstream.state is State.EJECTED:
                upstream.state, upstream.limit = State.TRIAL, 1
                upstream.failures_in_row, upstream.failing = 0, MAX_FAILING  # one more failure, and it is out again
                upstream.is_late = False
                upstream.pace.forget()
            elif upstream.state is State.UP and not upstream.in_flight:
                upstream.failures_in_row = 0
            self._fleet.refresh(upstream)
        elif upstream.state in (State.STARTING, State.EJECTED):
            if upstream.state is State.STARTING:
                log.warning("worker %s is not there: %s", upstream.url, wrong)
            upstream.state, upstream.reason = State.EJECTED, wrong
            upstream.retry_at = now + self._settings.retrial_s
        else:
            self.failed(upstream, wrong, certain=True)

    def _let_in(self, upstream: Upstream) -> None:
        upstream.state, upstream.limit, upstream.reason = State.UP, self._fleet.max_in_flight, ""
        log.info("worker %s is up", upstream.url)

    def _eject(self, upstream: Upstream, reason: str, *, late: bool = False) -> None:
        now = time.monotonic()
        if upstream.state is State.TRIAL or now - upstream.last_ejection < FORGIVEN_S:
            upstream.trials_failed = min(upstream.trials_failed + 1, _MAX_DOUBLINGS)
        else:
            upstream.trials_failed = 0
        upstream.last_ejection = now
        upstream.state = State.EJECTED
        upstream.reason = reason
        upstream.is_late = late
        log.warning("worker %s is ejected: %s", upstream.url, reason)
        upstream.retry_at = now + self._settings.retrial_s * 2.0**upstream.trials_failed
        upstream.num_ejections += 1
        self._fleet.refresh(upstream)

    def _eject_slow_ones(self, now: float) -> None:
        """Slow is who has become slower than it was, by far more than the others have: not who always was, and not when
        all have more to do."""
        up = [one for one in self._fleet if one.state is State.UP and self._fleet.is_wanted(one)]
        suspects = {one: _slowdown(one, now) for one in up if one.in_flight}
        worst, slowdown = max(suspects.items(), key=itemgetter(1), default=(None, 0.0))
        if worst is None or slowdown < self._settings.slow_factor:
            return
        if len(up) < 2 or len(up) - 1 < MIN_SHARE_LEFT * len(self._fleet):
            return
        if slowdown > self._settings.slow_factor * max(1.0, median(_slowdown(one, now) for one in up)):
            self._eject(worst, f"{slowdown:.0f} times slower than usual", late=True)

    def _eject_late_trials(self, now: float) -> None:
        for upstream in self._fleet:
            if upstream.state is State.TRIAL and upstream.in_flight:
                oldest, num = next(iter(upstream.in_flight)), len(upstream.in_flight)
                waited_s = now - oldest.started
                if waited_s > self._patience_s(upstream, upstream.backlog / num):
                    self._eject(upstream, f"still slow: a request has waited for {waited_s:.3g} s", late=True)

    def _patience_s(self, upstream: Upstream, cost: float) -> float:
        """How long a worker on trial may take for a request."""
        if upstream.pace.usual is None:
            return self._settings.response_timeout_s
        return max(MIN_PATIENCE_S, self._settings.slow_factor * upstream.pace.usual * cost)


def _slowdown(upstream: Upstream, now: float) -> float:
    num, silent = len(upstream.in_flight), 0.0
    if num >= MIN_WAITING:
        oldest = next(iter(upstream.in_flight))
        silent = (now - max(oldest.started, upstream.last_success)) * num / upstream.backlog
    return upstream.pace.slowdown(num, silent)
