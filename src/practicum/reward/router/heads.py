"""Message heads: judged once by httptools (llhttp, strict), remembered, and passed on as the bytes they were.

    raw head ──▶ remembered? ──▶ RequestHead | ResponseHead
                     └─ no ─▶ llhttp ─▶ framing ─▶ hop-by-hop headers taken out

A head that two parsers could read differently is refused: what follows it might be a second, smuggled message. Clients
and workers repeat themselves, so the same bytes are rarely judged twice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence, Set
from typing import Generic, NamedTuple, TypeVar

import httptools

from practicum.reward.router.bodies import CHUNKED, EMPTY, UNTIL_CLOSE, Framing

END = b"\r\n\r\n"
MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 256
# Heads longer than this are not remembered: a client that puts its data into headers would fill the memory with them.
MAX_REMEMBERED_BYTES = 2048
NUM_REMEMBERED = 4096

COST_HEADER = b"x-practicum-cost"
PRIORITY_HEADER = b"x-practicum-priority"
NUM_PRIORITIES = 10
DEFAULT_PRIORITY = 5

_REQUEST_LINE = re.compile(rb"[A-Z-]+ [!-~]+ HTTP/1\.[01]")
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] [1-9][0-9][0-9]( [\t -~\x80-\xff]*)?")
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._~%!$&'()*+,;=-]*)(:[0-9]*)?")
_NUMBER = re.compile(rb"[0-9]{1,20}(\.[0-9]{0,20})?([eE][+-]?[0-9]{1,3})?")
_HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"upgrade"})
# Named in a Connection header these are not taken out: without them the message would mean something else.
_NEEDED = frozenset({b"host", b"content-length", b"transfer-encoding", b"content-type", b"authorization", b"expect"})
_READ = frozenset(
    {b"host", b"content-length", b"transfer-encoding", b"expect", b"authorization", b"origin"}
    | {COST_HEADER, PRIORITY_HEADER}
    | _HOP_BY_HOP
)


_NO_TOKENS: Set[bytes] = frozenset()


class BadHead(Exception):
    """A head that is not passed on. `status` is what a client is told, `reason` why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(status, reason)
        self.status = status
        self.reason = reason


# Heads and framings are tuples: made for each head that is new, in half the time that a frozen dataclass takes.
class RequestHead(NamedTuple):
    raw: bytes  # as it is passed on
    size: int  # bytes as it came
    method: bytes
    target: bytes
    framing: Framing
    keep_alive: bool
    expects_continue: bool
    authorization: bytes | None
    priority: int
    cost: float | None
    session: bytes | None
    host: bytes | None
    origin: bytes | None  # the page that asked, if one did
    http_1_0: bool


class ResponseHead(NamedTuple):
    raw: bytes
    size: int
    status: int
    framing: Framing  # of an answer to anything but HEAD
    keep_alive: bool  # may the worker's connection be used again?
    http_1_0: bool
    whole_size: int | None  # bytes of the whole answer, when it can be passed on at once, without a further look

    @property
    def interim(self) -> bool:
        return self.status < 200


class _Fields:
    """What httptools calls back: keeps the few headers that matter here."""

    __slots__ = ("_read", "_values", "complete", "num_bodies", "num_headers", "num_messages", "target")

    def __init__(self, read: Set[bytes] = _READ) -> None:
        self._read = read
        self._values: dict[bytes, list[bytes]] = {}
        self.target = b""
        self.num_headers = 0
        self.num_messages = 0
        self.num_bodies = 0
        self.complete = False

    def on_message_begin(self) -> None:
        self.num_messages += 1

    def on_url(self, target: bytes) -> None:
        self.target += target

    def on_header(self, name: bytes, value: bytes) -> None:
        self.num_headers += 1
        name = name.lower()
        if name in self._read:
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


class Remembered(Generic[Head]):
    """Heads by their bytes. `BadHead` for one that is refused."""

    def __init__(self, read: Callable[[bytes], Head]) -> None:
        self._read: Callable[[bytes], Head] = read
        self._heads: dict[bytes, Head] = {}

    def __call__(self, raw: bytes) -> Head:
        head = self._heads.get(raw)
        if head is None:
            head = self._read(raw)
            if len(raw) <= MAX_REMEMBERED_BYTES:
                if len(self._heads) >= NUM_REMEMBERED:
                    self._heads.clear()
                self._heads[raw] = head
        return head


class RequestReader:
    def __init__(self, session_header: str) -> None:
        self._session_header = session_header.lower().encode()
        self._read = _READ | {self._session_header}

    def __call__(self, raw: bytes) -> RequestHead:
        line = _first_line(raw)
        if not _REQUEST_LINE.fullmatch(line):
            versions = re.search(rb"HTTP/([0-9]+\.[0-9]+)$", line)
            if versions and versions[1] not in (b"1.0", b"1.1"):
                raise BadHead(505, "only HTTP/1.0 and HTTP/1.1 are spoken here")
            raise BadHead(400, "the request line is not METHOD TARGET VERSION")
        if line.startswith(b"CONNECT "):
            raise BadHead(501, "CONNECT is not supported")
        fields = _Fields(self._read)
        parser = httptools.HttpRequestParser(fields)
        _judge(parser, fields, raw)
        version = parser.get_http_version()
        _check_host(fields, version)
        framing = Framing.of_length(_length(fields)) if fields.values(b"content-length") else EMPTY
        if codings := fields.values(b"transfer-encoding"):
            if version == "1.0" or len(codings) > 1 or codings[0].lower() != b"chunked":
                raise BadHead(400, "Transfer-Encoding must be chunked, once, in HTTP/1.1")
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
            priority=_priority(fields),
            cost=_cost(fields),
            session=fields.first(self._session_header),
            host=fields.first(b"host"),
            origin=fields.first(b"origin"),
            http_1_0=version == "1.0",
        )


