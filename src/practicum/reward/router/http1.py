"""HTTP/1.1 messages: heads are parsed once by httptools (llhttp, strict), cached, and forwarded as the bytes they were.

    raw head ──▶ cached? ──▶ RequestHead | ResponseHead ──▶ Framing ──▶ Body.take(data): bytes that still belong to it
                    └─ no ─▶ llhttp ─▶ framing ─▶ hop-by-hop headers removed

A head that two parsers could read differently is refused: what follows it might be a second, smuggled message. Clients
and workers repeat themselves, so the same bytes are rarely parsed twice. Bodies are only read to find their end.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Sequence, Set
from http import HTTPStatus
from typing import Generic, Literal, NamedTuple, TypeVar

import httptools

from practicum.secret import TOKEN_HEADER

END = b"\r\n\r\n"
MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 256
# Longer heads are not cached: a client that puts its data into headers would fill the memory with them.
MAX_CACHED_BYTES = 2048
NUM_CACHED = 4096

COST_HEADER = b"x-practicum-cost"
PRIORITY_HEADER = b"x-practicum-priority"
NUM_PRIORITIES = 10
DEFAULT_PRIORITY = 5

_REQUEST_LINE = re.compile(rb"[A-Z-]+ [!-~]+ HTTP/1\.[01]")
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] [1-9][0-9][0-9]( [\t -~\x80-\xff]*)?")
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._~%!$&'()*+,;=-]*)(:[0-9]*)?")
_NUMBER = re.compile(rb"[0-9]{1,20}(\.[0-9]{0,20})?([eE][+-]?[0-9]{1,3})?")
_TOKEN = TOKEN_HEADER.encode()
_HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"upgrade", _TOKEN})
# These stay even when a Connection header names them: without them the message would mean something else.
_NEEDED = frozenset({b"host", b"content-length", b"transfer-encoding", b"content-type", b"authorization", b"expect"})
_READ = _HOP_BY_HOP | {b"host", b"content-length", b"transfer-encoding", b"expect", b"authorization", b"origin"}
_READ |= {COST_HEADER, PRIORITY_HEADER}
_NO_TOKENS: Set[bytes] = frozenset()
_CHUNKED_HEAD = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


class BadMessage(Exception):
    """A message that is not forwarded. `status` is what the client gets, `reason` says why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(status, reason)
        self.status = status
        self.reason = reason


class SizedBody:
    """A body of a known length, or one that ends with its connection (`sys.maxsize`)."""

    __slots__ = ("_left",)

    def __init__(self, length: int) -> None:
        self._left = length

    @property
    def done(self) -> bool:
        return self._left == 0

    def take(self, data: bytes) -> int:
        """Return how many of these bytes still belong to the body."""
        taken = min(self._left, len(data))
        self._left -= taken
        return taken


class ChunkedBody:
    """A chunked body. llhttp reads its chunks, extensions and trailers, but does not say where in the data the body
    ended. So it is fed up to each place where a body could end: strictly parsed, only right behind an empty line."""

    class _End:
        seen = False

        def on_message_complete(self) -> None:
            self.seen = True

    __slots__ = ("_end", "_parser")

    def __init__(self) -> None:
        self._end = self._End()
        self._parser = httptools.HttpRequestParser(self._end)
        self._parser.feed_data(_CHUNKED_HEAD)

    @property
    def done(self) -> bool:
        return self._end.seen

    def take(self, data: bytes) -> int:
        """Return how many of these bytes still belong to the body."""
        start = 0
        for end in (1, 2, 3):  # an empty line may have begun in the data before
            self._feed(data[start:end])
            start = end
            if self.done:
                return min(end, len(data))
        while start < len(data):
            found = data.find(END, start - 3)
            end = len(data) if found < 0 else max(found + len(END), start + 1)
            self._feed(data[start:end])
            start = end
            if self.done:
                break
        return min(start, len(data))

    def _feed(self, data: bytes) -> None:
        try:
            if data:
                self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise BadMessage(400, f"bad chunk: {error}") from None


Body = SizedBody | ChunkedBody


# Heads and framings are tuples: they are made for each new head, in half the time a frozen dataclass takes.
class Framing(NamedTuple):
    """How a message says where its body ends."""

    kind: Literal["length", "chunked", "until_close"]
    length: int = 0  # of kind "length"

    def body(self) -> Body:
        if self.kind == "chunked":
            return ChunkedBody()
        return SizedBody(self.length if self.kind == "length" else sys.maxsize)


EMPTY = Framing("length", 0)
CHUNKED = Framing("chunked")
UNTIL_CLOSE = Framing("until_close")


class RequestHead(NamedTuple):
    raw: bytes  # as it is forwarded
    size: int  # bytes as it came
    method: bytes
    target: bytes
    framing: Framing
    keep_alive: bool
    expects_continue: bool
    authorization: bytes | None
    token: bytes | None  # for this router, not for the worker
    priority: int
    cost: float | None
    session: bytes | None
    host: bytes | None
    origin: bytes | None  # the page that sent it, if one did
    http_1_0: bool


