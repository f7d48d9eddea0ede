"""Health: failures and slowness eject a worker, probes and trials let it back in.

    starting ─ a probe is answered ─▶ up ─ failures in a row, or far slower than usual ─▶ ejected
                                      ▲                                                     │ after a while: a probe
                     enough successes └────────────── trial ◀──────────── answered ─────────┘ is sent
                                                        └─ a failure, or still slow ─▶ ejected, for longer

On trial a worker gets one request at a time, and one more with each that succeeds, so that it is both tested and
started slowly, under any policy. Responses of 4xx are the client's fault, and a planned pause is no failure.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from operator import itemgetter
from statistics import median

from practicum.reward.router.connection import Failure, ResponseHandler, WorkerConnection
from practicum.reward.router.http1 import ResponseHead
from practicum.reward.router.pool import NOT_PROBED, State, Upstream, UpstreamPool
from practicum.reward.router.settings import RouterSettings

log = logging.getLogger("practicum.router")

# A worker on trial is up once it may have more requests at a time than this, and than twice the average of all.
MIN_TRIAL = 8
# Seconds without an ejection after which earlier ones are forgotten.
FORGET_S = 30.0
# No worker is ejected for being slow when fewer than this share of the workers would be left.
MIN_SHARE_LEFT = 0.5
# A shorter delay than this does not count against a worker on trial: its caches may be cold.
MIN_PATIENCE_S = 0.1
# So many requests must be waiting for a worker before their age counts: a single one may just be a hard one.
MIN_WAITING = 3
_MAX_DOUBLINGS = 2
# A worker that fails more than this share of its requests stands out. Where a third of the requests are bad themselves,
# hardly any worker gets there by chance.
MAX_FAILURE_RATE = 0.6
_RATE = 1.0 / 16.0  # share of the latest request in that


class Probe(ResponseHandler):
    """A response handler that only finds out whether the worker answers. `done` gets what is wrong, or None;
    `NOT_PROBED` where it could not ask."""

    expects_no_body = False

    def __init__(self, upstream: Upstream, done: Callable[[Upstream, str | None], None]) -> None:
        self._upstream = upstream
        self._done = done
        self._problem: str | None = None

    def on_response(self, connection: WorkerConnection, head: ResponseHead, data: bytes) -> None:
        self._done(self._upstream, None)

    def on_head(self, connection: WorkerConnection, head: ResponseHead) -> bool:
        self._problem = f"its probe was answered {head.status}" if head.status >= 500 else None
        if head.framing.kind == "until_close":  # nothing more can be learned from it
            self._done(self._upstream, self._problem)
            return False
        return True

    def on_end(self, connection: WorkerConnection) -> None:
        self._done(self._upstream, self._problem)

    def on_failure(self, connection: WorkerConnection, failure: Failure) -> None:
        if failure.kind == "lack":
            self._done(self._upstream, NOT_PROBED)
            return
        # Many graders answer nothing else while they work. With requests in flight, only those requests' delay counts.
        busy = failure.kind == "timeout" and self._upstream.in_flight
        self._done(self._upstream, None if busy else failure.reason)


class Health:
    def __init__(
        self, settings: RouterSettings, pool: UpstreamPool, connect: Callable[[Upstream], WorkerConnection]
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._connect = connect
        self._probes: dict[Upstream, WorkerConnection] = {}

    def succeeded(self, upstream: Upstream, now: float, latency_s: float, cost: float) -> None:
        upstream.failures_in_row = 0
        upstream.failure_rate -= upstream.failure_rate * _RATE
        upstream.last_success = now
        if upstream.state is State.TRIAL:
            if latency_s > self._patience_s(upstream, cost):
                self._eject(upstream, f"still slow: a request took {latency_s:.3g} s", late=True)
                return
            upstream.limit += 1
            average = self._pool.num_in_flight / max(1, len(self._pool))
            if upstream.limit > max(MIN_TRIAL, 2.0 * average):
                self._admit(upstream)
            self._pool.refresh(upstream)

    def refused(self, upstream: Upstream, reason: str) -> None:
        """Count a refused connection. What comes back there may be a new process, with unknown weights."""
        self.failed(upstream, reason, certain=True)
        if self._pool.wanted_version is not None:
            upstream.version = None
            self._pool.refresh(upstream)

    def failed(self, upstream: Upstream, reason: str, *, certain: bool = False, weight: int = 1) -> None:
        """Count a failed request. `certain`: the worker is at fault, whatever the request. `weight`: how many failures
        it counts as in the failure rate."""
        if not self._pool.is_wanted(upstream):
            return
        upstream.num_failures += 1
        upstream.failures_in_row += 1
        upstream.failure_rate = 1.0 - (1.0 - upstream.failure_rate) * (1.0 - _RATE) ** weight
        enough = upstream.state is State.TRIAL or (
            upstream.state is State.UP and upstream.failures_in_row >= self._settings.eject_after
        )
        if enough and (certain or self._stands_out(upstream)):
            self._eject(upstream, reason)

    def retract_failure(self, upstream: Upstream) -> None:
        """Take back a failure that was not the worker's fault."""
        upstream.failures_in_row = max(0, upstream.failures_in_row - 1)
        upstream.failure_rate = max(0.0, 1.0 - (1.0 - upstream.failure_rate) / (1.0 - _RATE))

    def _stands_out(self, upstream: Upstream) -> bool:
        """Return whether it fails most of its requests while others don't. If all do, the requests are bad."""
        if upstream.failure_rate <= MAX_FAILURE_RATE:
            return False
        others = [other.failure_rate for other in self._pool if other is not upstream and other.state is State.UP]
        return upstream.failure_rate > 2.0 * min(others, default=1.0)

    def tick(self, now: float) -> None:
        settings = self._settings
        for connection in list(self._probes.values()):
            if now - connection.started > settings.probe_timeout_s:
                connection.fail(Failure("timeout", f"its probe was not answered in {settings.probe_timeout_s:g} s"))
        for upstream in self._pool:
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
        # A new connection: one used before may be closed just now, which would prove nothing.
        connection = self._probes[upstream] = self._connect(upstream)
        connection.begin(Probe(upstream, self._probed), request.encode(), complete=True, now=now)

    def _probed(self, upstream: Upstream, problem: str | None) -> None:
        self._probes.pop(upstream, None)
        now = time.monotonic()
        upstream.retry_at = now
        if upstream.draining or problem is NOT_PROBED:
            upstream.retry_at = now + self._settings.probe_interval_s
            for connection in list(upstream.idle):
                connection.close()
            return
        if problem is None:
            if upstream.state is State.STARTING:
                self._admit(upstream)
            elif upstream.state is State.EJECTED:
                upstream.state, upstream.limit = State.TRIAL, 1
                upstream.failures_in_row, upstream.failure_rate = (
                    0,
                    MAX_FAILURE_RATE,
                )  # one more failure ejects it again
                upstream.is_late = False
                upstream.estimate.reset()
            elif upstream.state is State.UP and not upstream.in_flight:
                upstream.failures_in_row = 0
            self._pool.refresh(upstream)
        elif upstream.state in (State.STARTING, State.EJECTED):
            if upstream.state is State.STARTING:
                log.warning("worker %s is not there: %s", upstream.url, problem)
            upstream.state, upstream.reason = State.EJECTED, problem
            upstream.retry_at = now + self._settings.retrial_s
        else:
            self.failed(upstream, problem, certain=True)

    def _admit(self, upstream: Upstream) -> None:
        upstream.state, upstream.limit, upstream.reason = State.UP, self._pool.max_in_flight, ""
        log.info("worker %s is up", upstream.url)

    def _eject(self, upstream: Upstream, reason: str, *, late: bool = False) -> None:
        now = time.monotonic()
        if upstream.state is State.TRIAL or now - upstream.last_ejection < FORGET_S:
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
        self._pool.refresh(upstream)

    def _eject_slow_ones(self, now: float) -> None:
        """Eject a worker that has become slower than it was, by far more than the others have: not one that always was
        slow, and not when all have more to do."""
        up = [one for one in self._pool if one.state is State.UP and self._pool.is_wanted(one)]
        suspects = {one: _slowdown(one, now) for one in up if one.in_flight}
        worst, slowdown = max(suspects.items(), key=itemgetter(1), default=(None, 0.0))
        if worst is None or slowdown < self._settings.slow_factor:
            return
        if len(up) < 2 or len(up) - 1 < MIN_SHARE_LEFT * len(self._pool):
            return
        if slowdown > self._settings.slow_factor * max(1.0, median(_slowdown(one, now) for one in up)):
            self._eject(worst, f"{slowdown:.0f} times slower than usual", late=True)

    def _eject_late_trials(self, now: float) -> None:
        for upstream in self._pool:
            if upstream.state is State.TRIAL and upstream.in_flight:
                oldest, num = next(iter(upstream.in_flight)), len(upstream.in_flight)
                waited_s = now - oldest.started
                if waited_s > self._patience_s(upstream, upstream.backlog / num):
                    self._eject(upstream, f"still slow: a request has waited for {waited_s:.3g} s", late=True)

    def _patience_s(self, upstream: Upstream, cost: float) -> float:
        """Return how long a worker on trial may take for a request."""
        if upstream.estimate.usual is None:
            return self._settings.response_timeout_s
        return max(MIN_PATIENCE_S, self._settings.slow_factor * upstream.estimate.usual * cost)


def _slowdown(upstream: Upstream, now: float) -> float:
    num, silent = len(upstream.in_flight), 0.0
    if num >= MIN_WAITING:
        oldest = next(iter(upstream.in_flight))
        silent = (now - max(oldest.started, upstream.last_success)) * num / upstream.backlog
    return upstream.estimate.slowdown(num, silent)
