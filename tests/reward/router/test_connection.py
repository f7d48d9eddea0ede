"""A worker that answers nonsense: the client gets a 502 or a visible cut, never a wrong answer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from practicum.reward.router import POLICIES
from tests.reward.router.client import Client, request
from tests.reward.router.fakes import Exchange, FakeWorker, answer, echo_target, plain
from tests.reward.router.wire import ClosedError

StartWorker = Callable[..., FakeWorker]
StartRouter = Callable[..., Any]

INSERTED = b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\ninserted"


def response(*lines: bytes, start: bytes = b"HTTP/1.1 200 OK", body: bytes = b"") -> bytes:
    return b"\r\n".join([start, *lines]) + b"\r\n\r\n" + body


# Wrong before anything could be handed on; each is followed by INSERTED on the wire.
BAD_HEADS: dict[str, bytes] = {
    "length and coding": response(b"Content-Length: 5", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "coding and length": response(b"Transfer-Encoding: chunked", b"Content-Length: 5", body=b"0\r\n\r\n"),
    "two lengths, different": response(b"Content-Length: 5", b"Content-Length: 50", body=b"hello"),
    "two lengths, same": response(b"Content-Length: 5", b"Content-Length: 5", body=b"hello"),
    "length 5,5": response(b"Content-Length: 5,5", body=b"hello"),
    "length +5": response(b"Content-Length: +5", body=b"hello"),
    "length -5": response(b"Content-Length: -5", body=b"hello"),
    "length 0x5": response(b"Content-Length: 0x5", body=b"hello"),
    "length empty": response(b"Content-Length:", body=b"hello"),
    "length <0b>5": response(b"Content-Length: \x0b5", body=b"hello"),
    "length of 30 digits": response(b"Content-Length: " + b"9" * 30, body=b"hello"),
    "coding xchunked": response(b"Transfer-Encoding: xchunked", body=b"0\r\n\r\n"),
    "coding gzip, chunked": response(b"Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n"),
    "coding chunked, identity": response(b"Transfer-Encoding: chunked, identity", body=b"0\r\n\r\n"),
    "coding chunked twice": response(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "coding with <0b>": response(b"Transfer-Encoding: \x0bchunked", body=b"0\r\n\r\n"),
    "coding on HTTP/1.0": response(b"Transfer-Encoding: chunked", start=b"HTTP/1.0 200 OK", body=b"0\r\n\r\n"),
    "space before a colon": response(b"Content-Length : 5", body=b"hello"),
    "tab before a colon": response(b"Transfer-Encoding\t: chunked", body=b"0\r\n\r\n"),
    "no colon": response(b"X-Any", b"Content-Length: 5", body=b"hello"),
    "empty name": response(b": 1", b"Content-Length: 5", body=b"hello"),
    "fold": response(b"X-Any: 1", b" more", b"Content-Length: 5", body=b"hello"),
    "leading space": response(b" X-Any: 1", b"Content-Length: 5", body=b"hello"),
    "zero byte in a value": response(b"X-Any: \x00", b"Content-Length: 5", body=b"hello"),
    "bare LF in a value": response(b"X-Any: 1\nX-Other: 2", b"Content-Length: 5", body=b"hello"),
    "bare CR in a value": response(b"X-Any: 1\rX-Other: 2", b"Content-Length: 5", body=b"hello"),
    "control byte in a name": response(b"X-\x01Any: 1", b"Content-Length: 5", body=b"hello"),
    "LF everywhere": b"HTTP/1.1 200 OK\nContent-Length: 5\n\nhello",
    "status line: HTTP/2.0": response(b"Content-Length: 5", start=b"HTTP/2.0 200 OK", body=b"hello"),
    "status line: http/1.1": response(b"Content-Length: 5", start=b"http/1.1 200 OK", body=b"hello"),
    "status line: no status": response(b"Content-Length: 5", start=b"HTTP/1.1", body=b"hello"),
    "status line: two digits": response(b"Content-Length: 5", start=b"HTTP/1.1 20 OK", body=b"hello"),
    "status line: four digits": response(b"Content-Length: 5", start=b"HTTP/1.1 2000 OK", body=b"hello"),
    "status line: letters": response(b"Content-Length: 5", start=b"HTTP/1.1 abc OK", body=b"hello"),
    "status line: minus": response(b"Content-Length: 5", start=b"HTTP/1.1 -20 OK", body=b"hello"),
    "status line: 099": response(b"Content-Length: 5", start=b"HTTP/1.1 099 OK", body=b"hello"),
    "status line: two spaces": response(b"Content-Length: 5", start=b"HTTP/1.1  200 OK", body=b"hello"),
    "status line: leading space": response(b"Content-Length: 5", start=b" HTTP/1.1 200 OK", body=b"hello"),
    "status line: zero byte": response(b"Content-Length: 5", start=b"HTTP/1.1 200 O\x00K", body=b"hello"),
    "status line: a request": response(b"Content-Length: 5", start=b"GET / HTTP/1.1", body=b"hello"),
    "switching protocols unasked": response(b"Upgrade: x", start=b"HTTP/1.1 101 Switching Protocols"),
    "not HTTP": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "noise": bytes(range(256)) * 2,
    "huge head": response(b"X-Any: " + b"v" * 300_000, b"Content-Length: 5", body=b"hello"),
    "fields that never end": b"HTTP/1.1 200 OK\r\n" + b"X: 1\r\n" * 100_000,
}

CHUNKS = response(b"Transfer-Encoding: chunked", body=b"3\r\nabc\r\n")

# Wrong after a valid head: the answer is cut where it goes wrong, or never begun.
BAD_BODIES: dict[str, bytes] = {
    "chunk size -1": CHUNKS + b"-1\r\nhello\r\n0\r\n\r\n",
    "chunk size 0x5": CHUNKS + b"0x5\r\nhello\r\n0\r\n\r\n",
    "chunk size +5": CHUNKS + b"+5\r\nhello\r\n0\r\n\r\n",
    "chunk size empty": CHUNKS + b"\r\nhello\r\n0\r\n\r\n",
    "chunk size xyz": CHUNKS + b"xyz\r\nhello\r\n0\r\n\r\n",
    "chunk size huge": CHUNKS + b"f" * 20 + b"\r\nhello\r\n0\r\n\r\n",
    "chunk size ended by LF": CHUNKS + b"5\nhello\r\n0\r\n\r\n",
    "chunk extension with LF": CHUNKS + b"5;a\nb\r\nhello\r\n0\r\n\r\n",
    "chunk too long": CHUNKS + b"3\r\nhello\r\n0\r\n\r\n",
    "chunk without line end": CHUNKS + b"5\r\nhello0\r\n\r\n",
    "trailer without colon": CHUNKS + b"0\r\nno colon\r\n\r\n",
    "trailer with a zero byte": CHUNKS + b"0\r\nX: \x00\r\n\r\n",
    "folded trailer": CHUNKS + b"0\r\nX: 1\r\n more\r\n\r\n",
}

# The worker closes (or resets) within the answer.
CUT_BODIES: dict[str, bytes] = {
    "length, nothing": response(b"Content-Length: 10"),
    "length, a part": response(b"Content-Length: 10", body=b"hello"),
    "length, all but one": response(b"Content-Length: 10", body=b"123456789"),
    "chunks, nothing": response(b"Transfer-Encoding: chunked"),
    "chunks, in a size": CHUNKS + b"1",
    "chunks, in the data": CHUNKS + b"a\r\nhello",
    "chunks, before the last": CHUNKS,
    "chunks, before the blank line": CHUNKS + b"0\r\n",
    "chunks, in a trailer": CHUNKS + b"0\r\nX-Sum: ",
}

CUT_HEADS: dict[str, bytes] = {
    "nothing": b"",
    "in the status line": b"HTTP/1.1 20",
    "after the status line": b"HTTP/1.1 200 OK\r\n",
    "in a field": b"HTTP/1.1 200 OK\r\nContent-Le",
    "in the blank line": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r",
    "after early hints": b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n",
    "after a continue": b"HTTP/1.1 100 Continue\r\n\r\n",
}


@dataclass(frozen=True, slots=True)
class Excess:
    """A whole answer with something behind it; the answer passes, the rest is nobody's."""

    method: bytes
    sent: bytes
    whole: bytes


