"""Streams arrive as they are sent, in both directions, and a slow reader slows the sender instead of filling memory."""

from __future__ import annotations

import contextlib
import threading

import pytest

from tests.reward.router.client import request
from tests.reward.router.conftest import Pair
from tests.reward.router.fakes import Exchange, plain

NUM_EVENTS = 20
STEP_S = 3.0  # an event that takes longer was held back
MIB = 1 << 20


class Turns:
    """Lets one side go on only when the other has confirmed; a turn that does not come is buffering."""

    def __init__(self) -> None:
        self._turn = threading.Semaphore(0)

    def give(self) -> None:
        self._turn.release()

    def take(self) -> None:
        assert self._turn.acquire(timeout=STEP_S), "the other side did not get what was sent to it"


EVENT_STREAMS = {
    "chunked": b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
    "until close": b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n",
    "http 1.0": b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n",
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (NUM_EVENTS * len(b"data: 00\n\n")),
}


def events(is_chunked: bool) -> list[bytes]:
    plain_events = [b"data: %02d\n\n" % number for number in range(NUM_EVENTS)]
    return [b"%x\r\n%s\r\n" % (len(event), event) for event in plain_events] if is_chunked else plain_events


@pytest.mark.parametrize("kind", EVENT_STREAMS)
def test_events_arrive_one_by_one(pair: Pair, kind: str) -> None:
    turns, sent = Turns(), events(kind == "chunked")

    def stream(exchange: Exchange) -> None:
        exchange.read_body()
        exchange.send(EVENT_STREAMS[kind])
        for event in sent:
            turns.take()
            exchange.send(event)
        turns.take()
        if kind == "chunked":
            exchange.send(b"0\r\n\r\n")
        elif kind != "length":
            exchange.close()

    pair.worker.handler = stream
    with pair.client(STEP_S) as client:
        client.send(request(b"POST", b"/events", body=b"prompt"))
        head = client.reader.head()
        assert head is not None and head.status == 200
        for event in sent:
            turns.give()
            assert client.reader.exactly(len(event)) == event
        turns.give()
        if kind == "chunked":
            assert client.reader.chunked() == (b"0\r\n\r\n", b"")
        elif kind != "length":
            assert client.is_closed()


def test_a_chunk_arrives_before_its_end_is_sent(pair: Pair) -> None:
    """One chunk of a megabyte that trickles must not be collected first."""
    turns = Turns()

    def stream(exchange: Exchange) -> None:
        exchange.read_body()
        exchange.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n100000\r\n", b"x" * 10)
        turns.take()
        exchange.send(b"x" * (MIB - 10) + b"\r\n0\r\n\r\n")

    pair.worker.handler = stream
    with pair.client(STEP_S) as client:
        client.send(request(b"GET", b"/"))
        assert client.reader.head() is not None
        assert client.reader.exactly(18) == b"100000\r\n" + b"x" * 10
        turns.give()
        assert client.reader.exactly(MIB - 3) == b"x" * (MIB - 10) + b"\r\n0\r\n\r\n"


@pytest.mark.parametrize("framing", ["chunked", "length"])
def test_uploads_arrive_piece_by_piece(pair: Pair, framing: str) -> None:
    """A small body of known length may be gathered first, so that it can be sent again; a large one may not."""
    turns = Turns()
    sent = events(is_chunked=True) if framing == "chunked" else [b"x" * 100_000] * NUM_EVENTS

    def listen(exchange: Exchange) -> None:
        for piece in sent:
            assert exchange.reader.exactly(len(piece)) == piece
            turns.give()
        if framing == "chunked":
            assert exchange.reader.chunked() == (b"0\r\n\r\n", b"")
        exchange.send(plain(b"all"))
        exchange.close()

    pair.worker.handler = listen
    with pair.client() as client:
        length = b"Content-Length: %d" % sum(map(len, sent))
        client.send(request(b"POST", b"/upload", [b"Transfer-Encoding: chunked" if framing == "chunked" else length]))
        for piece in sent:
            client.send(piece)
            turns.take()
        if framing == "chunked":
            client.send(b"0\r\n\r\n")
        assert client.response().data == b"all"


def test_both_directions_at_once(pair: Pair) -> None:
    """The worker answers each chunk before it has seen the next: a conversation within one request."""

    def converse(exchange: Exchange) -> None:
        exchange.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            raw, data = exchange.reader.chunk()
            exchange.send(raw)
            if not data:
                break
        exchange.close()

    pair.worker.handler = converse
    with pair.client(STEP_S) as client:
        client.send(request(b"POST", b"/talk", [b"Transfer-Encoding: chunked"]))
        head = client.reader.head()
        assert head is not None and head.status == 200
        for event in [*events(is_chunked=True), b"0\r\n\r\n"]:
            client.send(event)
            assert client.reader.exactly(len(event)) == event


