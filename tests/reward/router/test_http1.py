from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.reward.router.http1 import (
    CHUNKED,
    DEFAULT_PRIORITY,
    EMPTY,
    END,
    MAX_CACHED_BYTES,
    MAX_HEADERS,
    NUM_CACHED,
    UNTIL_CLOSE,
    BadMessage,
    Body,
    Framing,
    HeadCache,
    RequestHead,
    RequestParser,
    ResponseHead,
    error_response,
    parse_response,
    response,
    with_close,
)

SPECIAL = {
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "proxy-connection",
    "transfer-encoding",
    "upgrade",
    "x-practicum-cost",
    "x-practicum-priority",
}
TOKEN = "!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
VALUE_BYTES = bytes([9, *range(0x20, 0x7F), *range(0x80, 0x100)])

methods = st.sampled_from([b"GET", b"POST", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"PATCH", b"M-SEARCH"])
targets = st.text("/abcXYZ019-._~%!$&'()*+,;=:@?", max_size=30).map(lambda text: b"/" + text.encode())
names = st.text(TOKEN, min_size=1, max_size=20).filter(lambda name: name.lower() not in SPECIAL).map(str.encode)
values = st.lists(st.sampled_from(VALUE_BYTES), max_size=30).map(bytes)
header_lists = st.lists(st.tuples(names, st.sampled_from([b"", b" ", b" \t "]), values), max_size=8)
reasons = st.sampled_from([b"", b" ", b" OK", b" It's fine \x80\xff"])


def lines_of(headers: list[tuple[bytes, bytes, bytes]]) -> list[bytes]:
    return [name + b":" + space + value for name, space, value in headers]


def head_of(*lines: bytes) -> bytes:
    return b"\r\n".join([*lines, b"", b""])


def read(*headers: bytes, line: bytes = b"POST /grade HTTP/1.1", host: bool = True) -> RequestHead:
    return RequestParser("X-Session")(head_of(line, *([b"Host: a"] if host else []), *headers))


def respond(*headers: bytes, line: bytes = b"HTTP/1.1 200 OK") -> ResponseHead:
    return parse_response(head_of(line, *headers))


def refusal(*headers: bytes, line: bytes = b"POST /grade HTTP/1.1", host: bool = True) -> BadMessage:
    with pytest.raises(BadMessage) as caught:
        read(*headers, line=line, host=host)
    return caught.value


# What is passed on


@given(methods, targets, header_lists)
def test_a_valid_request_head_passes_byte_for_byte(
    method: bytes, target: bytes, headers: list[tuple[bytes, bytes, bytes]]
) -> None:
    raw = head_of(method + b" " + target + b" HTTP/1.1", b"hOsT: a.b:8000", *lines_of(headers))
    head = RequestParser("x-session")(raw)
    assert head.raw == raw
    assert (head.size, head.method, head.target) == (len(raw), method, target)
    assert (head.framing, head.keep_alive, head.cost, head.priority) == (EMPTY, True, None, DEFAULT_PRIORITY)


@given(st.integers(200, 599), reasons, header_lists)
def test_a_valid_response_head_passes_byte_for_byte(
    status: int, reason: bytes, headers: list[tuple[bytes, bytes, bytes]]
) -> None:
    raw = head_of(b"HTTP/1.1 %d" % status + reason, *lines_of(headers))
    head = parse_response(raw)
    assert head.raw == raw
    assert (head.size, head.status, head.http_1_0) == (len(raw), status, False)


@given(header_lists, st.data())
def test_what_concerns_one_connection_goes_and_the_other_lines_keep_their_bytes(
    headers: list[tuple[bytes, bytes, bytes]], data: st.DataObject
) -> None:
    kept = [b"Host: a", *lines_of(headers)]
    lines = list(kept)
    for gone in (
        b"Connection: x-mine,  X-Other",
        b"KEEP-ALIVE: timeout=5",
        b"x-MINE: 1",
        b"Proxy-Connection:",
        b"x-other:2",
    ):
        lines.insert(data.draw(st.integers(0, len(lines))), gone)
    named = {b"x-mine", b"x-other"}
    kept = [line for line in kept if line.partition(b":")[0].lower() not in named]
    raw = head_of(b"GET / HTTP/1.1", *lines)
    head = RequestParser("x-session")(raw)
    assert head.raw == head_of(b"GET / HTTP/1.1", *kept)
    assert head.size == len(raw)
    lines.remove(b"Host: a")
    kept.remove(b"Host: a")
    assert respond(*lines).raw == head_of(b"HTTP/1.1 200 OK", *kept)


