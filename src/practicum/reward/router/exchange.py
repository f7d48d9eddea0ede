"""One request of a client, until its answer is there: who has it, who is asked next, what is passed on.

    arrives ─▶ waits for a worker ─▶ attempt ─▶ answer begins ─▶ passed on as it comes ─▶ done
                      ▲                 │ failed, and nothing was passed on: another worker
                      └─────────────────┘
                                        └ takes long: a second attempt beside it (hedge), the first answer wins

What `Fleet.begin` counts for an attempt, `_release` gives back, on every way out.
"""

from __future__ import annotations

import time
from collections.abc import Set
from typing import TYPE_CHECKING, Protocol

from practicum.reward.router.connection import Failure, WorkerConnection
from practicum.reward.router.heads import RequestHead, ResponseHead, with_close
from practicum.reward.router.upstream import State, Upstream

if TYPE_CHECKING:
    from practicum.reward.router.cost import Kind
    from practicum.reward.router.desk import Desk

# A request is kept for another try up to this size; beyond it, what has been sent is gone.
MAX_KEPT_BYTES = 1024 * 1024
# A silent worker fails few requests, since each takes so long.
_WEIGHT_OF_SILENCE = 4
_NOBODY: Set[Upstream] = frozenset()
RETRIED_STATUSES = frozenset({500, 502, 503, 504})


class Asker(Protocol):
    """The client's side."""

    can_write: bool  # or the client does not take what is written to it

    def write(self, data: bytes) -> None: ...

    def read_on(self, can_read: bool) -> None:
        """Whether more of the request can be taken."""
        ...

    def finished(self, *, close: bool) -> None:
        """The whole answer was written."""
        ...

    def cut(self) -> None:
        """The answer cannot be finished: break the connection, so that nobody takes it for whole."""
        ...

    def refuse(self, status: int, code: str, reason: str) -> None:
        """Answer with an error of the router's own, and be finished."""
        ...


