"""One connection to a worker, and the one request that is on it.

    open ─▶ idle ─ begin ─▶ busy: request out, answer in ─▶ idle again, if both ended cleanly
                                └─ anything else ─▶ closed, and whoever it worked for is told why

It works for a `Customer`: the exchange of a client, or a probe. It knows nothing of either.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol

from practicum.reward.router.bodies import EMPTY, BadBody, Body
from practicum.reward.router.heads import END, MAX_HEAD_BYTES, BadHead, Remembered, ResponseHead
from practicum.reward.router.upstream import Upstream

# Bytes that may wait to be written before the other side is asked to pause.
MAX_UNSENT = 256 * 1024


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a worker's answer did not come, or not to its end.

    refused: no connection; stale: a connection used before was closed before a byte was answered; broken: closed or
    reset on the way; bad: not HTTP; timeout: silent for too long; full: it is at work, and takes no connection.
    """

    kind: Literal["refused", "full", "stale", "broken", "bad", "timeout"]
    reason: str


class Customer(Protocol):
    """Whom a connection works for. The answer comes as `whole`, or as `begins`, `piece`s and `ends`, or it `failed`,
    also in between. The connection is free again before `whole` and `ends` are called, and closed before `failed`."""

    expects_no_body: bool  # of an answer: it was HEAD

    def interim(self, connection: WorkerConnection, head: ResponseHead) -> None: ...

    def whole(self, connection: WorkerConnection, head: ResponseHead, data: bytes) -> None: ...

    def begins(self, connection: WorkerConnection, head: ResponseHead) -> bool:
        """False: the answer is not wanted, and the connection can be closed."""
        ...

    def piece(self, connection: WorkerConnection, data: bytes) -> None: ...

    def ends(self, connection: WorkerConnection) -> None: ...

    def failed(self, connection: WorkerConnection, failure: Failure) -> None: ...

    def writable(self, connection: WorkerConnection, can_write: bool) -> None: ...