@pytest.mark.parametrize(
    "line", [b"Host: a", b"Content-Length: 5", b"Content-Type: text/plain", b"Authorization: Bearer x"]
)
def test_what_gives_the_message_its_meaning_stays_even_if_named_in_connection(line: bytes) -> None:
    name = line.partition(b":")[0]
    raw = RequestParser("x-session")(
        head_of(b"POST / HTTP/1.1", *dict.fromkeys([b"Host: a", line]), b"Connection: " + name)
    ).raw
    assert b"\r\n" + line + b"\r\n" in raw
    assert b"onnection" not in raw


def test_chunked_stays_chunked_even_if_named_in_connection() -> None:
    head = read(b"Connection: Transfer-Encoding", b"Transfer-Encoding: chunked")
    assert head.framing == CHUNKED
    assert head.raw == head_of(b"POST /grade HTTP/1.1", b"Host: a", b"Transfer-Encoding: chunked")


def test_the_protocol_is_not_changed_through_the_router() -> None:
    head = read(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAM", b"Content-Length: 3")
    assert head.raw == head_of(b"POST /grade HTTP/1.1", b"Host: a", b"Content-Length: 3")
    assert head.framing == Framing("length", 3) and head.keep_alive
    with pytest.raises(BadMessage, match="switched protocols"):
        respond(b"Connection: upgrade", b"Upgrade: h2c", line=b"HTTP/1.1 101 Switching Protocols")


def test_a_head_can_tell_its_reader_that_the_connection_ends() -> None:
    head = respond(b"Content-Length: 3")
    closing = parse_response(with_close(head.raw))
    assert (closing.raw, closing.framing, closing.keep_alive) == (head.raw, head.framing, False)


# Where the body of a request ends


@pytest.mark.parametrize(
    ("headers", "framing"),
    [
        ([], EMPTY),
        ([b"Content-Length: 0"], EMPTY),
        ([b"content-length:12"], Framing("length", 12)),
        ([b"Content-Length: 012"], Framing("length", 12)),
        ([b"Content-Length:\t12 \t"], Framing("length", 12)),
        ([b"Content-Length: 999999999999999999"], Framing("length", 10**18 - 1)),
        ([b"Transfer-Encoding: chunked"], CHUNKED),
        ([b"TRANSFER-ENCODING: CHUNKED"], CHUNKED),
        ([b"Transfer-Encoding: chunked "], CHUNKED),
    ],
)
def test_the_framing_of_a_request(headers: list[bytes], framing: Framing) -> None:
    assert read(*headers).framing == framing


@pytest.mark.parametrize(
    "headers",
    [
        [b"Content-Length: 5", b"Content-Length: 5"],
        [b"Content-Length: 5, 5"],
        [b"Content-Length: +5"],
        [b"Content-Length: -5"],
        [b"Content-Length: 0x5"],
        [b"Content-Length: 5_0"],
        [b"Content-Length:"],
        [b"Content-Length: 9999999999999999999"],
        [b"Content-Length: 99999999999999999999999"],
        [b"Transfer-Encoding: chunked", b"Content-Length: 5"],
        [b"Content-Length: 5", b"Transfer-Encoding: chunked"],
        [b"Transfer-Encoding: gzip"],
        [b"Transfer-Encoding: gzip, chunked"],
        [b"Transfer-Encoding: chunked, identity"],
        [b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"],
        [b"Transfer-Encoding: xchunked"],
        [b"Transfer-Encoding:"],
    ],
)
def test_a_request_whose_end_is_in_doubt_is_refused(headers: list[bytes]) -> None:
    assert refusal(*headers).status == 400


def test_http_1_0_has_no_chunks_and_closes() -> None:
    line = b"POST /grade HTTP/1.0"
    head = read(b"Content-Length: 3", b"Connection: keep-alive", line=line, host=False)
    assert head.framing == Framing("length", 3) and not head.keep_alive
    assert head.raw == head_of(line, b"Content-Length: 3")
    assert refusal(b"Transfer-Encoding: chunked", line=line).status == 400


@pytest.mark.parametrize(
    ("headers", "keep_alive"),
    [
        ([], True),
        ([b"Connection: keep-alive"], True),
        ([b"Connection: close"], False),
        ([b"Connection: x, CLOSE"], False),
        ([b"Connection: x", b"Connection: close"], False),
    ],
)
def test_a_client_may_close(headers: list[bytes], keep_alive: bool) -> None:
    assert read(*headers).keep_alive is keep_alive


def test_expectations_and_credentials_are_seen_and_passed_on() -> None:
    head = read(b"Expect: 100-Continue", b"Authorization: Bearer secret")
    assert head.expects_continue and head.authorization == b"Bearer secret"
    assert b"Expect: 100-Continue\r\nAuthorization: Bearer secret\r\n" in head.raw
    plain = read()
    assert not plain.expects_continue and plain.authorization is None


# What a request asks of the router


def test_cost_priority_and_session_are_read_and_passed_on() -> None:
    headers = [b"X-Practicum-Cost: 12.5", b"x-practicum-priority: 9", b"x-session: abc"]
    head = read(*headers)
    assert (head.cost, head.priority, head.session) == (12.5, 9, b"abc")
    assert b"\r\n".join(headers) in head.raw
    plain = read()
    assert (plain.cost, plain.priority, plain.session) == (None, DEFAULT_PRIORITY, None)


def test_white_space_around_a_value_is_no_part_of_it() -> None:
    headers = [b"x-practicum-cost:  2.5 ", b"x-practicum-priority:\t7\t", b"x-session: a b  "]
    head = read(*headers)
    assert (head.cost, head.priority, head.session) == (2.5, 7, b"a b")
    assert b"\r\n".join(headers) in head.raw


@given(st.floats(1e-300, 1e11), st.integers(0, 9))
def test_any_cost_above_zero_and_each_priority(cost: float, priority: int) -> None:
    head = read(b"x-practicum-cost: %r" % cost, b"x-practicum-priority: %d" % priority)
    assert (head.cost, head.priority) == (cost, priority)


@pytest.mark.parametrize("value", [b"0", b"-1", b"nan", b"inf", b"1e400", b"many", b"", b"1,5"])
def test_a_cost_that_is_no_number_above_zero_is_refused(value: bytes) -> None:
    error = refusal(b"x-practicum-cost: " + value)
    assert error.status == 400 and "x-practicum-cost must be a number above 0" in error.reason


@pytest.mark.parametrize("value", [b"10", b"-1", b"1.5", b"high", b"", b"+1"])
def test_a_priority_out_of_range_is_refused(value: bytes) -> None:
    error = refusal(b"x-practicum-priority: " + value)
    assert error.status == 400 and "x-practicum-priority must be a whole number from 0 to 9" in error.reason


def test_a_priority_of_very_many_digits_is_refused_too() -> None:
    assert refusal(b"x-practicum-priority: " + b"1" * 5000).status == 400


# What is refused


@pytest.mark.parametrize("host", [b"a", b"a.b:80", b"[::1]:8000", b"", b"%41"])
def test_one_valid_host_is_taken(host: bytes) -> None:
    assert read(b"Host: " + host, host=False).raw.endswith(b"Host: " + host + b"\r\n\r\n")


def test_a_request_without_its_one_valid_host_is_refused() -> None:
    for headers in (
        [],
        [b"Host: a", b"Host: a"],
        [b"Host: a b"],
        [b"Host: a/b"],
        [b"Host: a@b"],
        [b"Host: a:b"],
        [b"Host: [::1"],
        [b"Host: a", b"host: b"],
    ):
        error = refusal(*headers, host=False)
        assert error.status == 400 and "one valid Host header" in error.reason
    assert read(line=b"GET / HTTP/1.0", host=False).target == b"/"
    assert refusal(b"Host: a", b"Host: a", line=b"GET / HTTP/1.0", host=False).status == 400


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET / HTTP/2.0", 505),
        (b"GET / HTTP/1.2", 505),
        (b"GET / HTTP/0.9", 505),
        (b"GET / HTTP/1.10", 505),
        (b"CONNECT a:80 HTTP/1.1", 501),
        (b"GET /", 400),
        (b"GET", 400),
        (b"", 400),
        (b"get / HTTP/1.1", 400),
        (b"NONSENSE / HTTP/1.1", 501),
        (b"GET  / HTTP/1.1", 400),
        (b"GET / HTTP/1.1 ", 400),
        (b" GET / HTTP/1.1", 400),
        (b"GET /a b HTTP/1.1", 400),
        (b"GET /\x80 HTTP/1.1", 400),
        (b"GET no-slash HTTP/1.1", 400),
        (b"GET / http/1.1", 400),
        (b"PRI * HTTP/1.1", 400),
        (b"HTTP/1.1 200 OK", 400),
    ],
)
def test_a_request_line_that_is_none_is_refused(line: bytes, status: int) -> None:
    assert refusal(line=line).status == status