EXCESSES: dict[str, Excess] = {
    "after a length": Excess(b"GET", plain(b"ok") + INSERTED, plain(b"ok")),
    "noise after a length": Excess(b"GET", plain(b"ok") + b"\x00\xff garbage", plain(b"ok")),
    "after length 0": Excess(b"POST", plain(b"") + INSERTED, plain(b"")),
    "after chunks": Excess(b"GET", CHUNKS + b"0\r\n\r\n" + INSERTED, CHUNKS + b"0\r\n\r\n"),
    "body of a HEAD": Excess(b"HEAD", plain(b"hello") + INSERTED, response(b"Content-Length: 5")),
    "body of a 204": Excess(
        b"GET",
        response(b"X: 1", start=b"HTTP/1.1 204 No Content", body=INSERTED),
        response(b"X: 1", start=b"HTTP/1.1 204 No Content"),
    ),
    "body of a 304": Excess(
        b"GET",
        plain(b"hello", b"304 Not Modified") + INSERTED,
        response(b"Content-Length: 5", start=b"HTTP/1.1 304 Not Modified"),
    ),
}


def routed(start_worker: StartWorker, start_router: StartRouter) -> tuple[FakeWorker, str]:
    worker = start_worker()
    return worker, start_router(worker, response_timeout_s=2.0).url


