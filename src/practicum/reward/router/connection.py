"""One connection to a worker, and the one request that is on it.

    open ─▶ idle ─ begin ─▶ busy: request out, response in ─▶ idle again, if both ended cleanly
                                └─ anything else ─▶ closed, and the handler gets the reason

It works for a `ResponseHandler`: the proxied request of a client, or a probe. It knows nothing of either.
"""

from __future__ import annotations

import asyncio
import errno
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from practicum.reward.router.http1 import EMPTY, END, MAX_HEAD_BYTES, BadMessage, Body, HeadCache, ResponseHead
from practicum.reward.router.pool import Upstream

# Bytes that may wait to be written before the other side is asked to pause.
MAX_UNSENT = 256 * 1024
# What this process has run out of, and no fault of a worker.
_OWN_LACK = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a worker's response did not come, or not to its end.

    refused: no connection; stale: a connection used before was closed before a byte of the response; broken: closed or
    reset on the way; bad: not HTTP; timeout: silent for too long; full: it is busy, and takes no connection; lack: this
    router could not open a connection, whatever the worker does.
    """

    kind: Literal["refused", "full", "stale", "broken", "bad", "timeout", "lack"]
    reason: str


class ResponseHandler:
    """Base of what receives a response: `on_response`, or `on_head`, `on_body`s and `on_end`, or `on_failure`, also in
    between. The connection is free again before `on_response` and `on_end`, and closed before `on_failure`."""

    __slots__ = ()
    expects_no_body: bool  # the request was HEAD

    def on_interim(self, connection: WorkerConnection, head: ResponseHead) -> None: ...

    def on_response(self, connection: WorkerConnection, head: ResponseHead, data: bytes) -> None: ...

    def on_head(self, connection: WorkerConnection, head: ResponseHead) -> bool:
        """Return False when the response is not wanted, and the connection can be closed."""
        return True

    def on_body(self, connection: WorkerConnection, data: bytes) -> None: ...

    def on_end(self, connection: WorkerConnection) -> None: ...

    def on_failure(self, connection: WorkerConnection, failure: Failure) -> None: ...

    def on_writable(self, connection: WorkerConnection, can_write: bool) -> None: ...


class WorkerConnection(asyncio.Protocol):
    def __init__(self, upstream: Upstream, parse_head: HeadCache[ResponseHead]) -> None:
        self.upstream = upstream
        self.handler: ResponseHandler | None = None
        self.transport: asyncio.Transport | None = None
        self.started = 0.0  # when the request came here
        self.touched = 0.0  # when a byte was last sent or received
        self.receiving = False
        self.request_sent = False
        self.can_write = True  # False: the worker does not take what is sent to it
        self.paused = False  # the handler cannot take more of the response for now
        self._parse_head = parse_head
        self._head: ResponseHead | None = None
        self._body: Body | None = None  # of the response under way
        self._buffer = b""  # of a head that has not come in full
        self._used = False
        self._unsent: list[bytes] = []  # until the connection is open
        self._opening: asyncio.Task[None] | None = None

    # For the handler

    def begin(self, handler: ResponseHandler, data: bytes, *, complete: bool, now: float) -> None:
        """Send a request, or the beginning of one."""
        self.handler = handler
        self.started = self.touched = now
        self.request_sent = complete
        if self.transport is not None:
            self.transport.write(data)
        else:
            self._unsent.append(data)
            self._opening = asyncio.get_running_loop().create_task(self._open())

    def send(self, data: bytes, *, complete: bool, now: float) -> None:
        """Send more of the request."""
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
        """Close without calling the handler, which has asked for it."""
        self.handler = None
        if self._opening is not None:
            self._opening.cancel()
        if self.transport is not None:
            self.transport.abort()

    def fail(self, failure: Failure) -> None:
        handler = self.handler
        self.close()
        if handler is not None:
            handler.on_failure(self, failure)

    # For the event loop

    async def _open(self) -> None:
        host, port = self.upstream.address
        try:
            await asyncio.get_running_loop().create_connection(lambda: self, host, port, ssl=self.upstream.tls)
        except (OSError, UnicodeError) as error:  # UnicodeError: not the name of a host
            self._opening = None
            is_own = isinstance(error, OSError) and error.errno in _OWN_LACK
            reason = f"no connection: {getattr(error, 'strerror', None) or error}"
            self.fail(Failure("lack" if is_own else "refused", reason))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # it is one, for TCP
        self._opening = None
        if self.handler is None:
            transport.abort()
            return
        self.transport = transport
        transport.set_write_buffer_limits(MAX_UNSENT)
        transport.write(b"".join(self._unsent))
        self._unsent.clear()
        self.handler.on_writable(self, self.can_write)

    def data_received(self, data: bytes) -> None:
        handler = self.handler
        if handler is None:  # between requests, when nothing was asked
            self.close()
            self._leave_idle()
            return
        self.touched = time.monotonic()
        if self._body is not None:
            self._receive_body(data)
            return
        self.receiving = True
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        while self.handler is handler:  # once, and once more for each interim response
            end = data.find(END)
            if end < 0:
                self._buffer = data
                if len(data) > MAX_HEAD_BYTES:
                    self.fail(Failure("bad", f"its head is longer than {MAX_HEAD_BYTES} bytes"))
                return
            try:
                head = self._parse_head(data[: end + 4])
            except BadMessage as error:
                self.fail(Failure("bad", error.reason))
                return
            if len(data) == head.whole_size and not handler.expects_no_body and self.request_sent:
                self._finish(head)
                handler.on_response(self, head, data)
                return
            data = data[end + 4 :]
            if head.status >= 200:
                self._begin_response(handler, head, data)
                return
            handler.on_interim(self, head)

    def _begin_response(self, handler: ResponseHandler, head: ResponseHead, rest: bytes) -> None:
        self._head = head
        self._body = (EMPTY if handler.expects_no_body else head.framing).body()
        if not handler.on_head(self, head):
            self.close()
        elif self.handler is handler:
            self._receive_body(rest)

    def _receive_body(self, data: bytes) -> None:
        handler, body, head = self.handler, self._body, self._head
        assert handler is not None and body is not None and head is not None
        try:
            taken = body.take(data) if data else 0
        except BadMessage as error:
            self.fail(Failure("bad", error.reason))
            return
        if taken:
            handler.on_body(self, data if taken == len(data) else data[:taken])
        if body.done and self.handler is handler:
            self._finish(head, clean=taken == len(data))  # not clean: it sent more than it had announced
            handler.on_end(self)

    def _finish(self, head: ResponseHead, *, clean: bool = True) -> None:
        """Make the connection free for the next request after a complete response, or close it."""
        self.handler = None
        self.receiving = False
        self._head = self._body = None
        self._used = True
        assert self.transport is not None
        if clean and head.keep_alive and self.request_sent and self.can_write and not self.transport.is_closing():
            if self.paused:
                self.pause(False)
            self.upstream.idle.append(self)
        else:
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        handler, head = self.handler, self._head
        self.transport = None
        if handler is None:
            self._leave_idle()
            return
        if head is not None and self._body is not None and head.framing.kind == "until_close" and error is None:
            self.handler = None
            handler.on_end(self)
            return
        detail = f" ({error})" if error else ""
        if self._used and not self.receiving:
            self.fail(Failure("stale", f"an idle connection was closed{detail}"))
        else:
            where = "within its answer" if self.receiving else "before it answered"
            self.fail(Failure("broken", f"the connection was closed {where}{detail}"))

    def _leave_idle(self) -> None:
        with suppress(ValueError):
            self.upstream.idle.remove(self)

    def pause_writing(self) -> None:
        self._set_writable(False)

    def resume_writing(self) -> None:
        self._set_writable(True)

    def _set_writable(self, can_write: bool) -> None:
        self.can_write = can_write
        self.touched = time.monotonic()
        if self.handler is not None:
            self.handler.on_writable(self, can_write)
