"""One request of a client, until its response is there: which worker has it, who is next, what is forwarded.

    arrives ─▶ waits for a worker ─▶ attempt ─▶ response begins ─▶ forwarded as it comes ─▶ done
                      ▲                 │ failed, and nothing was forwarded: another worker
                      └─────────────────┘
                                        └ takes long: a second attempt beside it (hedge), the first response wins

`_release` undoes what `UpstreamPool.begin` counts for an attempt, on every way out.
"""

from __future__ import annotations

import time
from collections.abc import Set
from typing import TYPE_CHECKING

from practicum.reward.router.connection import Failure, ResponseHandler, WorkerConnection
from practicum.reward.router.http1 import RequestHead, ResponseHead, with_close
from practicum.reward.router.pool import State, Upstream

if TYPE_CHECKING:
    from practicum.reward.router.client import ClientConnection
    from practicum.reward.router.dispatcher import Dispatcher

# A request is kept for another try up to this size; beyond it, what has been sent is gone.
MAX_KEPT_BYTES = 1024 * 1024
# A silent worker fails few requests, since each takes so long.
_WEIGHT_OF_SILENCE = 4
_NONE: Set[Upstream] = frozenset()
RETRIED_STATUSES = frozenset({500, 502, 503, 504})


class ProxiedRequest(ResponseHandler):
    def __init__(
        self,
        dispatcher: Dispatcher,
        client: ClientConnection,
        head: RequestHead,
        data: bytes,  # head and body, as far as they have come
        complete: bool,
        now: float,
    ) -> None:
        self.head = head
        self.expects_no_body = head.method == b"HEAD"
        self.complete = complete  # has all of the request come?
        self.arrived = now
        self.waiting_since: float | None = None
        self.waited_s = 0.0  # before that
        self.tried: Set[Upstream] = _NONE
        self.num_attempts = 0
        self.hedged = False
        self._dispatcher = dispatcher
        self._client = client
        self._attempts: list[WorkerConnection] = []
        self._response: WorkerConnection | None = None  # the attempt whose response is forwarded
        self._blamed: Set[Upstream] = _NONE  # for this request
        self._answered_500: tuple[Upstream, ...] = ()
        self._status = 0
        self._close = False
        self._kept = [data]
        self._num_kept = len(data)
        self._keepable = True
        self.cost, self.cost_source = dispatcher.costs.of(head, self.body)

    @property
    def body(self) -> bytes:
        return self._kept[0][len(self.head.raw) :] if self._kept else b""

    # Called by the client's connection

    def feed(self, data: bytes, complete: bool) -> None:
        """Send more of the request."""
        self.complete = complete
        now = time.monotonic()
        for connection in self._attempts:
            connection.send(data, complete=complete, now=now)
        if self._keepable:
            self._kept.append(data)
            self._num_kept += len(data)
            if self._num_kept > MAX_KEPT_BYTES:
                self._stop_keeping()

    def abandon(self) -> None:
        """Cancel the request: its client is gone."""
        self._dispatcher.stop_waiting(self)
        self._cancel_attempts()
        self._dispatcher.stats.abandoned += 1

    def pause_response(self, paused: bool) -> None:
        """Pause the worker while the client cannot take more."""
        if self._response is not None:
            self._response.pause(paused)

    # Called by the dispatcher

    def attempt(self, upstream: Upstream, *, fresh: bool = False) -> None:
        """Send the request to a worker."""
        now = time.monotonic()
        idle = upstream.idle
        connection = idle.pop() if idle and not fresh else self._dispatcher.connect(upstream)
        self._attempts.append(connection)
        self._dispatcher.pool.begin(upstream, connection, self.cost, now)
        kept = self._kept
        connection.begin(self, kept[0] if len(kept) == 1 else b"".join(kept), complete=self.complete, now=now)
        if not self.complete and connection.transport is not None:
            self.on_writable(connection, connection.can_write)

    def hedge(self, upstream: Upstream) -> None:
        self.hedged = True
        self._dispatcher.stats.hedges += 1
        self.attempt(upstream)

    def stalled(self) -> None:
        """Cut off a client that has not taken its response for too long."""
        self.abandon()
        self._client.cut()

    def give_up(self, status: int, code: str, reason: str) -> None:
        """Answer with an error of the router's own."""
        self._dispatcher.stats.refusals[code] += 1
        self._client.refuse(status, code, reason)

    @property
    def begun(self) -> bool:
        """Has some of a response been forwarded?"""
        return self._response is not None

    @property
    def can_be_hedged(self) -> bool:
        only = not self.hedged and len(self._attempts) == 1 and self._response is None
        return only and self.complete and self._keepable

    # Called by the connection to a worker

    def on_interim(self, connection: WorkerConnection, head: ResponseHead) -> None:
        if not self.head.http_1_0:  # which knows no interim responses
            self._client.write(head.raw)

    def on_response(self, connection: WorkerConnection, head: ResponseHead, data: bytes) -> None:
        self._release(connection, connection.touched, completed=head.status < 400)
        if self._attempts:
            self._cancel_slower_ones()
        close = not self.head.keep_alive or self._dispatcher.hangs_up
        if close:
            data = with_close(head.raw) + data[head.size :]
        elif len(head.raw) != head.size:
            data = head.raw + data[head.size :]
        self._client.write(data)
        self._dispatcher.record(self, connection, head.status)
        self._client.finished(close=close)

    def on_head(self, connection: WorkerConnection, head: ResponseHead) -> bool:
        if head.status in RETRIED_STATUSES and self._ask_another(connection, head.status):
            return False
        self._attempts.remove(connection)
        self._cancel_slower_ones()
        self._attempts.append(connection)
        self._response = connection
        self._status = head.status
        ends_at_close = head.framing.kind == "until_close" and not self.expects_no_body
        self._close = not self.head.keep_alive or self._dispatcher.hangs_up or head.http_1_0 or ends_at_close
        self._client.write(with_close(head.raw) if self._close else head.raw)
        if not self._client.can_write:
            connection.pause(True)
        return True

    def on_body(self, connection: WorkerConnection, data: bytes) -> None:
        self._client.write(data)

    def on_end(self, connection: WorkerConnection) -> None:
        self._release(connection, connection.touched, completed=self._status < 400)
        self._dispatcher.record(self, connection, self._status)
        self._client.finished(close=self._close)

    def on_failure(self, connection: WorkerConnection, failure: Failure) -> None:
        upstream = connection.upstream
        self._release(connection, time.monotonic(), completed=False)
        if failure.kind == "lack":
            if not self._attempts:
                self.give_up(503, "no_descriptors", f"this router has {failure.reason}: raise its limit (ulimit -n)")
            return
        if failure.kind == "stale" and self._kept:  # the worker may close an idle connection; that is no failure
            if self._dispatcher.pool.is_ready(upstream):
                self.attempt(upstream, fresh=True)
            else:
                self._dispatcher.dispatch(self)
            return
        reached = failure.kind not in ("refused", "full")
        if failure.kind not in ("full", "stale"):
            self._blame(upstream, failure)
        self.tried |= {upstream}
        self.num_attempts += reached
        if self._response is not None:
            self._dispatcher.stats.truncated += 1
            self._client.cut()
        elif self._attempts:
            pass  # the other one may still respond
        elif self._retry_may_help(failure) and self._may_retry(upstream, reached=reached):
            self._dispatcher.dispatch(self)
        else:
            status, code = (504, "timeout") if failure.kind == "timeout" else (502, "worker_failed")
            self.give_up(status, code, f"worker {upstream.url}: {failure.reason}")

    def on_writable(self, connection: WorkerConnection, can_write: bool) -> None:
        if can_write and self._num_kept > MAX_KEPT_BYTES and len(self._attempts) == 1:
            self._stop_keeping()
        self._client.read_on(can_write)

    def _ask_another(self, connection: WorkerConnection, status: int) -> bool:
        """Handle a worker's answer that it cannot. Returns True when another worker is asked instead."""
        upstream = connection.upstream
        if status != 500 or not self._answered_500:
            self._blame(upstream, Failure("bad", f"it answered {status}"))
        elif len(self._answered_500) == 1:  # too hard for a second worker too: the request is at fault, not they
            self._dispatcher.health.retract_failure(self._answered_500[0])
        if status == 500:
            self._answered_500 = (*self._answered_500, upstream)
        self.tried |= {upstream}
        self.num_attempts += 1
        other = None
        if len(self._attempts) == 1:  # or the other one may still respond
            other = self._dispatcher.least_loaded_untried(self)
            if other is None or not self._may_retry(upstream):
                return False
        self._release(connection, connection.touched, completed=False)
        if other is not None:
            self.attempt(other)
        return True

    def _blame(self, upstream: Upstream, failure: Failure) -> None:
        """Count a failure. A request counts against a worker once, unless the worker is gone, whatever was asked."""
        if failure.kind == "refused":
            self._dispatcher.health.refused(upstream, failure.reason)
        elif upstream not in self._blamed:
            weight = _WEIGHT_OF_SILENCE if failure.kind == "timeout" else 1
            self._dispatcher.health.failed(upstream, failure.reason, weight=weight)
        self._blamed |= {upstream}

    def _retry_may_help(self, failure: Failure) -> bool:
        """A worker that was silent or not HTTP is not asked twice; one whose connection broke may be back."""
        return failure.kind not in ("timeout", "bad") or self._dispatcher.least_loaded_untried(self) is not None

    def _may_retry(self, upstream: Upstream, *, reached: bool = True) -> bool:
        """Return whether the budget allows a retry. Without limit: what an ejected worker had, since it must go
        elsewhere and overloads none, and for a while what never reached a worker, since it costs nothing but time."""
        settings = self._dispatcher.settings
        if not self._keepable or self.num_attempts >= settings.max_attempts:
            return False
        if not reached:
            allowed = time.monotonic() - self.arrived < settings.wait_timeout_s
        else:
            allowed = upstream.state is State.EJECTED or self._dispatcher.budget.take()
        self._dispatcher.stats.retries += allowed
        return allowed

    def _release(self, connection: WorkerConnection, now: float, *, completed: bool) -> None:
        self._attempts.remove(connection)
        self._dispatcher.pool.end(connection.upstream, connection, self.cost, now, completed=completed)

    def _cancel_attempts(self) -> None:
        now = time.monotonic()
        for other in list(self._attempts):
            self._release(other, now, completed=False)
            other.close()

    def _cancel_slower_ones(self) -> None:
        """Cancel the attempts that another worker's response has overtaken. A worker that has completed nothing at all
        meanwhile may be dead."""
        for other in self._attempts:
            if other.upstream.last_success < other.started:
                self._blame(other.upstream, Failure("timeout", "another worker, asked later, answered first"))
        self._cancel_attempts()

    def _stop_keeping(self) -> None:
        """Give up keeping a request that is too long for another try. It goes on as a stream, once one worker has all
        of it so far."""
        if len(self._attempts) == 1 and self._attempts[0].transport is not None:
            self._keepable = False
            self._kept.clear()
        else:
            self._client.read_on(False)