@pytest.mark.parametrize("target", [b"*", b"http://b/c?d", b"/?a=1&b=%20", b'/<>"{}|^`#'])
def test_targets_of_any_form_are_passed_on(target: bytes) -> None:
    assert read(line=b"OPTIONS " + target + b" HTTP/1.1").target == target


@pytest.mark.parametrize(
    "line",
    [
        b"no colon",
        b": no name",
        b"space : before the colon",
        b" folded: line",
        b"\tfolded: line",
        b"a\x00b: c",
        b"a: \x00",
        b"a: \x01",
        b"a: \x7f",
        b"a\x80: b",
        b"a: b\nc: d",
        b"a: b\rc: d",
        b"a: b\r",
        b"(a): b",
    ],
)
def test_a_header_line_that_is_none_is_refused(line: bytes) -> None:
    assert refusal(line).status == 400
    with pytest.raises(BadMessage):
        respond(line)


@given(st.binary(min_size=1, max_size=40))
def test_random_bytes_are_a_head_or_refused_and_nothing_else(noise: bytes) -> None:
    raw = b"GET / HTTP/1.1\r\nHost: a\r\n" + noise.replace(b"\r\n\r\n", b"") + b"\r\n\r\n"
    try:
        head = RequestParser("x-session")(raw[: raw.index(b"\r\n\r\n") + 4])
    except BadMessage as error:
        assert error.status in (400, 431) and error.reason
    else:
        assert head.raw.startswith(b"GET / HTTP/1.1\r\nHost: a\r\n") and head.raw.endswith(b"\r\n\r\n")


