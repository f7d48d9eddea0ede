"""What a client sends is what the worker gets, and the other way round, byte for byte."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.reward.router.client import chunks, request
from tests.reward.router.conftest import Pair
from tests.reward.router.fakes import FakeWorker, answer, plain
from tests.reward.router.wire import Head

METHODS = (  # the registered ones, CONNECT aside, and PURGE
    b"GET HEAD POST PUT PATCH DELETE OPTIONS TRACE PURGE PROPFIND PROPPATCH REPORT MKCOL MKACTIVITY MKCALENDAR ACL "
    b"COPY MOVE LOCK UNLOCK SEARCH QUERY BIND REBIND UNBIND CHECKOUT MERGE LINK UNLINK M-SEARCH NOTIFY SUBSCRIBE"
).split()

BINARY = bytes(range(256)) * 16

# name -> header lines, as a client or a worker may send them
FIELDS: dict[str, list[bytes]] = {
    "own case": [b"x-lower: 1", b"X-UPPER: 2", b"X-miXed: 3", b"USER-agent: me"],
    "duplicates in order": [b"X-A: 1", b"X-B: 2", b"X-A: 3", b"x-a: 4", b"X-B: 5", b"X-A: 1"],
    "cookies": [
        b"Cookie: a=1; b=2",
        b"Cookie: c=3",
        b"Set-Cookie: a=1; Path=/",
        b"Set-Cookie: b=2; Expires=Thu, 1 Jan",
    ],
    "obs-text": [b"X-Latin: caf\xe9", b"X-Utf8: \xe2\x82\xac", b"X-All: " + bytes(range(0x80, 0x100))],
    "empty values": [b"X-Empty:", b"X-Spaces:   ", b"X-Tab:\t", b"X-Last: 1"],
    "space around values": [b"X-None:1", b"X-Many:    1   ", b"X-Tabs:\t1\t", b"X-Inner: a  b\tc"],
    "all printable": [b"X-Print: " + bytes(range(0x21, 0x7F)), b"!#$%&'*+-.^_`|~09AZaz: 1"],
    "long value": [b"X-Long: " + b"v" * 8192],
    "long name": [b"X-" + b"n" * 2000 + b": 1"],
    "60 KB": [b"X-%03d: %s" % (number, b"v" * 600) for number in range(98)],
    "many": [b"X-%d: %d" % (number, number) for number in range(240)],
    "underscores": [b"Transfer_Encoding: chunked", b"Content_Length: 999", b"Host_: elsewhere", b"Content-Length-: 5"],
    "look-alikes": [b"X-Transfer-Encoding: chunked", b"Content-Lengthy: 7", b"X: Content-Length: 5", b"TE: trailers"],
    "proxies' own": [b"Via: 1.1 other", b"Forwarded: for=1.2.3.4", b"X-Forwarded-For: 1.2.3.4", b"X-Request-Id: 7"],
    "coded": [b"Accept-Encoding: gzip, br;q=0.5, *;q=0", b"Content-Encoding: gzip", b"Content-Type: text/plain"],
    "ranges and dates": [b"Range: bytes=0-", b'If-None-Match: "x", W/"y"', b"Date: Sat, 01 Jan 2000 00:00:00 GMT"],
    "credentials": [b"Authorization: Bearer a.b.c==", b"Proxy-Authorization: Basic eDp5", b"WWW-Authenticate: Basic"],
}

TARGETS: dict[str, bytes] = {
    "root": b"/",
    "query": b"/p?a=1&b=2&a=3",
    "empty query": b"/p?",
    "only question marks": b"/???",
    "odd characters": b"/p?q=a|b{c}[d]^e`f\"g'h<i>j\\k,l;m@n:o!p$q(r)*s+t~u",
    "percent-encodings": b"/%7euser/%2F/%2f/%41/%zz/%",
    "dots": b"/a/./b/../c//d/.../..",
    "double slash": b"//elsewhere.test/path",
    "colon": b"/v1:generate",
    "semicolons": b"/a;b=c;d/e",
    "plus and encoded space": b"/a+b%20c",
    "encoded control bytes": b"/a%00b%0d%0aX-Smuggled:%201",
    "long": b"/" + b"long/" * 1600,
    "long query": b"/p?" + b"k=v&" * 2000,
    "absolute": b"http://worker.test/path?x=1",
    "absolute without a path": b"http://worker.test",
    "absolute elsewhere": b"http://elsewhere.test:8080/path",
    "absolute with upper case": b"HTTP://WORKER.test/Path",
}

RETRIED = [500, 502, 503, 504]
STATUSES = sorted(
    {*range(200, 209), *range(300, 309), *range(400, 432), *range(501, 512), 226, 299, 399, 451, 499, 599}
)
STATUSES = [status for status in STATUSES if status not in {204, 304, *RETRIED}]

REASONS: dict[str, bytes] = {
    "empty": b"200 ",
    "words": b"200 Everything is fine, thank you",
    "obs-text": b"200 tr\xe8s bien",
    "tab": b"200 very\tfine",
    "misleading": b"200 404 Not Found",
    "long": b"200 " + b"x" * 4000,
}

BODIES: dict[str, bytes] = {
    "one byte": b"x",
    "text": b"hello",
    "line ends": b"\r\n\r\n\n\r0\r\n\r\n",
    "binary": BINARY,
    "looks like a request": request(b"GET", b"/smuggled"),
    "looks like chunks": chunks(b"hello"),
    "64 KB and one": random.Random(1).randbytes(65537),
    "1 MB": random.Random(2).randbytes(1 << 20),
}


def check_request(pair: Pair, raw: bytes) -> None:
    """Send a request, and another after it; both arrive as they were sent and both are answered."""
    head, _, body = raw.partition(b"\r\n\r\n")
    expected = Head(head + b"\r\n\r\n").end_to_end() + body
    with pair.client() as client:
        assert client.ask(raw).status == 200
        assert client.is_kept()
    arrived = [seen.head.end_to_end() + seen.body for seen in pair.worker.requests]
    assert arrived == [expected, request(target=b"/kept")]


def check_response(pair: Pair, raw: bytes, asked: bytes = request(target=b"/asked")) -> None:
    """Have the worker send a response to `asked`; it comes as it was sent and the connection serves on."""
    head, _, body = raw.partition(b"\r\n\r\n")
    expected = Head(head + b"\r\n\r\n").end_to_end() + body
    pair.worker.handler = answer(raw)
    with pair.client() as client:
        assert client.ask(asked).end_to_end() == expected
        pair.worker.handler = answer(plain(b"/kept"))
        assert client.is_kept()


@pytest.mark.parametrize("method", METHODS, ids=bytes.decode)
def test_any_method_passes(pair: Pair, method: bytes) -> None:
    check_request(pair, request(method, b"/method"))


@pytest.mark.parametrize("method", METHODS, ids=bytes.decode)
def test_any_method_passes_with_a_body(pair: Pair, method: bytes) -> None:
    check_request(pair, request(method, b"/method", body=b"a body"))


def test_connect_is_not_for_a_router_of_requests(pair: Pair) -> None:
    with pair.client() as client:
        client.send(b"CONNECT worker.test:443 HTTP/1.1\r\nHost: worker.test:443\r\n\r\n")
        assert client.response(b"CONNECT").status == 501
        assert client.is_closed()
    assert pair.worker.received() == {}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
def test_targets_are_not_normalised(pair: Pair, target: bytes) -> None:
    check_request(pair, request(b"GET", target))


@pytest.mark.parametrize("space", [b" ", b"\t", b" \t "], ids=["space", "tab", "both"])
def test_space_after_the_values_that_the_router_reads_in_a_response(pair: Pair, space: bytes) -> None:
    check_response(pair, b"HTTP/1.1 200 OK\r\nContent-Length: 5" + space + b"\r\n\r\nhello")
    check_response(pair, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked" + space + b"\r\n\r\n" + chunks(b"hello"))


def test_options_asterisk(pair: Pair) -> None:
    check_request(pair, request(b"OPTIONS", b"*"))


@pytest.mark.parametrize("host", [b"worker.test", b"WORKER.Test:8080", b"127.0.0.1", b"[::1]:80", b"a_b.test", b"x:"])
def test_host_is_passed_on_unchanged(pair: Pair, host: bytes) -> None:
    check_request(pair, b"GET / HTTP/1.1\r\nX-Before: 1\r\nhost:  " + host + b"\r\nX-After: 1\r\n\r\n")


@pytest.mark.parametrize("space", [b" ", b"\t", b" \t "], ids=["space", "tab", "both"])
def test_space_after_the_values_that_the_router_reads(pair: Pair, space: bytes) -> None:
    start = b"POST / HTTP/1.1\r\nHost: worker.test" + space + b"\r\n"
    check_request(pair, start + b"Connection: X-Hop" + space + b"\r\nX-Hop: 1\r\n\r\n")
    pair.worker.forget()
    check_request(pair, start + b"Content-Length: 5" + space + b"\r\n\r\nhello")
    if b"\t" not in space:  # a tab behind "chunked" is refused: some servers would not take it for chunked
        pair.worker.forget()
        check_request(pair, start + b"Transfer-Encoding: chunked" + space + b"\r\n\r\n" + chunks(b"hello"))


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS.keys())
def test_request_fields(pair: Pair, fields: list[bytes]) -> None:
    check_request(pair, request(b"POST", b"/fields", fields, b"with a body"))


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS.keys())
def test_response_fields(pair: Pair, fields: list[bytes]) -> None:
    check_response(pair, plain(b"with a body", fields=fields))


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_request_bodies(pair: Pair, framing: str, body: bytes) -> None:
    if framing == "length":
        check_request(pair, request(b"POST", b"/body", [b"Content-Length: %d" % len(body)], body))
    else:
        middle = len(body) // 2 or 1
        framed = chunks(*filter(None, [body[:middle], body[middle:]]))
        check_request(pair, request(b"POST", b"/body", [b"Transfer-Encoding: chunked"], framed))


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_response_bodies(pair: Pair, framing: str, body: bytes) -> None:
    if framing == "length":
        check_response(pair, plain(body))
    else:
        middle = len(body) // 2 or 1
        framed = chunks(*filter(None, [body[:middle], body[middle:]]))
        check_response(pair, b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n" + framed)


CHUNKED: dict[str, bytes] = {
    "empty": b"0\r\n\r\n",
    "many zeros": b"000005\r\nhello\r\n000\r\n\r\n",
    "upper and lower case": b"A\r\n0123456789\r\na\r\n0123456789\r\n0\r\n\r\n",
    "extensions": b'5;name=value;flag;quoted="a;b"\r\nhello\r\n0;last=1\r\n\r\n',
    "one byte chunks": b"".join(b"1\r\n%c\r\n" % byte for byte in b"hello") + b"0\r\n\r\n",
    "data like chunks": b"7\r\n0\r\n\r\n\r\n\r\n0\r\n\r\n",
    "trailers": b"5\r\nhello\r\n0\r\nX-Sum: 1\r\nx-sum:2\r\nX-Empty:\r\n\r\n",
    "extensions and trailers": b"5;a=b\r\nhello\r\n0;c\r\nX-Sum: caf\xe9\r\n\r\n",
}


@pytest.mark.parametrize("body", CHUNKED.values(), ids=CHUNKED.keys())
def test_chunked_requests_pass_raw(pair: Pair, body: bytes) -> None:
    check_request(pair, request(b"PUT", b"/chunked", [b"Trailer: X-Sum", b"Transfer-Encoding: chunked"], body))


@pytest.mark.parametrize("body", CHUNKED.values(), ids=CHUNKED.keys())
def test_chunked_responses_pass_raw(pair: Pair, body: bytes) -> None:
    check_response(pair, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n" + body)


@pytest.mark.parametrize("method", [b"GET", b"POST", b"PUT", b"DELETE"], ids=bytes.decode)
def test_a_length_of_zero_is_kept(pair: Pair, method: bytes) -> None:
    check_request(pair, request(method, b"/", [b"Content-Length: 0"]))


@pytest.mark.parametrize("status", STATUSES)
def test_any_status_passes(pair: Pair, status: int) -> None:
    check_response(pair, plain(b"as it is", b"%d As It Is" % status, [b"Location: /elsewhere", b"Retry-After: 0"]))


@pytest.mark.parametrize("status", RETRIED)
def test_an_only_worker_has_its_failures_handed_on(
    start_worker: Callable[..., FakeWorker], start_router: Callable[..., Any], status: int
) -> None:
    worker = start_worker()
    check_response(Pair(worker, start_router(worker).url), plain(b"as it is", b"%d As It Is" % status, [b"X: 1"]))


@pytest.mark.parametrize("line", REASONS.values(), ids=REASONS.keys())
def test_reasons_pass(pair: Pair, line: bytes) -> None:
    check_response(pair, plain(b"body", line))


WITHOUT_BODY: dict[str, bytes] = {
    "204": b"HTTP/1.1 204 No Content\r\nX: 1\r\n\r\n",
    "304": b'HTTP/1.1 304 Not Modified\r\nETag: "x"\r\n\r\n',
    "304 with the length it would have": b"HTTP/1.1 304 Not Modified\r\nContent-Length: 1234\r\n\r\n",
    "304 with the coding it would have": b"HTTP/1.1 304 Not Modified\r\nTransfer-Encoding: chunked\r\n\r\n",
    "200 of length 0": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("raw", WITHOUT_BODY.values(), ids=WITHOUT_BODY.keys())
@pytest.mark.parametrize("method", [b"GET", b"POST", b"HEAD"], ids=bytes.decode)
def test_responses_without_a_body(pair: Pair, method: bytes, raw: bytes) -> None:
    check_response(pair, raw, request(method, b"/empty"))


HEADS: dict[str, bytes] = {
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n",
    "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    "unframed": b"HTTP/1.1 200 OK\r\nX: 1\r\n\r\n",
    "an error": b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\n",
}


@pytest.mark.parametrize("raw", HEADS.values(), ids=HEADS.keys())
def test_head_has_a_length_but_no_body(pair: Pair, raw: bytes) -> None:
    check_response(pair, raw, request(b"HEAD", b"/head"))


HOP_BY_HOP: dict[str, list[bytes]] = {
    "keep-alive": [b"Connection: keep-alive", b"Keep-Alive: timeout=5, max=100"],
    "proxy-connection": [b"Proxy-Connection: keep-alive"],
    "named": [b"Connection: keep-alive, X-Hop,x-other", b"X-Hop: 1", b"X-OTHER: 2", b"X-Hop: 3", b"X-Stays: 4"],
    "named later": [b"X-Hop: 1", b"X-Stays: 4", b"connection: X-Hop"],
    "named in two lines": [b"Connection: X-Hop", b"X-Hop: 1", b"X-Other: 2", b"CONNECTION:X-Other"],
    "upgrade": [b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQAAP__"],
    "upgrade alone": [b"Upgrade: websocket"],
    "odd lists": [b"Connection: ,, X-Hop ,\t,", b"X-Hop: 1"],
}


DROPPED = {b"keep-alive", b"proxy-connection", b"upgrade", b"x-hop", b"x-other", b"http2-settings"}


@pytest.mark.parametrize("fields", HOP_BY_HOP.values(), ids=HOP_BY_HOP.keys())
def test_fields_of_one_connection_stop_at_the_router(pair: Pair, fields: list[bytes]) -> None:
    check_request(pair, request(b"POST", b"/hops", [*fields, b"X-End: 1"], b"body"))
    seen = pair.worker.requests[0].head
    assert not {name.lower() for name, _ in seen.fields} & DROPPED
    assert not seen.tokens(b"connection") - {b"keep-alive"}


@pytest.mark.parametrize("fields", HOP_BY_HOP.values(), ids=HOP_BY_HOP.keys())
def test_fields_of_the_workers_connection_stop_too(pair: Pair, fields: list[bytes]) -> None:
    raw = plain(b"body", fields=[*fields, b"X-End: 1"])
    check_response(pair, raw)
    pair.worker.handler = answer(raw)
    with pair.client() as client:
        seen = client.get().head
    assert not {name.lower() for name, _ in seen.fields} & DROPPED
    assert not seen.tokens(b"connection") - {b"keep-alive"}