class Exchange:
    __slots__ = (
        "_answer",
        "_answered_500",
        "_asker",
        "_attempts",
        "_blamed",
        "_close",
        "_desk",
        "_keepable",
        "_kept",
        "_num_kept",
        "_status",
        "arrived",
        "complete",
        "cost",
        "expects_no_body",
        "head",
        "hedged",
        "kind",
        "num_attempts",
        "tried",
        "waited_s",
        "waiting_since",
    )

    def __init__(self, desk: Desk, asker: Asker, head: RequestHead, data: bytes, complete: bool, now: float) -> None:
        self.head = head
        self.expects_no_body = head.method == b"HEAD"
        self.complete = complete  # has all of the request come?
        self.arrived = now
        self.waiting_since: float | None = None
        self.waited_s = 0.0  # before that
        self.tried: Set[Upstream] = _NOBODY  # who has been asked
        self.num_attempts = 0
        self.hedged = False
        self._desk = desk
        self._asker = asker
        self._attempts: list[WorkerConnection] = []
        self._answer: WorkerConnection | None = None  # the attempt whose answer is passed on
        self._blamed: Set[Upstream] = _NOBODY  # for this request
        self._answered_500: tuple[Upstream, ...] = ()
        self._status = 0
        self._close = False
        self._kept = [data]
        self._num_kept = len(data)
        self._keepable = True
        self.kind: Kind
        self.cost, self.kind = desk.costs.of(head, self.body)

    @property
    def body(self) -> bytes:
        return self._kept[0][len(self.head.raw) :] if self._kept else b""

    # From the client

    def feed(self, data: bytes, complete: bool) -> None:
        """More of the request."""
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
        """The client is gone."""
        self._desk.stop_waiting(self)
        self._cancel_attempts()
        self._desk.stats.abandoned += 1

    def pause_answer(self, paused: bool) -> None:
        """The client cannot take more for now, or can again."""
        if self._answer is not None:
            self._answer.pause(paused)

    # From the desk

    def attempt(self, upstream: Upstream, *, fresh: bool = False) -> None:
        """Send the request to a worker."""
        now = time.monotonic()
        idle = upstream.idle
        connection = idle.pop() if idle and not fresh else self._desk.connect(upstream)
        self._attempts.append(connection)
        self._desk.fleet.begin(upstream, connection, self.cost, now)
        kept = self._kept
        connection.begin(self, kept[0] if len(kept) == 1 else b"".join(kept), complete=self.complete, now=now)
        if not self.complete and connection.transport is not None:
            self.writable(connection, connection.can_write)

    def hedge(self, upstream: Upstream) -> None:
        self.hedged = True
        self._desk.stats.hedges += 1
        self.attempt(upstream)

    def stalled(self) -> None:
        """The client has not taken its answer for too long."""
        self.abandon()
        self._asker.cut()

    def give_up(self, status: int, code: str, reason: str) -> None:
        self._desk.stats.refused(code)
        self._asker.refuse(status, code, reason)

    @property
    def begun(self) -> bool:
        """Has some of an answer been passed on?"""
        return self._answer is not None

    @property
    def can_be_hedged(self) -> bool:
        return (
            not self.hedged and len(self._attempts) == 1 and self._answer is None and self.complete and self._keepable
        )

    # From the connection to a worker

    def interim(self, connection: WorkerConnection, head: ResponseHead) -> None:
        if not self.head.http_1_0:  # which knows no interim answers
            self._asker.write(head.raw)

    def whole(self, connection: WorkerConnection, head: ResponseHead, data: bytes) -> None:
        self._release(connection, connection.touched, completed=head.status < 400)
        if self._attempts:
            self._cancel_slower_ones()
        close = not self.head.keep_alive or self._desk.draining
        if close:
            data = with_close(head.raw) + data[head.size :]
        elif len(head.raw) != head.size:
            data = head.raw + data[head.size :]
        self._asker.write(data)
        self._desk.answered(self, connection, head.status)
        self._asker.finished(close=close)

    def begins(self, connection: WorkerConnection, head: ResponseHead) -> bool:
        if head.status in RETRIED_STATUSES and self._ask_another(connection, head.status):
            return False
        self._attempts.remove(connection)
        self._cancel_slower_ones()
        self._attempts.append(connection)
        self._answer = connection
        self._status = head.status
        self._close = (
            not self.head.keep_alive
            or self._desk.draining
            or head.http_1_0
            or (head.framing.kind == "until_close" and not self.expects_no_body)
        )
        self._asker.write(with_close(head.raw) if self._close else head.raw)
        if not self._asker.can_write:
            connection.pause(True)
        return True

    def piece(self, connection: WorkerConnection, data: bytes) -> None:
        self._asker.write(data)

    def ends(self, connection: WorkerConnection) -> None:
        self._release(connection, connection.touched, completed=self._status < 400)
        self._desk.answered(self, connection, self._status)
        self._asker.finished(close=self._close)

    def failed(self, connection: WorkerConnection, failure: Failure) -> None:
        upstream = connection.upstream
        self._release(connection, time.monotonic(), completed=False)
        if failure.kind == "stale" and self._kept:  # the worker's right, and no failure of its own
            if self._desk.fleet.is_ready(upstream):
                self.attempt(upstream, fresh=True)
            else:
                self._desk.dispatch(self)
            return
        reached = failure.kind not in ("refused", "full")
        if failure.kind not in ("full", "stale"):
            self._blame(upstream, failure)
        self.tried |= {upstream}
        self.num_attempts += reached
        if self._answer is not None:
            self._desk.stats.cut += 1
            self._asker.cut()
        elif self._attempts:
            pass  # the other one may still answer
        elif self._has_hope(failure) and self._may_retry(upstream, reached=reached):
            self._desk.dispatch(self)
        else:
            status, code = (504, "timeout") if failure.kind == "timeout" else (502, "worker_failed")
            self.give_up(status, code, f"worker {upstream.url}: {failure.reason}")

    def writable(self, connection: WorkerConnection, can_write: bool) -> None:
        if can_write and self._num_kept > MAX_KEPT_BYTES and len(self._attempts) == 1:
            self._stop_keeping()
        self._asker.read_on(can_write)

    # Between these

    def _ask_another(self, connection: WorkerConnection, status: int) -> bool:
        """A worker answered that it cannot. True when somebody else is asked instead."""
        upstream = connection.upstream
        if status != 500 or not self._answered_500:
            self._blame(upstream, Failure("bad", f"it answered {status}"))
        elif len(self._answered_500) == 1:  # too hard for a second worker too: it is the request, and not they
            self._desk.health.forgive(self._answered_500[0])
        if status == 500:
            self._answered_500 = (*self._answered_500, upstream)
        self.tried |= {upstream}
        self.num_attempts += 1
        if len(self._attempts) > 1:  # the other one may still answer
            self._release(connection, connection.touched, completed=False)
            return True
        other = self._desk.untried(self)
        if other is not None and self._may_retry(upstream):
            self._release(connection, connection.touched, completed=False)
            self.attempt(other)
            return True
        return False

    def _blame(self, upstream: Upstream, failure: Failure) -> None:
        """One request is held against a worker once, unless nobody is there: that is no matter of the request."""
        if failure.kind == "refused":
            self._desk.health.refused(upstream, failure.reason)
        elif upstream not in self._blamed:
            weight = _WEIGHT_OF_SILENCE if failure.kind == "timeout" else 1
            self._desk.health.failed(upstream, failure.reason, weight=weight)
        self._blamed |= {upstream}

    def _has_hope(self, failure: Failure) -> bool:
        """Could asking again help? Who was silent or spoke nonsense is not asked twice; who broke off may be back."""
        return failure.kind not in ("timeout", "bad") or self._desk.untried(self) is not None

    def _may_retry(self, upstream: Upstream, *, reached: bool = True) -> bool:
        """Within the budget, unless the worker that failed is out: then all it had must go elsewhere, and nobody is
        overloaded by trying. A request that never reached a worker costs nothing but time."""
        settings = self._desk.settings
        if not self._keepable or self.num_attempts >= settings.max_attempts:
            return False
        if not reached:
            allowed = time.monotonic() - self.arrived < settings.wait_timeout_s
        else:
            allowed = upstream.state is State.EJECTED or self._desk.budget.take()
        self._desk.stats.retries += allowed
        return allowed

    def _release(self, connection: WorkerConnection, now: float, *, completed: bool) -> None:
        self._attempts.remove(connection)
        self._desk.fleet.end(connection.upstream, connection, self.cost, now, completed=completed)

    def _cancel_attempts(self) -> None:
        now = time.monotonic()
        for other in list(self._attempts):
            self._release(other, now, completed=False)
            other.close()

    def _cancel_slower_ones(self) -> None:
        """Another worker's answer is there first. Who has finished nothing at all meanwhile may be dead."""
        for other in self._attempts:
            if other.upstream.last_success < other.started:
                self._blame(other.upstream, Failure("timeout", "another worker, asked later, answered first"))
        self._cancel_attempts()

    def _stop_keeping(self) -> None:
        """Too long to be kept for another try. It goes on as a stream, once somebody has it all so far."""
        if len(self._attempts) == 1 and self._attempts[0].transport is not None:
            self._keepable = False
            self._kept.clear()
        else:
            self._asker.read_on(False)
