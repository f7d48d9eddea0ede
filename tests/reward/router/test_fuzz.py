"""Whatever comes in, what goes out is read in one way: messages are spoilt at random, and a stricter reader looks on.

`python -m tests.fuzz MINUTES` runs the same properties for longer, as does PRACTICUM_FUZZ_EXAMPLES=100000.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from practicum.reward.router.client import ClientConnection
from practicum.reward.router.connection import Failure, ResponseHandler, WorkerConnection
from practicum.reward.router.dispatcher import Dispatcher
from practicum.reward.router.http1 import HeadCache, ResponseHead, parse_response
from practicum.reward.router.request import ProxiedRequest
from practicum.reward.router.settings import RouterSettings
from tests.reward.router.test_fragmentation import requests, responses
from tests.reward.router.wire import WITHOUT_BODY, ClosedError, Head, Reader

NUM_EXAMPLES = int(os.environ.get("PRACTICUM_FUZZ_EXAMPLES", "300"))
fuzzed = settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])

# What two readers have been known to disagree about.
PIECES = [
    *(b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"\n\n", b"\0", b"\x0b", b"\x7f", b"\x80", b"\xff", b" ", b"\t", b":", b","),
    *(
        b";",
        b"=",
        b'"',
        b"0",
        b"5",
        b"f",
        b"-",
        b"+",
        b"0x",
        b"chunked",
        b"identity",
        b"close",
        b"HTTP/1.0",
        b"?",
        b"#",
    ),
    *(b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n", b"Content-Length: 0\r\n", b"Host: b\r\n"),
    *(b"transfer-encoding:", b"content-length:", b"Connection: close\r\n", b"Connection: content-length\r\n"),
    *(b"Expect: 100-continue\r\n", b"X-Practicum-Token: a\r\n", b"0\r\n\r\n", b"5\r\nhello\r\n", b"0\r\nX: 1\r\n\r\n"),
    *(b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 204 No\r\n\r\n"),
]


@st.composite
def spoilt(draw: st.DrawFn, messages: st.SearchStrategy[bytes]) -> bytes:
    """Messages in a row in which bytes are left out and pieces put in."""
    stream = b"".join(draw(st.lists(messages, min_size=1, max_size=3)))
    for _ in range(draw(st.integers(0, 4))):
        lines = [found.end() for found in re.finditer(rb"\r\n", stream[:600])]
        at = draw(st.sampled_from(lines) | st.integers(0, min(len(stream), 600)))
        piece = draw(st.sampled_from(PIECES) | st.binary(max_size=4))
        stream = stream[:at] + piece + stream[at + draw(st.sampled_from([0, 0, 0, 1, 2, 3])) :]
    return stream


def cut(stream: bytes, places: Sequence[int]) -> list[bytes]:
    ends = sorted({0, len(stream), *(place % (len(stream) + 1) for place in places)})
    return [stream[start:end] for start, end in itertools.pairwise(ends)]


places = st.lists(st.integers(0, 2000), max_size=8)


class Strict(Reader):
    """Reads what is there, and hears of no more."""

    def __init__(self, data: bytes) -> None:
        super().__init__(None, 1.0)  # type: ignore[arg-type]  # it never looks at the socket
        self.buffer += data

    def fill(self, deadline: float, what: str) -> bool:
        return False

    def request(self) -> Head:
        head = self.head()
        assert head is not None and len(head.start.split(b" ")) == 3, head
        self._body(head)
        return head

    def response(self) -> Head:
        head = self.head()
        assert head is not None
        if head.status >= 200 and head.status not in WITHOUT_BODY:
            self._body(head)
        return head

    def _body(self, head: Head) -> None:
        assert head.fields is not None  # each is one
        length = head.length()
        if head.is_chunked():
            self.chunked()
        elif length:
            self.exactly(length)


@dataclass
class Wire:
    """The end of a connection: what was written to it, and whether more may come."""

    written: bytearray = field(default_factory=bytearray)
    is_open: bool = True

    def write(self, data: bytes) -> None:
        self.written += data

    def write_eof(self) -> None:
        self.is_open = False

    def close(self) -> None:
        self.is_open = False

    abort = close

    def is_closing(self) -> bool:
        return not self.is_open

    def get_write_buffer_size(self) -> int:
        return 0

    def nothing(self, *_: Any) -> None: ...

    set_write_buffer_limits = pause_reading = resume_reading = nothing


class Recorder(Dispatcher):
    """A dispatcher whose workers answer as soon as they have all of a request."""

    def __init__(self) -> None:
        super().__init__(RouterSettings())
        self.taken: list[ProxiedRequest] = []

    def dispatch(self, request: ProxiedRequest) -> None:
        self.taken.append(request)


def passed_on(packets: Sequence[bytes]) -> tuple[list[bytes], bytes, bytes]:
    """What the worker sees of a client's bytes: whole requests and the beginning of one; and what the client reads."""

    async def feed() -> tuple[list[bytes], bytes, bytes]:
        dispatcher, wire = Recorder(), Wire()
        client = ClientConnection(dispatcher, None)
        client.connection_made(wire)  # type: ignore[arg-type]
        whole: list[bytes] = []
        for packet in packets:
            if wire.is_open:
                client.data_received(packet)
            while dispatcher.taken and dispatcher.taken[0].complete and wire.is_open:
                request = dispatcher.taken.pop(0)
                whole.append(b"".join(request._kept))
                client.finished(close=not request.head.keep_alive)
                await asyncio.sleep(0)
        part = b"".join(dispatcher.taken[0]._kept) if dispatcher.taken else b""
        if dispatcher.taken and dispatcher.taken[0].complete:  # the connection was closed before it was looked at
            part = b""
        return whole, part, bytes(wire.written)

    return asyncio.run(feed())