def test_two_heads_at_once_are_not_taken_for_one() -> None:
    raw = head_of(b"GET / HTTP/1.1", b"Host: a")
    with pytest.raises(BadMessage, match="does not end where it should"):
        RequestParser("x-session")(raw + raw)
    with pytest.raises(BadMessage, match="does not end where it should"):
        RequestParser("x-session")(raw[:-2])


def test_only_so_many_headers() -> None:
    headers = [b"a%d: b" % index for index in range(MAX_HEADERS - 1)]
    assert read(*headers).raw.count(b"\r\n") == MAX_HEADERS + 2
    assert refusal(*headers, b"one: more").status == 431


# Answers of workers


@pytest.mark.parametrize(
    ("line", "headers", "framing"),
    [
        (b"HTTP/1.1 200 OK", [], UNTIL_CLOSE),
        (b"HTTP/1.0 200 OK", [], UNTIL_CLOSE),
        (b"HTTP/1.1 200", [b"Content-Length: 0"], EMPTY),
        (b"HTTP/1.1 200 OK", [b"Content-Length: 7"], Framing("length", 7)),
        (b"HTTP/1.0 200 OK", [b"Content-Length: 7"], Framing("length", 7)),
        (b"HTTP/1.1 500 Oh", [b"Transfer-Encoding: Chunked"], CHUNKED),
        (b"HTTP/1.1 204 No Content", [], EMPTY),
        (b"HTTP/1.1 304 Not Modified", [b"Content-Length: 7"], EMPTY),
        (b"HTTP/1.1 304 Not Modified", [b"Transfer-Encoding: chunked"], EMPTY),
        (b"HTTP/1.1 100 Continue", [], EMPTY),
        (b"HTTP/1.1 103 Early Hints", [b"Link: </a>"], EMPTY),
    ],
)
def test_the_framing_of_a_response(line: bytes, headers: list[bytes], framing: Framing) -> None:
    head = respond(*headers, line=line)
    assert head.framing == framing
    assert head.http_1_0 is line.startswith(b"HTTP/1.0")


