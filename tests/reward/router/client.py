"""A raw client: bytes out, responses in, everything with a deadline."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
import urllib.parse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tests.reward.router.wire import WITHOUT_BODY, ClosedError, Head, LateError, Reader

TIMEOUT_S = 5.0
LOCAL = b"localhost"  # a host that the control plane takes for its own machine


@dataclass(frozen=True, slots=True)
class Response:
    """The interim (1xx) heads, the final head, the body with its framing, and the body's data."""

    interim: tuple[Head, ...]
    head: Head
    body: bytes
    data: bytes

    @property
    def status(self) -> int:
        return self.head.status

    @property
    def raw(self) -> bytes:
        return self.head.raw + self.body

    def end_to_end(self) -> bytes:
        return self.head.end_to_end() + self.body


class Client:
    """One connection to the router."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S, receive_buffer: int | None = None) -> None:
        address = urllib.parse.urlsplit(url)
        self.sock = socket.socket()
        if receive_buffer is not None:  # only before connecting does it bound the window
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.settimeout(timeout_s)
        self.sock.connect((address.hostname or "", address.port or 80))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.reader = Reader(self.sock, timeout_s)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sock.close()

    def send(self, *pieces: bytes, pause_s: float = 0.0) -> None:
        """Each piece is a packet of its own (TCP_NODELAY), with a pause between them."""
        for number, piece in enumerate(pieces):
            if pause_s and number:
                time.sleep(pause_s)
            self.sock.settimeout(self.reader.timeout_s)
            self.sock.sendall(piece)

    def offer(self, pieces: Iterable[bytes]) -> None:
        """Send what the router may refuse before it has read it all."""
        with contextlib.suppress(ConnectionError):
            self.send(*pieces)

    def half_close(self) -> None:
        self.sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Leave with a TCP reset, which cannot be taken for a half-close."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def response(self, method: bytes = b"GET") -> Response:
        interim = []
        while (head := self._head()).status < 200:
            interim.append(head)
        body = data = b""
        if method == b"HEAD" or head.status in WITHOUT_BODY:
            pass
        elif head.is_chunked():
            body, data = self.reader.chunked()
        elif (length := head.length()) is not None:
            body = data = self.reader.exactly(length)
        else:
            body = data = self.reader.to_close()
        return Response(tuple(interim), head, body, data)

    def ask(self, *pieces: bytes, pause_s: float = 0.0) -> Response:
        self.send(*pieces, pause_s=pause_s)
        return self.response(pieces[0].split(b" ")[0])

    def get(self, target: bytes = b"/") -> Response:
        return self.ask(request(b"GET", target))

    def rest(self, timeout_s: float = TIMEOUT_S) -> bytes:
        """Everything until the router closes; LateError if it does not."""
        self.reader.timeout_s = timeout_s
        return self.reader.to_close()

    def is_closed(self, timeout_s: float = TIMEOUT_S) -> bool:
        """Whether the router closes, and sends nothing before that."""
        return self.rest(timeout_s) == b""

    def is_kept(self, target: bytes = b"/kept") -> bool:
        """Whether the connection takes another request (the worker echoes targets)."""
        return self.get(target).data == target

    def _head(self) -> Head:
        head = self.reader.head()
        if head is None:
            raise ClosedError("the router closed the connection instead of answering")
        return head


def request(
    method: bytes = b"GET",
    target: bytes = b"/",
    fields: Iterable[bytes] = (),
    body: bytes = b"",
    host: bytes = b"worker.test",
) -> bytes:
    """A request in origin form; framing fields are the caller's, but for a Content-Length if there's a body alone."""
    lines = [method + b" " + target + b" HTTP/1.1", b"Host: " + host, *fields]
    names = {line.split(b":")[0].lower() for line in lines[1:]}
    if body and not names & {b"content-length", b"transfer-encoding"}:
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def chunks(*datas: bytes, trailers: Iterable[bytes] = ()) -> bytes:
    """A chunked body."""
    parts = [b"%x\r\n%s\r\n" % (len(data), data) for data in datas]
    return b"".join([*parts, b"0\r\n", *(line + b"\r\n" for line in trailers), b"\r\n"])


def worker_states(url: str) -> list[dict[str, Any]]:
    """What the router says of its workers."""
    with Client(url) as client:
        states: list[dict[str, Any]] = json.loads(client.ask(request(target=b"/router/workers", host=LOCAL)).data)
    return states


def wait_until(condition: Callable[[dict[str, Any]], bool], what: str, url: str, timeout_s: float) -> None:
    """Until it holds for the state of every worker."""
    deadline = time.monotonic() + timeout_s
    while not all(map(condition, states := worker_states(url))):
        if time.monotonic() > deadline:
            raise LateError(f"the workers are not {what} after {timeout_s:g} s: {states}")
        time.sleep(0.005)


def wait_until_idle(url: str, timeout_s: float = TIMEOUT_S) -> None:
    """Until no request is counted in flight on any worker."""
    wait_until(lambda state: state["in_flight"] == 0, "idle", url, timeout_s)


def wait_until_up(url: str, timeout_s: float = TIMEOUT_S) -> None:
    """Until every worker has answered the router's first question; before that it gets no requests."""
    wait_until(lambda state: state["state"] == "up", "up", url, timeout_s)