def check_serves(worker: FakeWorker, url: str) -> None:
    """The next clients get their own answers, and nothing that was left over."""
    worker.handler = echo_target
    for number in range(3):
        with Client(url) as client:
            target = b"/own-%d" % number
            answered = client.get(target)
            assert (answered.status, answered.data) == (200, target)


def check_is_502(client: Client) -> None:
    answered = client.response(b"POST")
    assert answered.status == 502, answered.raw[:300]
    assert b"application/json" in answered.head.values(b"content-type")[0]
    assert isinstance(json.loads(answered.data), dict)


@pytest.mark.parametrize("raw", BAD_HEADS.values(), ids=BAD_HEADS.keys())
@pytest.mark.parametrize("method", [b"GET", b"POST"], ids=bytes.decode)
def test_a_malformed_head_is_a_502(
    start_worker: StartWorker, start_router: StartRouter, method: bytes, raw: bytes
) -> None:
    worker, url = routed(start_worker, start_router)
    worker.handler = answer(raw + INSERTED)
    with Client(url) as client:
        client.send(request(method, b"/asked", body=b"x"))
        check_is_502(client)
    check_serves(worker, url)


@pytest.mark.parametrize("raw", CUT_HEADS.values(), ids=CUT_HEADS.keys())
@pytest.mark.parametrize("by", ["close", "reset"])
def test_a_close_before_the_answer_is_a_502(
    start_worker: StartWorker, start_router: StartRouter, by: str, raw: bytes
) -> None:
    worker, url = routed(start_worker, start_router)
    worker.handler = cutting(raw, by)
    with Client(url) as client:
        client.send(request(b"POST", b"/asked", body=b"x"))
        check_is_502(client)
    check_serves(worker, url)


def cutting(raw: bytes, by: str) -> Callable[[Exchange], None]:
    def cut(exchange: Exchange) -> None:
        exchange.read_body()
        exchange.send(raw)
        exchange.close() if by == "close" else exchange.reset()

    return cut


def check_is_cut(url: str, raw: bytes) -> None:
    """A 502, or the beginning of what the worker sent and then a close before the answer is whole."""
    received = bytearray()
    with Client(url, timeout_s=3.0) as client:
        client.reader.on_bytes = received.extend
        client.send(request(target=b"/asked"))
        try:
            answered = client.response()
        except ClosedError:
            assert raw.startswith(received), (raw, received)
        else:
            assert answered.status == 502, answered.raw