def read_response(raw: bytes) -> ResponseHead:
    if not _STATUS_LINE.fullmatch(_first_line(raw)):
        raise BadHead(502, "the status line is not VERSION STATUS REASON")
    fields = _Fields()
    parser = httptools.HttpResponseParser(fields)
    _judge(parser, fields, raw)
    status = parser.get_status_code()
    version = parser.get_http_version()
    codings, lengths = fields.values(b"transfer-encoding"), fields.values(b"content-length")
    if codings and (lengths or version == "1.0" or len(codings) > 1 or codings[0].lower() != b"chunked"):
        raise BadHead(502, "Transfer-Encoding must be chunked, once, in HTTP/1.1, without Content-Length")
    framing = UNTIL_CLOSE
    if status < 200 or status in (204, 304):
        framing = EMPTY
    elif codings:
        framing = CHUNKED
    elif lengths:
        framing = Framing.of_length(_length(fields))
    if status == 101:
        raise BadHead(502, "the worker switched protocols, which nobody asked for")
    connection = fields.tokens(b"connection")
    keep_alive = b"close" not in connection and (version == "1.1" or b"keep-alive" in connection)
    passed_on = _without_hop_by_hop(raw, fields)
    simple = version == "1.1" and framing.kind == "length" and 200 <= status < 500
    return ResponseHead(
        raw=passed_on,
        size=len(raw),
        whole_size=len(raw) + framing.length if simple else None,
        status=status,
        framing=framing,
        keep_alive=keep_alive,
        http_1_0=version == "1.0",
    )


def with_close(raw: bytes) -> bytes:
    """The same head, telling its reader that the connection will be closed."""
    return raw[:-2] + b"connection: close\r\n\r\n"


def _first_line(raw: bytes) -> bytes:
    return raw[: raw.index(b"\r\n")]


def _judge(parser: httptools.HttpRequestParser | httptools.HttpResponseParser, fields: _Fields, raw: bytes) -> None:
    """Let llhttp read the head, and make sure that it saw its end where we did."""
    num_lines = raw.count(b"\r\n")
    if raw.count(b"\n") != num_lines or raw.count(b"\r") != num_lines:
        raise BadHead(400, "a line must end with CR LF")
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass  # taken out below: the connection stays HTTP
    except httptools.HttpParserInvalidMethodError:
        raise BadHead(501, "the method is not known here") from None
    except httptools.HttpParserError as error:
        raise BadHead(400, f"not HTTP/1.1: {error}") from None
    if not fields.complete or fields.num_messages != 1 or fields.num_bodies:
        raise BadHead(400, "the head does not end where it should")
    if fields.num_headers > MAX_HEADERS:
        raise BadHead(431, f"more than {MAX_HEADERS} headers")


def _check_host(fields: _Fields, version: str) -> None:
    hosts = fields.values(b"host")
    if len(hosts) > 1 or (not hosts and version == "1.1") or (hosts and not _HOST.fullmatch(hosts[0])):
        raise BadHead(400, "an HTTP/1.1 request has one valid Host header")


def _length(fields: _Fields) -> int:
    lengths = fields.values(b"content-length")
    if len(lengths) != 1 or not lengths[0].isdigit() or len(lengths[0]) > 18:
        raise BadHead(400, "Content-Length must be one decimal number")
    return int(lengths[0])


def _priority(fields: _Fields) -> int:
    for value in fields.values(PRIORITY_HEADER):
        if len(value) == 1 and value.isdigit():
            return int(value)
        name = PRIORITY_HEADER.decode()
        raise BadHead(400, f"{name} must be a whole number from 0 to {NUM_PRIORITIES - 1}, the most urgent")
    return DEFAULT_PRIORITY


def _cost(fields: _Fields) -> float | None:
    for value in fields.values(COST_HEADER):
        if _NUMBER.fullmatch(value) and 0.0 < (cost := float(value)) < math.inf:
            return cost
        raise BadHead(400, f"{COST_HEADER.decode()} must be a number above 0")
    return None


def _without_hop_by_hop(raw: bytes, fields: _Fields) -> bytes:
    """The head without what concerns one connection only. The other lines keep their bytes."""
    if not fields.has_any(_HOP_BY_HOP):
        return raw
    dropped = _HOP_BY_HOP | (fields.tokens(b"connection") - _NEEDED)
    first, *lines = raw[: -len(END)].split(b"\r\n")
    kept = [line for line in lines if line.partition(b":")[0].lower() not in dropped]
    return b"\r\n".join([first, *kept]) + END