def test_early_hints_are_handed_on_at_once(pair: Pair) -> None:
    turns = Turns()
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>; rel=preload\r\nLink: </b.css>\r\n\r\n"

    def hint(exchange: Exchange) -> None:
        exchange.read_body()
        exchange.send(b"HTTP/1.1 102 Processing\r\n\r\n" + hints)
        turns.take()
        exchange.send(plain(b"done"))

    pair.worker.handler = hint
    with pair.client(STEP_S) as client:
        for _ in range(2):
            client.send(request(b"GET", b"/"))
            assert client.reader.exactly(27) == b"HTTP/1.1 102 Processing\r\n\r\n"
            assert client.reader.exactly(len(hints)) == hints
            turns.give()
            assert client.response().data == b"done"


EXPECTING = [b"Expect: 100-continue", b"Content-Length: 4"]


@pytest.mark.parametrize("expect", [b"100-continue", b"100-Continue"], ids=bytes.decode)
def test_continue_is_the_workers_to_say(pair: Pair, expect: bytes) -> None:
    def go_on(exchange: Exchange) -> None:
        assert not exchange.reader.buffer, "the body came before it was asked for"
        exchange.send(b"HTTP/1.1 100 Go On\r\nX-Interim: 1\r\n\r\n")
        assert exchange.read_body().data == b"body"
        exchange.send(plain(b"thanks"))

    pair.worker.handler = go_on
    raw = request(b"PUT", b"/", [b"Expect: " + expect, b"Content-Length: 4"])
    with pair.client(STEP_S) as client:
        for _ in range(2):
            client.send(raw)
            head = client.reader.head()
            assert head is not None and head.raw == b"HTTP/1.1 100 Go On\r\nX-Interim: 1\r\n\r\n"
            client.send(b"body")
            assert client.response().data == b"thanks"
    assert [seen.raw for seen in pair.worker.requests] == [raw + b"body"] * 2


@pytest.mark.parametrize("status", [b"417 Expectation Failed", b"401 Unauthorized", b"200 OK"], ids=bytes.decode)
@pytest.mark.parametrize("closes", [True, False], ids=["worker closes", "worker keeps"])
def test_a_worker_may_answer_before_the_body(pair: Pair, status: bytes, closes: bool) -> None:
    def refuse(exchange: Exchange) -> None:
        exchange.send(plain(b"at once", status, [b"Connection: close"] if closes else []))
        if closes:
            exchange.close()

    pair.worker.handler = refuse
    with pair.client(STEP_S) as client:
        client.send(request(b"PUT", b"/", EXPECTING))
        response = client.response()
        assert (response.status, response.data) == (int(status[:3]), b"at once")
    with pair.client() as client:
        assert client.get(b"/next").data == b"at once"


def test_a_body_may_follow_an_early_refusal(pair: Pair) -> None:
    """A client that sends its body anyway must not have it taken for the next request."""

    def refuse(exchange: Exchange) -> None:
        exchange.send(plain(b"no", b"401 Unauthorized"))
        exchange.read_body()

    pair.worker.handler = refuse
    body = request(b"GET", b"/smuggled")
    with pair.client(STEP_S) as client:
        client.send(request(b"PUT", b"/first", [b"Expect: 100-continue", b"Content-Length: %d" % len(body)]))
        assert client.response().status == 401
        client.offer([body, request(b"GET", b"/second")])
        with contextlib.suppress(OSError):
            client.half_close()
        assert client.rest(STEP_S).count(b"HTTP/1.1 ") <= 1
    assert b"/smuggled" not in {seen.head.target for seen in pair.worker.requests}


@pytest.mark.parametrize("framing", ["chunked", "length"])
@pytest.mark.parametrize("closes", [True, False], ids=["worker closes", "worker keeps"])
def test_a_client_that_uploads_on_gets_the_early_answer(pair: Pair, closes: bool, framing: str) -> None:
    """The answer comes long before the client looks for it; the rest of the upload must not cost it the answer."""
    piece = b"x" * 100_000

    def refuse(exchange: Exchange) -> None:
        exchange.send(plain(b"too large", b"413 Content Too Large", [b"Connection: close"] if closes else []))
        if closes:
            exchange.close()
            exchange.wait_for_close()  # as a server should: a close at once would be a reset

    pair.worker.handler = refuse
    with pair.client() as client:
        length = b"Content-Length: %d" % (100 * len(piece))
        client.offer([request(b"POST", b"/big", [b"Transfer-Encoding: chunked" if framing == "chunked" else length])])
        client.offer([b"%x\r\n%s\r\n" % (len(piece), piece) if framing == "chunked" else piece] * 100)
        client.offer([b"0\r\n\r\n"] if framing == "chunked" else [])
        assert client.response().status == 413