@pytest.mark.parametrize(
    ("line", "headers"),
    [
        (b"HTTP/1.1 200 OK", [b"Content-Length: 5", b"Transfer-Encoding: chunked"]),
        (b"HTTP/1.1 200 OK", [b"Content-Length: 5", b"Content-Length: 5"]),
        (b"HTTP/1.1 200 OK", [b"Content-Length: five"]),
        (b"HTTP/1.1 200 OK", [b"Transfer-Encoding: gzip"]),
        (b"HTTP/1.1 200 OK", [b"Transfer-Encoding: gzip, chunked"]),
        (b"HTTP/1.0 200 OK", [b"Transfer-Encoding: chunked"]),
        (b"HTTP/2 200 OK", []),
        (b"HTTP/1.1 20 OK", []),
        (b"HTTP/1.1 2000 OK", []),
        (b"HTTP/1.1 099 OK", []),
        (b"HTTP/1.1 200OK", []),
        (b"HTTP/1.1  200 OK", []),
        (b"ICY 200 OK", []),
        (b"", []),
        (b"GET / HTTP/1.1", [b"Host: a"]),
    ],
)
def test_a_response_that_could_be_read_in_two_ways_is_refused(line: bytes, headers: list[bytes]) -> None:
    with pytest.raises(BadMessage):
        respond(*headers, line=line)


@pytest.mark.parametrize(
    ("line", "headers", "keep_alive"),
    [
        (b"HTTP/1.1 200 OK", [], True),
        (b"HTTP/1.1 200 OK", [b"Connection: close"], False),
        (b"HTTP/1.1 200 OK", [b"Connection: x, Close"], False),
        (b"HTTP/1.0 200 OK", [], False),
        (b"HTTP/1.0 200 OK", [b"Connection: Keep-Alive"], True),
    ],
)
def test_a_workers_connection_may_be_used_again(line: bytes, headers: list[bytes], keep_alive: bool) -> None:
    assert respond(b"Content-Length: 1", *headers, line=line).keep_alive is keep_alive


def test_the_size_of_a_whole_response_is_that_of_what_comes() -> None:
    for headers in ([], [b"Connection: close"], [b"Keep-Alive: timeout=5"]):
        head = respond(b"Content-Length: 7", *headers)
        assert head.whole_size == head.size + 7
    assert respond(line=b"HTTP/1.1 204 No Content").whole_size == len(b"HTTP/1.1 204 No Content\r\n\r\n")
    assert respond(b"Content-Length: 7", line=b"HTTP/1.1 500 Oh").whole_size is None
    assert respond(b"Content-Length: 7", line=b"HTTP/1.0 200 OK").whole_size is None
    assert respond(b"Transfer-Encoding: chunked").whole_size is None
    assert respond().whole_size is None
    assert respond(line=b"HTTP/1.1 100 Continue").whole_size is None


# Cached heads


def test_the_same_bytes_are_parsed_once() -> None:
    cached = HeadCache(RequestParser("x-session"))
    raw = head_of(b"GET / HTTP/1.1", b"Host: a")
    assert cached(raw) is cached(bytes(bytearray(raw)))
    assert cached(head_of(b"GET /other HTTP/1.1", b"Host: a")).target == b"/other"


def test_long_heads_are_not_cached() -> None:
    cached = HeadCache(RequestParser("x-session"))
    short = head_of(b"GET / HTTP/1.1", b"Host: a", b"x: ")
    longest = head_of(b"GET / HTTP/1.1", b"Host: a", b"x: " + b"y" * (MAX_CACHED_BYTES - len(short)))
    assert cached(longest) is cached(longest)
    longer = longest.replace(b"x: ", b"x: y")
    assert cached(longer) is not cached(longer)
    assert cached(longer).raw == longer


