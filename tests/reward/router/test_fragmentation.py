"""Wherever the network cuts a stream into packets, the messages in it stay the same."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.reward.router.client import chunks, request
from tests.reward.router.conftest import Pair
from tests.reward.router.fakes import Exchange, plain
from tests.reward.router.wire import Head

# The fixture is one router for all examples: each example has a connection and a record of its own.
quick = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

TOKEN = b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
VISIBLE = bytes(range(0x21, 0x7F)) + bytes(range(0x80, 0x100))
IN_TARGET = b"abcXYZ019-._~!$&'()*+,;=:@/?%|{}[]"
OF_THE_ROUTER = {b"connection", b"keep-alive", b"proxy-connection", b"upgrade"}
FRAMING = {b"content-length", b"transfer-encoding", b"host", b"expect", b"trailer", b"te"}


def drawn_from(alphabet: bytes, min_size: int = 0, max_size: int = 12) -> st.SearchStrategy[bytes]:
    return st.lists(st.sampled_from(list(alphabet)), min_size=min_size, max_size=max_size).map(bytes)


names = drawn_from(TOKEN, 1).filter(lambda name: name.lower() not in OF_THE_ROUTER | FRAMING)
words = st.lists(drawn_from(VISIBLE, 1), max_size=3)
spaces = st.sampled_from([b"", b" ", b"  ", b"\t", b" \t "])


@st.composite
def fields(draw: st.DrawFn, max_size: int = 6) -> list[bytes]:
    return [
        draw(names) + b":" + draw(spaces) + b" ".join(draw(words)) + draw(spaces)
        for _ in range(draw(st.integers(0, max_size)))
    ]


@st.composite
def chunked_bodies(draw: st.DrawFn) -> bytes:
    """Chunks with zeros before their sizes, extensions and trailers."""
    body = b""
    for data in draw(st.lists(st.binary(min_size=1, max_size=40), max_size=4)):
        size = draw(st.sampled_from([b"%x", b"%X", b"0%x", b"000%X"])) % len(data)
        extension = draw(st.sampled_from([b"", b";a", b";a=b", b';q="x y"', b";a;b=c"]))
        body += size + extension + b"\r\n" + data + b"\r\n"
    return body + b"0\r\n" + b"".join(line + b"\r\n" for line in draw(fields(2))) + b"\r\n"


@st.composite
def framed(draw: st.DrawFn, may_have_none: bool) -> tuple[list[bytes], bytes]:
    """Framing fields and the body they frame."""
    kind = draw(st.sampled_from(["length", "chunks", "none"] if may_have_none else ["length", "chunks"]))
    if kind == "length":
        body = draw(
            st.one_of(st.binary(max_size=60), st.just(b"\r\n\r\nGET /x HTTP/1.1\r\n\r\n"), st.just(b"z" * 70_000))
        )
        return [b"Content-Length: %d" % len(body)], body
    if kind == "chunks":
        return [b"Transfer-Encoding: chunked"], draw(chunked_bodies())
    return [], b""


def shuffled(draw: st.DrawFn, *groups: list[bytes]) -> list[bytes]:
    return draw(st.permutations([line for group in groups for line in group]))


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    method = draw(st.sampled_from([b"GET", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"M-SEARCH", b"QUERY"]))
    target = b"/p" + draw(drawn_from(IN_TARGET, max_size=30))
    framing, body = draw(framed(may_have_none=True))
    hop = draw(st.sampled_from([[], [], [b"Connection: keep-alive"], [b"Connection: X-Hop", b"x-hop: 1"]]))
    lines = shuffled(draw, [b"Host: worker.test"], framing, hop, draw(fields()))
    return b"\r\n".join([method + b" " + target + b" HTTP/1.1", *lines]) + b"\r\n\r\n" + body


@st.composite
def responses(draw: st.DrawFn) -> bytes:
    status = draw(st.sampled_from([200, 201, 206, 302, 404, 418, 429, 599]))
    framing, body = draw(framed(may_have_none=False))
    lines = shuffled(draw, framing, draw(fields()))
    reason = draw(st.sampled_from([b"OK", b"", b"Not Quite", b"\xe9"]))
    interim = draw(st.sampled_from([b"", b"", b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"]))
    return interim + b"\r\n".join([b"HTTP/1.1 %d %s" % (status, reason), *lines]) + b"\r\n\r\n" + body


@st.composite
def packets(draw: st.DrawFn, messages: list[bytes]) -> list[bytes]:
    """All messages in a row, cut at places drawn at random or just where it hurts: about line ends."""
    stream = b"".join(messages)
    ends = [at + shift for at in range(len(stream)) if stream[at : at + 1] == b"\n" for shift in (-1, 0, 1)]
    places = st.one_of(st.integers(0, len(stream)), st.sampled_from([place for place in ends if place >= 0]))
    cuts = sorted({0, len(stream), *draw(st.lists(places, max_size=10))})
    return [stream[start:end] for start, end in itertools.pairwise(cuts)]


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[bytes], list[bytes], float]:
    messages = draw(st.lists(requests(), min_size=1, max_size=4))
    return messages, draw(packets(messages)), draw(st.sampled_from([0.0, 0.0, 0.001]))


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[bytes], list[list[bytes]], float]:
    messages = draw(st.lists(responses(), min_size=1, max_size=4))
    return messages, [draw(packets([message])) for message in messages], draw(st.sampled_from([0.0, 0.0, 0.001]))


def end_to_end(message: bytes) -> bytes:
    head, _, body = message.partition(b"\r\n\r\n")
    return Head(head + b"\r\n\r\n").end_to_end() + body


@quick
@given(conversations())
def test_requests_arrive_whole_and_in_order(pair: Pair, conversation: tuple[list[bytes], list[bytes], float]) -> None:
    messages, pieces, pause_s = conversation
    pair.worker.forget()
    with pair.client() as client:
        client.send(*pieces, pause_s=pause_s)
        for message in messages:
            assert client.response().data == message.split(b" ")[1]
    arrived = [seen.head.end_to_end() + seen.body for seen in pair.worker.requests]
    assert arrived == [end_to_end(message) for message in messages]


@quick
@given(answers())
def test_responses_arrive_whole_and_in_order(pair: Pair, answers: tuple[list[bytes], list[list[bytes]], float]) -> None:
    messages, pieces, pause_s = answers
    left = iter(pieces)

    def send_next(exchange: Exchange) -> None:
        exchange.read_body()
        exchange.send(*next(left), pause_s=pause_s)

    pair.worker.handler = send_next
    with pair.client() as client:
        for message in messages:
            received = client.get()
            interim = b"".join(head.raw for head in received.interim)
            assert interim + received.end_to_end() == message


MESSAGES = {
    "no body": request(b"GET", b"/one"),
    "length": request(b"POST", b"/one", body=b"hello"),
    "chunks": request(b"POST", b"/one", [b"Transfer-Encoding: chunked"], chunks(b"hello", b"x", trailers=[b"X: 1"])),
}


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES.keys())
def test_requests_one_byte_at_a_time(pair: Pair, message: bytes) -> None:
    with pair.client() as client:
        client.send(*(bytes([byte]) for byte in message * 2), pause_s=0.0005)
        assert client.response().data == b"/one"
        assert client.response().data == b"/one"
    assert [seen.raw for seen in pair.worker.requests] == [message] * 2


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES.keys())
def test_requests_cut_at_every_place(pair: Pair, message: bytes) -> None:
    with pair.client() as client:
        for cut in range(1, len(message)):
            client.send(message[:cut])
            time.sleep(0.001)
            client.send(message[cut:])
            assert client.response().data == b"/one"
    assert {seen.raw for seen in pair.worker.requests} == {message}


ANSWERS = {
    "length": plain(b"hello"),
    "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks(b"hello", b"x", trailers=[b"X: 1"]),
    "no content": b"HTTP/1.1 204 No Content\r\nX: 1\r\n\r\n",
    "hints first": b"HTTP/1.1 103 Early Hints\r\n\r\n" + plain(b"hello"),
}


@pytest.mark.parametrize("message", ANSWERS.values(), ids=ANSWERS.keys())
def test_responses_cut_at_every_place(pair: Pair, message: bytes) -> None:
    places = iter(range(1, len(message)))

    def send_next(exchange: Exchange) -> None:
        exchange.read_body()
        cut = next(places)
        exchange.send(message[:cut], message[cut:], pause_s=0.001)

    pair.worker.handler = send_next
    with pair.client() as client:
        for _ in range(1, len(message)):
            received = client.get()
            assert b"".join(head.raw for head in received.interim) + received.raw == message


@pytest.mark.parametrize("message", ANSWERS.values(), ids=ANSWERS.keys())
def test_responses_one_byte_at_a_time(pair: Pair, message: bytes) -> None:
    def trickle(exchange: Exchange) -> None:
        exchange.read_body()
        exchange.send(*(bytes([byte]) for byte in message), pause_s=0.0005)

    pair.worker.handler = trickle
    with pair.client() as client:
        for _ in range(2):
            received = client.get()
            assert b"".join(head.raw for head in received.interim) + received.raw == message