@pytest.mark.parametrize("raw", BAD_BODIES.values(), ids=BAD_BODIES.keys())
@pytest.mark.parametrize("apart", [False, True], ids=["at once", "head first"])
def test_a_malformed_body_is_cut(start_worker: StartWorker, start_router: StartRouter, apart: bool, raw: bytes) -> None:
    worker, url = routed(start_worker, start_router)
    pieces = [CHUNKS, raw[len(CHUNKS) :] + INSERTED] if apart else [raw + INSERTED]
    worker.handler = answer(*pieces, pause_s=0.05)
    check_is_cut(url, raw)
    check_serves(worker, url)


@pytest.mark.parametrize("raw", CUT_BODIES.values(), ids=CUT_BODIES.keys())
@pytest.mark.parametrize("by", ["close", "reset"])
def test_an_answer_cut_by_the_worker_is_cut_for_the_client(
    start_worker: StartWorker, start_router: StartRouter, by: str, raw: bytes
) -> None:
    worker, url = routed(start_worker, start_router)
    worker.handler = cutting(raw, by)
    check_is_cut(url, raw)
    check_serves(worker, url)


def test_a_pipelined_request_gets_nothing_after_a_cut(start_worker: StartWorker, start_router: StartRouter) -> None:
    worker, url = routed(start_worker, start_router)
    worker.handler = cutting(CUT_BODIES["length, a part"], "close")
    with Client(url) as client:
        client.offer([request(target=b"/asked") + request(target=b"/next", fields=[b"Connection: close"])])
        received = client.rest(3.0)
    assert received.startswith(b"HTTP/1.1 502 ") or received.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("case", EXCESSES.values(), ids=EXCESSES.keys())
@pytest.mark.parametrize("apart", [False, True], ids=["at once", "later"])
def test_what_follows_an_answer_is_nobodys(
    start_worker: StartWorker, start_router: StartRouter, apart: bool, case: Excess
) -> None:
    worker, url = routed(start_worker, start_router)
    cut = len(case.whole)
    worker.handler = answer(*([case.sent[:cut], case.sent[cut:]] if apart else [case.sent]), pause_s=0.05)
    with Client(url) as client:
        answered = client.ask(request(case.method, b"/asked"))
        assert answered.end_to_end() == case.whole
        if apart:  # what comes after the next request was sent could be its answer, for all a router can tell
            time.sleep(0.1)
        worker.handler = echo_target
        for number in range(3):
            assert client.is_kept(b"/next-%d" % number)
    check_serves(worker, url)


@pytest.mark.parametrize("status", [500, 502, 503, 504])
@pytest.mark.parametrize("method", [b"GET", b"POST"], ids=bytes.decode)
def test_a_failure_is_tried_again_on_another_worker(
    start_worker: StartWorker, start_router: StartRouter, method: bytes, status: int
) -> None:
    failing, good = start_worker(answer(plain(b"failed", b"%d Failed" % status))), start_worker()
    url = start_router(failing, good).url
    with Client(url) as client:
        for number in range(4):
            target = b"/%d" % number
            assert client.ask(request(method, target, body=b"the same body")).data == target
    assert {seen.data for worker in (failing, good) for seen in worker.requests} == {b"the same body"}


@pytest.mark.parametrize(
    "raw", [b"garbage\r\n\r\n", b"", response(b"Content-Length: x")], ids=["noise", "close", "head"]
)
def test_nonsense_may_be_tried_again_but_is_never_passed_on(
    start_worker: StartWorker, start_router: StartRouter, raw: bytes
) -> None:
    failing, good = start_worker(answer(raw, close=True)), start_worker()
    url = start_router(failing, good).url
    with Client(url) as client:
        for number in range(4):
            answered = client.get(b"/%d" % number)
            assert answered.status == 502 or answered.data == b"/%d" % number


@pytest.mark.parametrize("policy", POLICIES)
def test_a_worker_that_was_put_out_comes_back(
    start_worker: StartWorker, start_router: StartRouter, policy: str
) -> None:
    worker = start_worker()
    url = start_router(worker, policy=policy, eject_after=1, retrial_s=0.05).url
    for raw in (b"garbage\r\n\r\n", b""):
        worker.handler = answer(raw, close=True)
        with Client(url) as client:
            assert client.get().status == 502
        check_serves(worker, url)