def test_only_so_many_heads_are_cached() -> None:
    cached = HeadCache(RequestParser("x-session"))
    raw = [head_of(b"GET /%d HTTP/1.1" % index, b"Host: a") for index in range(NUM_CACHED + 1)]
    first = cached(raw[0])
    for one in raw[1:]:
        assert cached(one).raw == one
    assert cached(raw[0]) is not first
    assert cached(raw[0]).target == b"/0"


def test_a_bad_head_is_refused_every_time() -> None:
    cached = HeadCache(parse_response)
    for _ in range(2):
        with pytest.raises(BadMessage):
            cached(b"HTTP/1.1 oops\r\n\r\n")


CHUNK_TOKEN = "abcdefghijklmnopqrstuvwxyzABCXYZ0189-_!#$%&'*+.^`|~"

tokens = st.text(CHUNK_TOKEN, min_size=1, max_size=8).map(str.encode)
# Chunks that look like the end of a body, or of a head, are what a careless reader trips over.
contents = st.one_of(
    st.binary(min_size=1, max_size=40),
    st.lists(st.sampled_from([b"\r", b"\n", b"\r\n", b"0", b"\r\n\r\n", b"0\r\n\r\n"]), min_size=1, max_size=8).map(
        b"".join
    ),
)
extensions = st.lists(
    st.one_of(
        tokens.map(lambda name: b";" + name),
        st.tuples(tokens, tokens).map(lambda pair: b";" + pair[0] + b"=" + pair[1]),
        st.tuples(tokens, tokens).map(lambda pair: b";" + pair[0] + b'="' + pair[1] + b' ;"'),
    ),
    max_size=2,
).map(b"".join)
trailers = st.lists(st.tuples(tokens, tokens).map(lambda pair: b"x-" + pair[0] + b": " + pair[1] + b"\r\n"), max_size=3)


@st.composite
def chunked_bodies(draw: st.DrawFn) -> bytes:
    def size(number: int) -> bytes:
        digits = b"%x" % number
        return b"0" * draw(st.integers(0, 3)) + (digits.upper() if draw(st.booleans()) else digits)

    chunks = [
        size(len(content)) + draw(extensions) + b"\r\n" + content + b"\r\n"
        for content in draw(st.lists(contents, max_size=5))
    ]
    return b"".join([*chunks, size(0) + draw(extensions) + b"\r\n", *draw(trailers), b"\r\n"])


@st.composite
def cut(draw: st.DrawFn, data: bytes) -> list[bytes]:
    places = sorted(draw(st.sets(st.integers(1, max(1, len(data) - 1)), max_size=12)))
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]


def end_of(body: Body, pieces: list[bytes]) -> int:
    """How many bytes the body takes of these until it is done."""
    num = 0
    for piece in pieces:
        taken = body.take(piece)
        num += taken
        if body.done:
            return num
        assert taken == len(piece), "a body that is not done takes all there is"
    raise AssertionError("the body did not end")


@given(st.data(), chunked_bodies(), st.binary(max_size=30))
def test_a_chunked_body_ends_exactly_where_it_does_however_it_is_cut(
    data: st.DataObject, chunked: bytes, other: bytes
) -> None:
    assert end_of(CHUNKED.body(), data.draw(cut(chunked + other))) == len(chunked)


@given(chunked_bodies(), chunked_bodies())
def test_one_chunked_body_right_behind_another(first: bytes, second: bytes) -> None:
    assert end_of(CHUNKED.body(), [first + second]) == len(first)


@given(chunked_bodies())
def test_a_chunked_body_byte_by_byte_is_not_done_before_its_end(chunked: bytes) -> None:
    body = CHUNKED.body()
    for index, byte in enumerate(chunked):
        assert not body.done, chunked[:index]
        assert body.take(bytes([byte])) == 1
    assert body.done