def readable(part: bytes) -> None:
    """A part of a request is the beginning of one, and not all of it."""
    if not part:
        return
    reader = Strict(part)
    try:
        reader.request()
    except ClosedError:
        return
    raise AssertionError(f"whole to another reader: {part[:300]!r}")


@fuzzed
@given(spoilt(requests()), places)
@example(b"POST / HTTP/1.1\r\nHost: a\r\nConnection: content-length\r\nContent-Length: 5\r\n\r\nhello", [])
def test_what_is_passed_on_is_one_request_to_any_reader(stream: bytes, where: list[int]) -> None:
    whole, part, written = passed_on(cut(stream, where))
    for raw in whole:
        reader = Strict(raw)
        head = reader.request()
        assert not reader.buffer, (raw, head.raw)
        assert head.target in stream
    readable(part)
    assert not written or Strict(written).response().status in (100, 400, 408, 413, 431, 501, 505)


@fuzzed
@given(spoilt(requests()), places)
def test_packets_change_nothing_about_what_is_passed_on(stream: bytes, where: list[int]) -> None:
    assert passed_on(cut(stream, where))[0] == passed_on([stream])[0]


@dataclass
class Client(ResponseHandler):
    """What a client is given of a response, up to its end or to a failure."""

    expects_no_body: bool = False
    interim: bytes = b""
    given: bytes = b""
    framing: str = ""
    is_over: bool = False
    failure: Failure | None = None

    def on_interim(self, connection: WorkerConnection, head: ResponseHead) -> None:
        self.interim += head.raw

    def on_response(self, connection: WorkerConnection, head: ResponseHead, data: bytes) -> None:
        self.given, self.framing, self.is_over = head.raw + data[head.size :], head.framing.kind, True

    def on_head(self, connection: WorkerConnection, head: ResponseHead) -> bool:
        self.given, self.framing = head.raw, head.framing.kind
        return True

    def on_body(self, connection: WorkerConnection, data: bytes) -> None:
        self.given += data

    def on_end(self, connection: WorkerConnection) -> None:
        self.is_over = True

    def on_failure(self, connection: WorkerConnection, failure: Failure) -> None:
        self.failure = failure


def answered(packets: Sequence[bytes]) -> Client:
    dispatcher, client = Recorder(), Client()
    connection = WorkerConnection(dispatcher.pool.add("http://127.0.0.1:1"), HeadCache(parse_response))
    connection.transport = Wire()  # type: ignore[assignment]
    connection.begin(client, b"", complete=True, now=0.0)
    for packet in packets:
        if connection.handler is not None:
            connection.data_received(packet)
    return client


@fuzzed
@given(spoilt(responses()), places)
def test_what_a_worker_answers_is_one_response_to_any_reader(stream: bytes, where: list[int]) -> None:
    client = answered(cut(stream, where))
    reader = Strict(client.interim)
    while reader.buffer:
        assert 100 <= reader.response().status < 200
    if client.is_over and client.framing != "until_close":
        assert client.failure is None
        reader = Strict(client.given)
        reader.response()
        assert not reader.buffer, client.given


@fuzzed
@given(spoilt(responses()), places)
def test_packets_change_nothing_about_an_answer(stream: bytes, where: list[int]) -> None:
    pieces, whole = answered(cut(stream, where)), answered([stream])
    assert (pieces.is_over, pieces.interim, pieces.failure is None) == (
        whole.is_over,
        whole.interim,
        whole.failure is None,
    )
    if pieces.is_over:
        assert pieces.given == whole.given