class WorkerConnection(asyncio.Protocol):
    __slots__ = (
        "_body",
        "_buffer",
        "_head",
        "_opening",
        "_read_head",
        "_unsent",
        "_used",
        "answering",
        "can_write",
        "customer",
        "paused",
        "request_sent",
        "started",
        "touched",
        "transport",
        "upstream",
    )

    def __init__(self, upstream: Upstream, read_head: Remembered[ResponseHead]) -> None:
        self.upstream = upstream
        self.customer: Customer | None = None
        self.transport: asyncio.Transport | None = None
        self.started = 0.0  # when the request came here
        self.touched = 0.0  # when a byte was last sent or answered
        self.answering = False
        self.request_sent = False
        self.can_write = True  # or the worker does not take what is sent to it
        self.paused = False  # the customer cannot take more of the answer for now
        self._read_head = read_head
        self._head: ResponseHead | None = None
        self._body: Body | None = None  # of the answer under way
        self._buffer = b""  # of a head that has not come in full
        self._used = False
        self._unsent: list[bytes] = []  # until the connection is open
        self._opening: asyncio.Task[None] | None = None

    # What the customer does

    def begin(self, customer: Customer, data: bytes, *, complete: bool, now: float) -> None:
        """Send a request, or the beginning of one."""
        self.customer = customer
        self.started = self.touched = now
        self.request_sent = complete
        if self.transport is not None:
            self.transport.write(data)
        else:
            self._unsent.append(data)
            self._opening = asyncio.get_running_loop().create_task(self._open())

    def send(self, data: bytes, *, complete: bool, now: float) -> None:
        """More of the request."""
        self.touched = now
        self.request_sent = complete
        if self.transport is not None:
            self.transport.write(data)
        else:
            self._unsent.append(data)

    def pause(self, paused: bool) -> None:
        """Stop the worker from sending, or let it go on."""
        if self.transport is not None and not self.transport.is_closing() and paused != self.paused:
            self.paused = paused
            self.touched = time.monotonic()
            if paused:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def close(self) -> None:
        """Without a word to the customer, who has asked for it."""
        self.customer = None
        if self._opening is not None:
            self._opening.cancel()
        if self.transport is not None:
            self.transport.abort()

    def fail(self, failure: Failure) -> None:
        customer = self.customer
        self.close()
        if customer is not None:
            customer.failed(self, failure)

    # What the event loop does

    async def _open(self) -> None:
        host, port = self.upstream.address
        try:
            await asyncio.get_running_loop().create_connection(lambda: self, host, port, ssl=self.upstream.tls)
        except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host
            self._opening = None
            self.fail(Failure("refused", f"no connection: {getattr(error, 'strerror', None) or error}"))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # it is one, for TCP
        self._opening = None
        if self.customer is None:
            transport.abort()
            return
        self.transport = transport
        transport.set_write_buffer_limits(MAX_UNSENT)
        transport.write(b"".join(self._unsent))
        self._unsent.clear()
        self.customer.writable(self, self.can_write)

    def data_received(self, data: bytes) -> None:
        customer = self.customer
        if customer is None:  # between requests, and nobody asked
            self.close()
            self._leave_pool()
            return
        self.touched = time.monotonic()
        if self._body is not None:
            self._answer(data)
            return
        self.answering = True
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        while self.customer is customer:  # once, and once more for each interim answer
            end = data.find(END)
            if end < 0:
                self._buffer = data
                if len(data) > MAX_HEAD_BYTES:
                    self.fail(Failure("bad", f"its head is longer than {MAX_HEAD_BYTES} bytes"))
                return
            try:
                head = self._read_head(data[: end + 4])
            except BadHead as error:
                self.fail(Failure("bad", error.reason))
                return
            if len(data) == head.whole_size and not customer.expects_no_body and self.request_sent:
                self._finish(head)
                customer.whole(self, head, data)
                return
            data = data[end + 4 :]
            if not head.interim:
                self._begin_answer(customer, head, data)
                return
            customer.interim(self, head)

    def _begin_answer(self, customer: Customer, head: ResponseHead, rest: bytes) -> None:
        self._head = head
        self._body = (EMPTY if customer.expects_no_body else head.framing).body()
        if not customer.begins(self, head):
            self.close()
        elif self.customer is customer:
            self._answer(rest)

    def _answer(self, data: bytes) -> None:
        """Part of the body has come, or its end."""
        customer, body, head = self.customer, self._body, self._head
        assert customer is not None and body is not None and head is not None
        try:
            taken = body.take(data) if data else 0
        except BadBody as error:
            self.fail(Failure("bad", str(error)))
            return
        if taken:
            customer.piece(self, data if taken == len(data) else data[:taken])
        if body.done and self.customer is customer:
            clean = taken == len(data)  # or it has sent more than it said it would
            self._finish(head, clean=clean)
            customer.ends(self)

    def _finish(self, head: ResponseHead, *, clean: bool = True) -> None:
        """The answer is there to its end: free for the next request, or closed."""
        self.customer = None
        self.answering = False
        self._head = self._body = None
        self._used = True
        assert self.transport is not None
        if clean and head.keep_alive and self.request_sent and self.can_write and not self.transport.is_closing():
            if self.paused:
                self.pause(False)
            self.upstream.idle.append(self)
        else:
            self.transport.close()

    def eof_received(self) -> None:
        """The worker has nothing more to say; the connection is closed, and `connection_lost` comes next."""

    def connection_lost(self, error: Exception | None) -> None:
        customer, body, head = self.customer, self._body, self._head
        self.transport = None
        if customer is None:
            self._leave_pool()
            return
        if body is not None and head is not None and head.framing.kind == "until_close" and error is None:
            self._finish_at_close(customer)
            return
        detail = f" ({error})" if error else ""
        if self._used and not self.answering:
            self.fail(Failure("stale", f"an idle connection was closed{detail}"))
        else:
            where = "within its answer" if self.answering else "before it answered"
            self.fail(Failure("broken", f"the connection was closed {where}{detail}"))

    def _finish_at_close(self, customer: Customer) -> None:
        self.customer = None
        customer.ends(self)

    def _leave_pool(self) -> None:
        with suppress(ValueError):
            self.upstream.idle.remove(self)

    def pause_writing(self) -> None:
        self.can_write = False
        self.touched = time.monotonic()
        if self.customer is not None:
            self.customer.writable(self, False)

    def resume_writing(self) -> None:
        self.can_write = True
        self.touched = time.monotonic()
        if self.customer is not None:
            self.customer.writable(self, True)