def test_a_large_chunk_in_many_pieces() -> None:
    chunked = b"100000\r\n" + b"\r\n\r\n" * (0x100000 // 4) + b"\r\n0\r\n\r\n"
    pieces = [chunked[start : start + 65536] for start in range(0, len(chunked), 65536)]
    assert end_of(CHUNKED.body(), [*pieces, b"more"]) == len(chunked)


@pytest.mark.parametrize(
    "chunks",
    [
        b"x\r\n",
        b"-1\r\n",
        b"+1\r\na\r\n",
        b"0x1\r\na\r\n",
        b"\r\n",
        b"1 \r\na\r\n",
        b" 1\r\na\r\n",
        b"1\na\r\n",
        b"1\r\na\n",
        b"1\r\nab\r\n",
        b"2\r\na\r\n0\r\n\r\n",
        b"1\r\na0\r\n\r\n",
        b"fffffffffffffffff\r\n",
        b"1;\x00\r\na\r\n",
        b"0\r\nno colon\r\n\r\n",
        b"0\r\nx : y\r\n\r\n",
        b"0\n\n",
    ],
)
@pytest.mark.parametrize("good", [b"", b"3\r\nabc\r\n"])
def test_chunks_in_doubt_are_refused(good: bytes, chunks: bytes) -> None:
    with pytest.raises(BadMessage, match="bad chunk"):
        end_of(CHUNKED.body(), [good + chunks])
    with pytest.raises(BadMessage, match="bad chunk"):
        end_of(CHUNKED.body(), [bytes([byte]) for byte in good + chunks])


@given(st.binary(max_size=60))
def test_random_bytes_are_chunks_or_refused_and_nothing_else(noise: bytes) -> None:
    body = CHUNKED.body()
    try:
        taken = body.take(noise)
    except BadMessage:
        return
    assert taken <= len(noise)
    assert body.done or taken == len(noise)


@given(st.data(), st.integers(0, 50), st.integers(0, 30))
def test_a_sized_body_takes_its_bytes_and_no_more(data: st.DataObject, length: int, num_more: int) -> None:
    body = Framing("length", length).body()
    assert body.done is (length == 0)
    sent = b"x" * (length + num_more)
    assert sum(body.take(piece) for piece in data.draw(cut(sent))) == length
    assert body.done


def test_a_body_of_nothing_is_done_at_once() -> None:
    assert Framing("length", 0) == EMPTY
    assert EMPTY.body().done
    assert EMPTY.body().take(b"GET") == 0


def test_a_body_that_ends_with_its_connection_takes_all_and_is_never_done() -> None:
    body = UNTIL_CLOSE.body()
    assert body.take(b"abc") == 3
    assert body.take(b"") == 0
    assert not body.done


def split(raw: bytes) -> tuple[bytes, bytes]:
    head, _, body = raw.partition(END)
    return head + END, body


def test_a_response_is_one_whole_message() -> None:
    head, body = split(response(200, b"fine", "text/plain", close=False))
    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and body == b"fine"
    read = parse_response(head)
    assert (read.status, read.framing.length, read.keep_alive) == (200, 4, True)
    assert b"\r\ncontent-type: text/plain\r\n" in head


def test_a_response_can_end_the_connection() -> None:
    head, _ = split(response(200, b"", "text/plain", close=True))
    assert not parse_response(head).keep_alive


def test_a_response_may_have_more_headers() -> None:
    head, body = split(response(405, b"no", "text/plain", close=False, extra=["allow: GET", "x-a: b"]))
    assert b"\r\nallow: GET\r\nx-a: b\r\n" in head and body == b"no"


@pytest.mark.parametrize("status", [400, 401, 404, 413, 429, 431, 501, 502, 503, 504, 505])
@pytest.mark.parametrize("close", [True, False])
def test_an_error_says_what_and_why(status: int, close: bool) -> None:
    reason = 'worker "http://a:1" said:\r\n\r\nnö'
    head, body = split(error_response(status, "worker_failed", reason, close=close))
    read = parse_response(head)
    assert (read.status, read.framing.length, read.keep_alive) == (status, len(body), not close)
    assert json.loads(body) == {"error": {"code": "worker_failed", "message": reason}}
    assert b"\r\ncontent-type: application/json\r\n" in head


@pytest.mark.parametrize(
    ("status", "header"),
    [(429, b"retry-after: 1"), (503, b"retry-after: 1"), (401, b'www-authenticate: Bearer realm="practicum router"')],
)
def test_an_error_says_what_can_be_done(status: int, header: bytes) -> None:
    assert b"\r\n" + header + b"\r\n" in error_response(status, "code", "reason", close=False)
    assert header not in error_response(502, "code", "reason", close=False)