class ResponseHead(NamedTuple):
    raw: bytes
    size: int
    status: int
    framing: Framing  # of a response to anything but HEAD
    keep_alive: bool  # can the worker's connection be used again?
    http_1_0: bool
    whole_size: int | None  # bytes of the whole response, if it may be forwarded at once when it has come as one piece


class _Fields:
    """The few headers that matter here, collected in the callbacks of httptools."""

    __slots__ = ("_names", "_values", "complete", "num_bodies", "num_headers", "num_messages", "target")

    def __init__(self, names: Set[bytes] = _READ) -> None:
        self._names = names
        self._values: dict[bytes, list[bytes]] = {}
        self.target = b""
        self.num_headers = self.num_messages = self.num_bodies = 0
        self.complete = False

    def on_message_begin(self) -> None:
        self.num_messages += 1

    def on_url(self, target: bytes) -> None:
        self.target += target

    def on_header(self, name: bytes, value: bytes) -> None:
        self.num_headers += 1
        name = name.lower()
        if name in self._names:
            self._values.setdefault(name, []).append(value.strip(b" \t"))

    def on_headers_complete(self) -> None:
        self.complete = True

    def on_body(self, body: bytes) -> None:
        self.num_bodies += 1

    def values(self, name: bytes) -> Sequence[bytes]:
        return self._values.get(name, ())

    def first(self, name: bytes) -> bytes | None:
        values = self._values.get(name)
        return values[0] if values else None

    def tokens(self, name: bytes) -> Set[bytes]:
        values = self._values.get(name)
        if values is None:
            return _NO_TOKENS
        return {token.strip().lower() for value in values for token in value.split(b",") if token.strip()}

    def has_any(self, names: Set[bytes]) -> bool:
        return not self._values.keys().isdisjoint(names)


Head = TypeVar("Head", RequestHead, ResponseHead)


class HeadCache(Generic[Head]):
    """Parsed heads by their bytes. Raises `BadMessage` for a head that is refused."""

    def __init__(self, parse: Callable[[bytes], Head]) -> None:
        self._parse: Callable[[bytes], Head] = parse
        self._heads: dict[bytes, Head] = {}

    def __call__(self, raw: bytes) -> Head:
        head = self._heads.get(raw)
        if head is None:
            head = self._parse(raw)
            if len(raw) <= MAX_CACHED_BYTES:
                if len(self._heads) >= NUM_CACHED:
                    self._heads.clear()
                self._heads[raw] = head
        return head


class RequestParser:
    """Parses the head of a client's request."""

    def __init__(self, session_header: str) -> None:
        self._session_header = session_header.lower().encode()
        self._names = _READ | {self._session_header}

    def __call__(self, raw: bytes) -> RequestHead:
        line = _first_line(raw)
        if not _REQUEST_LINE.fullmatch(line):
            versions = re.search(rb"HTTP/([0-9]+\.[0-9]+)$", line)
            if versions and versions[1] not in (b"1.0", b"1.1"):
                raise BadMessage(505, "only HTTP/1.0 and HTTP/1.1 are spoken here")
            raise BadMessage(400, "the request line is not METHOD TARGET VERSION")
        if line.startswith(b"CONNECT "):
            raise BadMessage(501, "CONNECT is not supported")
        fields = _Fields(self._names)
        parser = httptools.HttpRequestParser(fields)
        _parse(parser, fields, raw)
        version = parser.get_http_version()
        _check_host(fields, version)
        framing = Framing("length", _length(fields)) if fields.values(b"content-length") else EMPTY
        if codings := fields.values(b"transfer-encoding"):
            if version == "1.0" or len(codings) > 1 or codings[0].lower() != b"chunked":
                raise BadMessage(400, "Transfer-Encoding must be chunked, once, in HTTP/1.1")
            framing = CHUNKED
        return RequestHead(
            raw=_without_hop_by_hop(raw, fields),
            size=len(raw),
            method=parser.get_method(),
            target=fields.target,
            framing=framing,
            keep_alive=version == "1.1" and b"close" not in fields.tokens(b"connection"),
            expects_continue=b"100-continue" in fields.tokens(b"expect"),
            authorization=fields.first(b"authorization"),
            token=fields.first(_TOKEN),
            priority=_priority(fields),
            cost=_cost(fields),
            session=fields.first(self._session_header),
            host=fields.first(b"host"),
            origin=fields.first(b"origin"),
            http_1_0=version == "1.0",
        )


