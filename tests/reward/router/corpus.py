"""Requests that must be refused while their head is read: raw bytes, a readable name each.

Every one is followed on the wire by `SMUGGLED`, a valid request that must never reach a worker: a router that sees
the end of the first message elsewhere than the worker does would let it through. `corpus_bodies` has those that go
wrong only in their body, and those that the standard lets a router either refuse or pass on.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: worker.test\r\n\r\n"

BAD = frozenset({400})
BAD_CODING = frozenset({400, 501})
BAD_VERSION = frozenset({400, 505})
OTHER_VERSION = frozenset({505})
TOO_LARGE = frozenset({431})


@dataclass(frozen=True, slots=True)
class HeadCase:
    name: str
    raw: bytes
    statuses: frozenset[int] = BAD  # that the refusal may have


def head(*lines: bytes, start: bytes = b"POST /first HTTP/1.1", host: bytes | None = b"Host: worker.test") -> bytes:
    return b"\r\n".join([start, *([] if host is None else [host]), *lines]) + b"\r\n\r\n"


def shown(data: bytes) -> str:
    """Bytes as part of a name that can be typed after `pytest -k`."""
    text = "".join(chr(byte) if 0x21 <= byte < 0x7F else f"<{byte:02x}>" for byte in data)
    return text if len(text) <= 40 else f"{text[:30]}..({len(data)})"


CONTENT_LENGTHS = [
    *(b"", b"+5", b"-5", b"-0", b"+0", b"0x5", b"0X5", b"0b1", b"5,5", b"5, 5", b"5,6", b"0,5", b"5,", b",5", b"5 5"),
    *(b"5;5", b"5.0", b"5e0", b"1_0", b"five", b"5a", b"a5", b'"5"', b"'5'", b"5\x00", b"\x005", b"(5)", b"5 x"),
    # Space to Python's str.strip() or int(), not to HTTP.
    *(b"\x0b5", b"5\x0b", b"\x0c5", b"5\x0c", b"5\x1c", b"\x1f5", b"5\xa0", b"\x855", b"\xc2\xa05", b"\xe2\x80\x835"),
    # Digits to str.isdigit(), not to HTTP: superscript two, a Devanagari and a full-width five.
    *(b"\xb2", b"\xc2\xb2", b"\xe0\xa5\xab", b"\xef\xbc\x95"),
]
HUGE_LENGTHS = [b"18446744073709551616", b"18446744073709551621", b"9" * 20, b"9" * 400, b"9" * 5000]


def content_lengths() -> Iterator[HeadCase]:
    for value in CONTENT_LENGTHS:
        yield HeadCase(f"length {shown(value)}", head(b"Content-Length: " + value) + b"hello")
    for value in (b"+5", b"5,5", b"\x0b5", b"-1"):
        raw = head(b"content-length:" + value, start=b"GET /first HTTP/1.1")
        yield HeadCase(f"length {shown(value)} of a GET", raw)
    for value in HUGE_LENGTHS:
        raw = head(b"Content-Length: " + value)
        yield HeadCase(f"length {shown(value)}", raw + b"hello", frozenset({400, 413}))
    for name, lines in {
        "same": [b"Content-Length: 5", b"Content-Length: 5"],
        "different": [b"Content-Length: 5", b"Content-Length: 6"],
        "zero first": [b"Content-Length: 0", b"Content-Length: 5"],
        "zero last": [b"Content-Length: 5", b"Content-Length: 0"],
        "other case": [b"Content-Length: 5", b"CONTENT-LENGTH: 6"],
        "three": [b"Content-Length: 5", b"Content-Length: 5", b"Content-Length: 5"],
        "apart": [b"Content-Length: 5", b"X-Between: 1", b"content-length: 50"],
        "one empty": [b"Content-Length:", b"Content-Length: 5"],
    }.items():
        yield HeadCase(f"two lengths, {name}", head(*lines) + b"hello")


def length_with_coding() -> Iterator[HeadCase]:
    for length in (b"0", b"5", b"6", b"100"):
        for coding in (b"Transfer-Encoding: chunked", b"transfer-encoding:CHUNKED"):
            lines = [b"Content-Length: " + length, coding]
            yield HeadCase(f"length {length.decode()} before {shown(coding)}", head(*lines) + b"0\r\n\r\n")
            yield HeadCase(f"{shown(coding)} before length {length.decode()}", head(*lines[::-1]) + b"0\r\n\r\n")
    apart = [b"Content-Length: 5", *[b"X-Between: 1"] * 20, b"Transfer-Encoding: chunked"]
    yield HeadCase("length and coding far apart", head(*apart) + b"0\r\n\r\n")
    for value in CODINGS:
        lines = [b"Content-Length: 5", b"Transfer-Encoding: " + value]
        yield HeadCase(f"length with coding {shown(value)}", head(*lines) + b"0\r\n\r\n", BAD_CODING)
    lines = [b"Content-Length: 5", b"Transfer-Encoding: chunked"]
    yield HeadCase("length with coding on HTTP/1.0", head(*lines, start=b"POST /first HTTP/1.0") + b"0\r\n\r\n")
    yield HeadCase("length with coding of a GET", head(*lines, start=b"GET /first HTTP/1.1") + b"0\r\n\r\n")


CODINGS = [
    *(b"xchunked", b"chunkedx", b"chunk", b"chunked, identity", b"identity, chunked", b"gzip, chunked", b"gzip"),
    *(b"chunked, gzip", b"deflate,chunked", b"identity", b"chunked, chunked", b"chunked,chunked", b"chunked;q=1"),
    *(b"chunked x", b'"chunked"', b"'chunked'", b"trailers, chunked", b"chunked chunked", b"chun ked", b"", b","),
    *(b"\x0bchunked", b"chunked\x0b", b"\x0cchunked", b"chunked\x0c", b"chunked\xa0", b"\x85chunked", b"chunked\x1c"),
    *(b"chunked\x00", b"\x00chunked", b"chunked\x7f", b"chun\xd0\xbaed", b"\xef\xbb\xbfchunked", b"5", b"true"),
]


def codings() -> Iterator[HeadCase]:
    for value in CODINGS:
        raw = head(b"Transfer-Encoding: " + value) + b"0\r\n\r\n"
        yield HeadCase(f"coding {shown(value)}", raw, BAD_CODING)
    for first, second in [
        (b"chunked", b"chunked"),
        (b"chunked", b"identity"),
        (b"identity", b"chunked"),
        (b"gzip", b"chunked"),
        (b"chunked", b"xchunked"),
        (b"xchunked", b"chunked"),
        (b"chunked", b""),
    ]:
        raw = head(b"Transfer-Encoding: " + first, b"transfer-encoding: " + second) + b"0\r\n\r\n"
        yield HeadCase(f"two codings, {shown(first)} and {shown(second)}", raw, BAD_CODING)
    raw = head(b"Transfer-Encoding: chunked", start=b"POST /first HTTP/1.0") + b"0\r\n\r\n"
    yield HeadCase("coding on HTTP/1.0", raw, BAD_CODING)
    for name, line in {
        "before": b"Transfer-Encoding:\r\n chunked",
        "before, by a tab": b"Transfer-Encoding:\r\n\tchunked",
        "after": b"Transfer-Encoding: chunked\r\n , identity",
        "after, empty": b"Transfer-Encoding: chunked\r\n ",
        "hides it": b"X-Any: 1\r\n Transfer-Encoding: chunked",
        "by a bare LF": b"X-Any: 1\nTransfer-Encoding: chunked",
        "by a bare CR": b"X-Any: 1\rTransfer-Encoding: chunked",
    }.items():
        yield HeadCase(f"coding, fold {name}", head(line) + b"0\r\n\r\n")


def colons_and_folds() -> Iterator[HeadCase]:
    fields = [b"Transfer-Encoding: chunked", b"Content-Length: 5", b"Host: worker.test", b"X-Any: 1"]
    for field in fields:
        name, value = field.split(b":")
        host = None if name == b"Host" else b"Host: worker.test"
        for space in (b" ", b"\t", b"\x0b", b"\x0c", b"\xa0", b"\x00", b"\r", b"\n", b" \t"):
            raw = head(name + space + b":" + value, host=host)
            yield HeadCase(f"{shown(space)} before the colon of {name.decode()}", raw + b"0\r\n\r\n")
        for space in (b" ", b"\t", b"\x0b", b"\x00"):
            raw = head(space + field, host=host)
            yield HeadCase(f"{shown(space)} before {name.decode()}", raw + b"0\r\n\r\n")
        yield HeadCase(f"{name.decode()} without a colon", head(name + value, host=host))
    for space in (b" ", b"\t"):
        yield HeadCase(
            f"{shown(space)} before the first field", head(space + b"X-Any: 1", b"Host: worker.test", host=None)
        )
        yield HeadCase(f"fold by {shown(space)}", head(b"X-Any: 1", space + b"more"))
        yield HeadCase(f"fold by {shown(space)} of Host", head(space + b"more"))
        yield HeadCase(f"empty fold by {shown(space)}", head(b"X-Any: 1", space))
        yield HeadCase(f"line of {shown(space)} only", head(space, b"X-Any: 1"))
    yield HeadCase("empty name", head(b": value"))
    yield HeadCase("only a colon", head(b":"))
    yield HeadCase("no colon", head(b"X-Any"))
    yield HeadCase("no colon first", head(b"X-Any", b"Host: worker.test", host=None))
    yield HeadCase("a request line among the fields", head(b"GET /other HTTP/1.1"))


CONTROLS = [bytes([byte]) for byte in (*range(9), *range(10, 32), 127)]  # not the tab, which a value may have
NOT_IN_TOKENS = [bytes([byte]) for byte in b'()<>@,;\\"/[]?={} \t'] + [b"\x80", b"\xe9", b"\xff"]


def odd_bytes() -> Iterator[HeadCase]:
    for byte in CONTROLS:
        yield HeadCase(f"{shown(byte)} in a name", head(b"X-A" + byte + b"ny: 1"))
        yield HeadCase(f"{shown(byte)} in a value", head(b"X-Any: a" + byte + b"b"))
        yield HeadCase(f"{shown(byte)} ends a value", head(b"X-Any: a" + byte))
        yield HeadCase(f"{shown(byte)} in the Host", head(host=b"Host: worker" + byte + b".test"))
        yield HeadCase(f"{shown(byte)} in the target", head(start=b"GET /fi" + byte + b"rst HTTP/1.1"))
        yield HeadCase(f"{shown(byte)} in the method", head(start=b"GE" + byte + b"T /first HTTP/1.1"))
        yield HeadCase(f"{shown(byte)} after the version", head(start=b"GET /first HTTP/1.1" + byte), BAD_VERSION)
    for byte in NOT_IN_TOKENS:
        yield HeadCase(f"{shown(byte)} in a name", head(b"X-A" + byte + b"ny: 1"))
        if byte not in (b" ", b"\t"):
            yield HeadCase(f"{shown(byte)} in the method", head(start=b"GE" + byte + b"T /first HTTP/1.1"))


def line_ends() -> Iterator[HeadCase]:
    lines = [b"GET /first HTTP/1.1", b"Host: worker.test", b"X-Any: 1"]
    for end, name in ((b"\n", "LF"), (b"\r", "CR"), (b"\r\r\n", "CR CR LF"), (b"\n\r", "LF CR")):
        yield HeadCase(f"{name} everywhere", end.join([*lines, b"", b""]))
        yield HeadCase(f"{name} after the request line", lines[0] + end + b"\r\n".join([*lines[1:], b"", b""]))
        yield HeadCase(f"{name} between fields", b"\r\n".join(lines[:2]) + end + lines[2] + b"\r\n\r\n")
        yield HeadCase(f"{name} before the blank line", b"\r\n".join(lines) + end + b"\r\n")
        yield HeadCase(f"{name} as the blank line", b"\r\n".join(lines) + b"\r\n" + end)
    for name, hidden in {
        "LF": b"a\nX-Smuggled: 1",
        "CR": b"a\rX-Smuggled: 1",
        "LF LF": b"a\n\nGET /other HTTP/1.1",
    }.items():
        yield HeadCase(f"{name} in a value, with a field", head(b"X-Any: " + hidden))
        yield HeadCase(f"{name} in the target, with a field", head(start=b"GET /" + hidden + b" HTTP/1.1"))


def hosts() -> Iterator[HeadCase]:
    start = b"GET /first HTTP/1.1"
    yield HeadCase("no host", head(start=start, host=None))
    yield HeadCase("no host, other fields", head(b"X-Any: 1", b"X-Host: worker.test", start=start, host=None))
    yield HeadCase("no host, absolute target", head(start=b"GET http://worker.test/first HTTP/1.1", host=None))
    yield HeadCase("two hosts, same", head(b"Host: worker.test", start=start))
    yield HeadCase("two hosts, different", head(b"Host: elsewhere.test", start=start))
    yield HeadCase("two hosts, other case", head(b"HOST: elsewhere.test", start=start))
    yield HeadCase("two hosts, one empty", head(b"Host:", start=start))
    yield HeadCase("two hosts on HTTP/1.0", head(b"Host: elsewhere.test", start=b"GET /first HTTP/1.0"))
    for value in (
        b"a b",
        b"a\tb",
        b"a/b",
        b"a?b",
        b"a#b",
        b"user@a",
        b"a:port",
        b"a:80:80",
        b"[::1",
        b"::1]",
        b"http://a",
    ):
        yield HeadCase(f"host {shown(value)}", head(start=start, host=b"Host: " + value))
    for value in (b"a\\b", b'a"b', b"a<b", b"a,\x00b", b"caf\xe9", b"a:+80", b"a:8 0", b"a^b", b"a|b", b"{a}"):
        yield HeadCase(f"host {shown(value)}", head(start=start, host=b"Host: " + value))


def request_lines() -> Iterator[HeadCase]:
    for line in (
        *(b"GET", b"GET ", b"GET /first", b"GET /first ", b"GET  HTTP/1.1", b"GET HTTP/1.1", b"/first HTTP/1.1"),
        *(
            b" /first HTTP/1.1",
            b"HTTP/1.1",
            b" ",
            b"GET  /first HTTP/1.1",
            b"GET /first  HTTP/1.1",
            b"GET /first HTTP/1.1 ",
        ),
        *(b" GET /first HTTP/1.1", b"\tGET /first HTTP/1.1", b"GET\t/first\tHTTP/1.1", b"GET\t/first HTTP/1.1"),
        *(b"GET /first\tHTTP/1.1", b"GET /fi rst HTTP/1.1", b"GET /first HTTP/1.1 HTTP/1.1", b"GET /first x HTTP/1.1"),
        *(b"GET /first HTTP/1.1\t", b"GET\x0b/first\x0bHTTP/1.1", b"GET\xa0/first\xa0HTTP/1.1", b"GET:/first HTTP/1.1"),
        *(b'"GET" /first HTTP/1.1', b"GET /first, HTTP/1.1 GET", b"HTTP/1.1 200 OK", b"Host: worker.test"),
    ):
        # A space too many can also be read as a part of the version.
        yield HeadCase(f"request line {shown(line)}", head(start=line), BAD_VERSION)
    yield HeadCase("no request line", b"Host: worker.test\r\n\r\n", BAD_VERSION)
    yield HeadCase("over-long method", head(start=b"G" * 5000 + b" /first HTTP/1.1"), frozenset({400, 414, 431, 501}))
    yield HeadCase("CONNECT", head(start=b"CONNECT worker.test:443 HTTP/1.1"), frozenset({501}))
    yield HeadCase("CONNECT with a path", head(start=b"CONNECT /first HTTP/1.1"), BAD_CODING)


def versions() -> Iterator[HeadCase]:
    for version in (b"HTTP/1.2", b"HTTP/1.9", b"HTTP/2.0", b"HTTP/3.0", b"HTTP/0.9", b"HTTP/0.0", b"HTTP/9.9"):
        yield HeadCase(f"version {shown(version)}", head(start=b"GET /first " + version), OTHER_VERSION)
    for version in (
        *(
            b"HTTP/1",
            b"HTTP/2",
            b"HTTP/1.",
            b"HTTP/.1",
            b"HTTP/11",
            b"HTTP/1.10",
            b"HTTP/1.01",
            b"HTTP/01.1",
            b"HTTP/1.1.1",
        ),
        *(
            b"http/1.1",
            b"Http/1.1",
            b"HTTP/1.1x",
            b"HTTP/ 1.1",
            b"HTTP /1.1",
            b"HTTP/1,1",
            b"HTTP-1.1",
            b"HTTP1.1",
            b"HTTP/",
        ),
        *(
            b"HTTP",
            b"HTTP/+1.1",
            b"HTTP/-1.1",
            b"HTTP/1.-1",
            b"XTTP/1.1",
            b"HTTPS/1.1",
            b"RTSP/1.0",
            b"ICY/1.1",
            b"xHTTP/1.1",
        ),
        *(
            b"HTTP/1.\xb2",
            b"HTTP/\xd9\xa1.1",
            b"HTTP\\1.1",
            b"HTTP//1.1",
            b"HTTP/1.1/",
            b"HTTP/1.a",
            b"HTTP/1.1;",
            b"1.1",
        ),
    ):
        yield HeadCase(f"version {shown(version)}", head(start=b"GET /first " + version), BAD_VERSION)


def client_hello() -> bytes:
    name = b"worker.test"
    server_name = struct.pack("!HHHBH", 0, len(name) + 5, len(name) + 3, 0, len(name)) + name
    body = b"\x03\x03" + random.Random(0).randbytes(32) + b"\x00\x00\x04\x13\x01\x13\x02\x01\x00"
    body += struct.pack("!H", len(server_name)) + server_name
    handshake = b"\x01" + struct.pack("!I", len(body))[1:] + body
    return b"\x16\x03\x01" + struct.pack("!H", len(handshake)) + handshake


def other_protocols() -> Iterator[HeadCase]:
    settings = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    for name, raw in {
        "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings,
        "TLS ClientHello": client_hello(),
        "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
        "SMTP": b"EHLO worker.test\r\nMAIL FROM:<a@b>\r\n",
        "redis": b"*1\r\n$4\r\nPING\r\n",
        "memcached": b"stats\r\n",
        "PROXY protocol": b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n",
        "PROXY protocol v2": b"\r\n\r\n\x00\r\nQUIT\n\x21\x11\x00\x0c" + b"\x01" * 12,
        "SOCKS 5": b"\x05\x01\x00",
        "JSON": b'{"jsonrpc": "2.0", "method": "x"}\r\n\r\n',
        "gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03",
        "zeros": b"\x00" * 300,
        "ones": b"\xff" * 300,
        "byte order mark": b"\xef\xbb\xbf",
        "a response": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    }.items():
        yield HeadCase(f"protocol: {name}", raw, BAD_VERSION)
    for seed in range(6):
        noise = random.Random(seed).randbytes(400)
        yield HeadCase(f"protocol: noise {seed}", noise, BAD_VERSION)


def sizes() -> Iterator[HeadCase]:
    start = b"GET /first HTTP/1.1"
    large = b"v" * 70_000
    yield HeadCase("huge value", head(b"X-Any: " + large, start=start), TOO_LARGE)
    yield HeadCase("huge name", head(b"X-" + large + b": 1", start=start), TOO_LARGE)
    yield HeadCase("huge line without a colon", head(large, start=start), BAD | TOO_LARGE)
    yield HeadCase("huge target", head(start=b"GET /" + large + b" HTTP/1.1"), frozenset({414, 431}))
    yield HeadCase("huge method", head(start=large + b" / HTTP/1.1"), frozenset({400, 414, 431, 501}))
    yield HeadCase("huge head of many fields", head(*[b"X-%d: %s" % (i, b"v" * 400) for i in range(200)]), TOO_LARGE)
    yield HeadCase("a head that never ends", b"GET /first HTTP/1.1\r\nX-Any: " + b"v" * 1_000_000, TOO_LARGE)
    yield HeadCase("a line that never ends", b"G" * 300_000, frozenset({400, 414, 431, 501}))
    yield HeadCase("fields that never end", b"GET /first HTTP/1.1\r\n" + b"X: 1\r\n" * 100_000, BAD | TOO_LARGE)
    for count in (257, 300, 5000):
        yield HeadCase(f"{count} fields", head(*[b"X: 1"] * count, start=start), TOO_LARGE | BAD)


def all_heads() -> list[HeadCase]:
    families = (
        *(content_lengths, length_with_coding, codings, colons_and_folds, odd_bytes, line_ends, hosts),
        *(request_lines, versions, other_protocols, sizes),
    )
    # The same bytes can come from two families; one case of each is enough.
    distinct = {case.raw: case for family in families for case in family()}
    return list(distinct.values())


HEADS = all_heads()
