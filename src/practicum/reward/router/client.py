"""One connection of a client: reads its requests, one after another, and writes the responses.

    bytes ─▶ head parsed ─▶ enough of the body to choose by ─▶ ProxiedRequest; the rest of the body as it comes
    control-plane targets go to `Admin` instead

Nothing behind a request is read before its response has been written.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from practicum.reward.router.connection import MAX_UNSENT
from practicum.reward.router.http1 import END, MAX_HEAD_BYTES, BadMessage, Body, RequestHead, error_response
from practicum.reward.router.request import ProxiedRequest

if TYPE_CHECKING:
    from practicum.reward.router.admin import Admin
    from practicum.reward.router.dispatcher import Dispatcher

# A worker is chosen once a body up to this size is complete: policies look into it, and a slow client then keeps no
# worker waiting. Of a longer one, this much is enough.
GATHERED_BYTES = 64 * 1024
MAX_ADMIN_BYTES = 64 * 1024
# How long a client may keep a connection without a request, and how long it has to close one after the last response.
IDLE_TIMEOUT_S = 600.0
LINGER_S = 2.0
_CROWDED_IDLE_S = 5.0  # while others wait to be accepted
_CODES = {
    401: "wrong_token", 404: "unknown_path", 408: "client_timeout", 413: "too_long", 431: "too_long",
    501: "not_supported", 505: "not_supported",
}  # fmt: skip


class ClientConnection(asyncio.Protocol):
    def __init__(self, dispatcher: Dispatcher, admin: Admin | None) -> None:
        self._dispatcher = dispatcher
        self._admin = admin
        self._transport: asyncio.Transport
        self._request: ProxiedRequest | None = None
        self._head: RequestHead | None = None
        self._body: Body | None = None  # of the request, while it is not complete
        self._buffer = b""
        self._needed = 0  # bytes in the buffer before it is worth another look
        self._lingering = False
        self._taking = False
        self._reading = True
        self.can_write = True  # False: the client does not take what is written to it
        self.touched = self._began = time.monotonic()  # and when the first byte of the request under way came
        self._paused_at = 0.0

    # Called by the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # it is one, for TCP
        self._transport = transport
        transport.set_write_buffer_limits(MAX_UNSENT)
        self._dispatcher.clients.add(self)

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            return
        self.touched = time.monotonic()
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        elif self._body is None:
            self._began = self.touched
        self._take(data)

    # `eof_received` is asyncio's: a client that has hung up is not waiting for a response; the connection is closed.

    def connection_lost(self, error: Exception | None) -> None:
        self._dispatcher.client_left(self)
        request, self._request = self._request, None
        if request is not None:
            request.abandon()

    def pause_writing(self) -> None:
        self.can_write = False
        if self._request is not None:
            self._request.pause_response(True)

    def resume_writing(self) -> None:
        self.can_write = True
        if self._request is not None:
            self._request.pause_response(False)
        elif self._body is None and not self._lingering:
            self._next()

    def _take(self, data: bytes) -> None:
        self._taking = True
        while data and not self._lingering:
            if self._body is not None:
                data = self._take_body(self._body, data)
            elif self._request is None and self.can_write:
                if len(data) < self._needed:
                    self._buffer = data
                    break
                data = self._take_head(data)
            else:  # the next request has to wait, as does a client that does not take its responses
                self._buffer = data
                if len(data) > MAX_HEAD_BYTES:
                    self.read_on(False)
                break
        self._taking = False

    def _take_head(self, data: bytes) -> bytes:
        """Begin a request. Returns what is left of the data; keeps what is too little for a head."""
        if data.startswith(b"\r\n"):  # some clients end a body with one more
            data = data[2:]
        end = data.find(END)
        if (end if end >= 0 else len(data)) > MAX_HEAD_BYTES:
            self._refuse_bytes(BadMessage(431, f"the head is longer than {MAX_HEAD_BYTES} bytes"))
            return b""
        if end < 0:
            if (not data[:1].isalpha() and data not in (b"", b"\r")) or data.count(b"\n") != data.count(b"\r\n"):
                self._refuse_bytes(BadMessage(400, "this is not HTTP/1.1 with lines that end with CR LF"))
            else:
                self._buffer = data
            return b""
        try:
            head = self._dispatcher.parse_request(data[: end + 4])
        except BadMessage as error:
            self._refuse_bytes(error)
            return b""
        is_admin = self._admin is not None and self._admin.serves(head.target)
        if not is_admin and (refusal := self._dispatcher.refusal(head)) is not None:
            self._refuse_bytes(refusal)
            return b""
        length = head.framing.length  # 0 when chunked: a stream is forwarded as it comes
        wanted = length if length <= GATHERED_BYTES else GATHERED_BYTES
        if head.expects_continue:
            wanted = 0
        if len(data) < head.size + wanted:
            self._buffer = data
            self._needed = head.size + wanted
            return b""
        self._needed = 0
        self._head = head
        return self._ask_admin(head, data) if is_admin else self._ask_worker(head, data)

    def _ask_worker(self, head: RequestHead, data: bytes) -> bytes:
        size = head.size
        if head.framing.kind == "length" and len(data) == size + head.framing.length:
            request, rest, body = data, b"", None
        else:
            body = head.framing.body()
            try:
                taken = body.take(data[size:])
            except BadMessage as error:
                self._refuse_bytes(error)
                return b""
            request, rest = data[: size + taken], data[size + taken :]
            if body.done:
                body = None
        if len(head.raw) != size:
            request = head.raw + request[size:]
        self._body = body
        proxied = self._request = ProxiedRequest(self._dispatcher, self, head, request, body is None, self.touched)
        self._dispatcher.dispatch(proxied)
        return rest

    def _take_body(self, body: Body, data: bytes) -> bytes:
        try:
            taken = body.take(data)
        except BadMessage as error:
            self._refuse_bytes(error)
            return b""
        done = body.done
        if done:
            self._body = None
        if self._request is not None:  # or it has been answered already
            self._request.feed(data[:taken], done)
        elif done:
            self._next()
        return data[taken:]

    def _ask_admin(self, head: RequestHead, data: bytes) -> bytes:
        assert self._admin is not None
        length = head.framing.length
        if head.framing.kind == "chunked" or length > MAX_ADMIN_BYTES:
            self._refuse_bytes(BadMessage(413, "the control plane takes short bodies with a Content-Length"))
            return b""
        if len(data) < head.size + length:  # it expects `100 Continue`
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._buffer, self._needed = data, head.size + length
            return b""
        peer = self._transport.get_extra_info("peername")
        close = not head.keep_alive or self._dispatcher.hangs_up
        self._write_own(head, self._admin.respond(head, data[head.size : head.size + length], peer, close=close))
        if close:
            self._hang_up()
        return data[head.size + length :]

    def _refuse_bytes(self, error: BadMessage) -> None:
        """Answer that the bytes are no request, or none for here, and read nothing more."""
        request, self._request = self._request, None
        answered = self._body is not None and request is None
        self._body = None
        code = _CODES.get(error.status, "bad_request")
        self._dispatcher.stats.refusals[code] += 1
        if request is not None:
            request.abandon()
            if request.begun:
                self.cut()
                return
        if not answered:  # a worker may have answered before the whole request had come
            self.write(error_response(error.status, code, f"{error.reason}.", close=True))
        self._hang_up()

    # Called by the request

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def read_on(self, can_read: bool) -> None:
        """Read more of the request, or wait."""
        if can_read != self._reading and not self._transport.is_closing():
            self._reading = can_read
            now = time.monotonic()
            if can_read:
                self._began += now - self._paused_at  # it was not the client that took so long
                self._transport.resume_reading()
            else:
                self._paused_at = now
                self._transport.pause_reading()

    def finished(self, *, close: bool) -> None:
        """The whole response was written."""
        self._request = None
        if close:
            self._hang_up()
        elif self._body is None:
            self._next()
        elif not self._reading:
            self.read_on(True)  # discard the rest of a body that no worker wants

    def cut(self) -> None:
        """Break the connection: the response cannot be finished, and must not look whole."""
        self._request = None
        self._transport.abort()

    def refuse(self, status: int, code: str, reason: str) -> None:
        """Answer with an error of the router's own."""
        assert self._head is not None
        close = not self._head.keep_alive or self._dispatcher.hangs_up
        text = error_response(status, code, reason if reason.endswith(".") else f"{reason}.", close=close)
        self._write_own(self._head, text)
        self.finished(close=close)

    # Called by the server

    def tick(self, now: float) -> None:
        """Close it when the client has been silent for too long."""
        settings = self._dispatcher.settings
        silent_s, timeout_s = now - self.touched, settings.client_timeout_s
        if self._lingering:
            if silent_s > (timeout_s if self._transport.get_write_buffer_size() else LINGER_S):
                self._transport.abort()
        elif (self._body is not None and self._reading) or (self._buffer and self._request is None):
            if silent_s > timeout_s:
                self._refuse_bytes(BadMessage(408, f"nothing came for {timeout_s:g} s in the middle of a request"))
            elif now - self._began > settings.request_timeout_s:
                reason = f"the request had not come in full after {settings.request_timeout_s:g} s"
                self._refuse_bytes(BadMessage(408, reason))
        elif self._request is None and silent_s > (_CROWDED_IDLE_S if self._dispatcher.is_crowded else IDLE_TIMEOUT_S):
            self._transport.close()

    def close_if_idle(self) -> None:
        if self._request is None and not self._lingering and self._body is None and not self._buffer:
            self._transport.close()

    def close(self) -> None:
        self._transport.abort()

    def _write_own(self, head: RequestHead, text: bytes) -> None:
        """Write a response of the router's own, of which HEAD gets the head."""
        self.write(text[: text.index(END) + len(END)] if head.method == b"HEAD" else text)

    def _next(self) -> None:
        """Read what came behind the last request."""
        if not self._reading:
            self.read_on(True)
        self._began = time.monotonic()
        if self._buffer and not self._taking:
            # Not from here: many pipelined requests that are refused at once would recurse once for each.
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._buffer and not self._transport.is_closing():
            self.data_received(b"")

    def _hang_up(self) -> None:
        """Send what is written, then close. Until the client has closed too, what it still sends is read and discarded:
        closing on unread bytes would reset the connection, and lose the response."""
        self._lingering = True
        self._buffer = b""
        self.touched = time.monotonic()
        if not self._transport.is_closing():
            self.read_on(True)
            self._transport.write_eof()