def parse_response(raw: bytes) -> ResponseHead:
    """Parse the head of a worker's response."""
    if not _STATUS_LINE.fullmatch(_first_line(raw)):
        raise BadMessage(502, "the status line is not VERSION STATUS REASON")
    fields = _Fields()
    parser = httptools.HttpResponseParser(fields)
    _parse(parser, fields, raw)
    status = parser.get_status_code()
    version = parser.get_http_version()
    codings, lengths = fields.values(b"transfer-encoding"), fields.values(b"content-length")
    if codings and (lengths or version == "1.0" or len(codings) > 1 or codings[0].lower() != b"chunked"):
        raise BadMessage(502, "Transfer-Encoding must be chunked, once, in HTTP/1.1, without Content-Length")
    framing = UNTIL_CLOSE
    if status < 200 or status in (204, 304):
        framing = EMPTY
    elif codings:
        framing = CHUNKED
    elif lengths:
        framing = Framing("length", _length(fields))
    if status == 101:
        raise BadMessage(502, "the worker switched protocols, which nobody asked for")
    connection = fields.tokens(b"connection")
    keep_alive = b"close" not in connection and (version == "1.1" or b"keep-alive" in connection)
    simple = version == "1.1" and framing.kind == "length" and 200 <= status < 500
    return ResponseHead(
        raw=_without_hop_by_hop(raw, fields),
        size=len(raw),
        whole_size=len(raw) + framing.length if simple else None,
        status=status,
        framing=framing,
        keep_alive=keep_alive,
        http_1_0=version == "1.0",
    )


def with_close(raw: bytes) -> bytes:
    """Return the same head, saying that the connection will be closed."""
    return raw[:-2] + b"connection: close\r\n\r\n"


def _first_line(raw: bytes) -> bytes:
    return raw[: raw.index(b"\r\n")]


def _parse(parser: httptools.HttpRequestParser | httptools.HttpResponseParser, fields: _Fields, raw: bytes) -> None:
    """Let llhttp read the head, and check that it found the end where we did."""
    num_lines = raw.count(b"\r\n")
    if raw.count(b"\n") != num_lines or raw.count(b"\r") != num_lines:
        raise BadMessage(400, "a line must end with CR LF")
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass  # the header is removed below: the connection stays HTTP
    except httptools.HttpParserInvalidMethodError:
        raise BadMessage(501, "the method is not known here") from None
    except httptools.HttpParserError as error:
        raise BadMessage(400, f"not HTTP/1.1: {error}") from None
    if not fields.complete or fields.num_messages != 1 or fields.num_bodies:
        raise BadMessage(400, "the head does not end where it should")
    if fields.num_headers > MAX_HEADERS:
        raise BadMessage(431, f"more than {MAX_HEADERS} headers")


def _check_host(fields: _Fields, version: str) -> None:
    hosts = fields.values(b"host")
    if len(hosts) > 1 or (not hosts and version == "1.1") or (hosts and not _HOST.fullmatch(hosts[0])):
        raise BadMessage(400, "an HTTP/1.1 request has one valid Host header")


def _length(fields: _Fields) -> int:
    lengths = fields.values(b"content-length")
    if len(lengths) != 1 or not lengths[0].isdigit() or len(lengths[0]) > 18:
        raise BadMessage(400, "Content-Length must be one decimal number")
    return int(lengths[0])


def _priority(fields: _Fields) -> int:
    for value in fields.values(PRIORITY_HEADER):
        if len(value) == 1 and value.isdigit():
            return int(value)
        name = PRIORITY_HEADER.decode()
        raise BadMessage(400, f"{name} must be a whole number from 0 to {NUM_PRIORITIES - 1}, the most urgent")
    return DEFAULT_PRIORITY


def _cost(fields: _Fields) -> float | None:
    for value in fields.values(COST_HEADER):
        if _NUMBER.fullmatch(value) and 0.0 < (cost := float(value)) < math.inf:
            return cost
        raise BadMessage(400, f"{COST_HEADER.decode()} must be a number above 0")
    return None


def _without_hop_by_hop(raw: bytes, fields: _Fields) -> bytes:
    """Return the head without the headers that concern one connection only. The other lines keep their bytes."""
    if not fields.has_any(_HOP_BY_HOP):
        return raw
    dropped = _HOP_BY_HOP | (fields.tokens(b"connection") - _NEEDED)
    first, *lines = raw[: -len(END)].split(b"\r\n")
    kept = [line for line in lines if line.partition(b":")[0].lower() not in dropped]
    return b"\r\n".join([first, *kept]) + END


def response(status: int, body: bytes, content_type: str, *, close: bool, extra: Sequence[str] = ()) -> bytes:
    """Write a response of the router's own."""
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "server: practicum-router",
        f"content-type: {content_type}",
        f"content-length: {len(body)}",
        *extra,
        *(["connection: close"] if close else []),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def error_response(status: int, code: str, reason: str, *, close: bool) -> bytes:
    """Write an error of the router's own."""
    body = json.dumps({"error": {"code": code, "message": reason}}).encode() + b"\n"
    extra = {
        401: ['www-authenticate: Bearer realm="practicum router"'],
        429: ["retry-after: 1"],
        503: ["retry-after: 1"],
    }
    return response(status, body, "application/json", close=close, extra=extra.get(status, ()))
