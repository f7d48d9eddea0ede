"""A worker behind the router that does exactly what a test tells it, and writes down every byte it is sent.

It is deliberately no web server: a *handler* is called with each request head and may read the body when it likes,
send any bytes, pause, close or reset. The router's own questions about its health are answered and not recorded.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tests.reward.router.wire import ClosedError, Head, LateError, Reader

PROBE = b"GET /health HTTP/1.1"
IDLE_S = 60.0  # a kept-alive connection may wait this long for its next request
WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Request:
    """A complete request as it came: the head, the body with its framing, and the body's data."""

    head: Head
    body: bytes
    data: bytes
    connection: int

    @property
    def raw(self) -> bytes:
        return self.head.raw + self.body


@dataclass(slots=True)
class Exchange:
    """One request on one connection, in a handler's hands."""

    worker: FakeWorker
    reader: Reader
    head: Head
    connection: int
    is_closed: bool = False
    request: Request | None = None

    def read_body(self) -> Request:
        """Read the rest of the request, once; it then counts among the worker's requests."""
        if self.request is None:
            length, body, data = self.head.length(), b"", b""
            if self.head.is_chunked():
                body, data = self.reader.chunked()
            elif length:
                body = data = self.reader.exactly(length)
            self.request = Request(self.head, body, data, self.connection)
            self.worker.note(self.request)
        return self.request

    def send(self, *pieces: bytes, pause_s: float = 0.0) -> None:
        for number, piece in enumerate(pieces):
            if pause_s and number:
                time.sleep(pause_s)
            self.reader.sock.settimeout(WAIT_S)
            self.reader.sock.sendall(piece)

    def close(self) -> None:
        """Close in an orderly way; what was sent still arrives."""
        self.is_closed = True
        with contextlib.suppress(OSError):
            self.reader.sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Drop the connection with a TCP reset, as soon as the handler returns."""
        self.is_closed = True
        self.reader.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def wait_for_close(self) -> bytes:
        """What the router still sends until it closes the connection."""
        self.is_closed = True
        return self.reader.to_close()


Handler = Callable[[Exchange], None]


def plain(body: bytes = b"ok", status: bytes = b"200 OK", fields: Iterable[bytes] = ()) -> bytes:
    """A response with a Content-Length."""
    lines = [b"HTTP/1.1 " + status, *fields, b"Content-Length: %d" % len(body)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def answer(*pieces: bytes, pause_s: float = 0.0, close: bool = False) -> Handler:
    """A handler that reads the request, then sends these bytes."""

    def handler(exchange: Exchange) -> None:
        exchange.read_body()
        exchange.send(*pieces, pause_s=pause_s)
        if close:
            exchange.close()

    return handler


def echo_target(exchange: Exchange) -> None:
    """Answer with the target, so that an answer tells which request it belongs to."""
    exchange.read_body()
    exchange.send(plain(b"" if exchange.head.method == b"HEAD" else exchange.head.target))


@dataclass(slots=True)
class FakeWorker:
    """A server on loopback; `handler` may be changed between requests."""

    handler: Handler = field(default_factory=lambda: echo_target)
    send_buffer: int | None = None
    receive_buffer: int | None = None
    requests: list[Request] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    num_connections: int = 0
    _log: list[tuple[int, bytes]] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _open: dict[int, socket.socket] = field(default_factory=dict)
    _listener: socket.socket = field(default_factory=socket.socket)
    _closing: bool = False

    def start(self, port: int = 0) -> FakeWorker:
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self.receive_buffer is not None:  # inherited by what it accepts, and only effective before that
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.receive_buffer)
        self._listener.bind(("127.0.0.1", port))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def num_open(self) -> int:
        with self._changed:
            return len(self._open)

    def note(self, request: Request) -> None:
        with self._changed:
            self.requests.append(request)
            self._changed.notify_all()

    def forget(self) -> None:
        """Start the record afresh; connections stay."""
        with self._changed:
            self.requests, self._log = [], []

    def received(self) -> dict[int, bytes]:
        """Every byte since `forget`, by connection."""
        seen: dict[int, bytes] = defaultdict(bytes)
        with self._changed:
            for number, data in self._log:
                seen[number] += data
        return dict(seen)

    def wait_for(self, condition: Callable[[FakeWorker], bool], what: str, timeout_s: float = WAIT_S) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: condition(self), timeout_s):
                raise LateError(f"the worker did not see {what} in {timeout_s:g} s")

    def wait_for_closed(self, connection: int, timeout_s: float = WAIT_S) -> None:
        what = f"the router close connection {connection}"
        self.wait_for(lambda worker: connection not in worker._open, what, timeout_s)

    def settle(self, timeout_s: float = WAIT_S) -> None:
        """Until everything that has arrived is in the record, closes included."""
        deadline, num_quiet = time.monotonic() + timeout_s, 0
        while num_quiet < 2:  # once is not enough: a thread may be between reading and writing down
            poll = select.poll()
            with self._changed:
                for sock in [self._listener, *self._open.values()]:
                    poll.register(sock, select.POLLIN)
                busy = poll.poll(0)
            num_quiet = 0 if busy else num_quiet + 1
            if time.monotonic() > deadline:
                raise LateError(f"{len(busy)} of the worker's connections are still unread after {timeout_s:g} s")
            time.sleep(0.001)

    def close_idle(self) -> None:
        """Close every open connection, as a server does when a keep-alive times out."""
        with self._changed:
            for sock in self._open.values():
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        self.wait_for(lambda worker: not worker._open, "its own connections closed")

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.close_idle()

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.send_buffer is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.send_buffer)
            with self._changed:
                number = self.num_connections
                self.num_connections += 1
                self._open[number] = sock
            threading.Thread(target=self._serve, args=(sock, number), daemon=True).start()

    def _serve(self, sock: socket.socket, number: int) -> None:
        try:
            self._exchanges(sock, number)
        except OSError:
            pass  # the router hung up while a handler was writing: tests look at the other end
        except BaseException as error:
            self.errors.append(error)
        finally:
            with self._changed:  # no one else may meet it closed
                sock.close()
                self._open.pop(number, None)
                self._changed.notify_all()

    def _exchanges(self, sock: socket.socket, number: int) -> None:
        def log(data: bytes) -> None:
            with self._changed:
                self._log.append((number, data))
                self._changed.notify_all()

        reader = Reader(sock, IDLE_S, log)
        while True:
            reader.timeout_s = IDLE_S
            try:
                head = reader.head()
                if head is None:
                    return
                reader.timeout_s = WAIT_S
                if head.start == PROBE:
                    self._answer_probe(sock, number, head)
                    continue
                exchange = Exchange(self, reader, head, number)
                self.handler(exchange)
                if exchange.is_closed:
                    return
                exchange.read_body()
            except ClosedError:
                return  # several tests provoke a request that stops in the middle; a malformed one is a finding

    def _answer_probe(self, sock: socket.socket, number: int, head: Head) -> None:
        with self._changed:
            for place in reversed(range(len(self._log))):
                connection, data = self._log[place]
                if connection == number and data.endswith(head.raw):
                    self._log[place] = (number, data.removesuffix(head.raw))
                    break
            self._log = [entry for entry in self._log if entry[1]]
        sock.sendall(plain(b"alive"))
