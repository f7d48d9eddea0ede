"""Requests that go wrong only after a valid head, and those on which the standard leaves a router the choice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.reward.router.corpus import head, shown

CHUNKED = head(b"Transfer-Encoding: chunked")


@dataclass(frozen=True, slots=True)
class BodyCase:
    """A worker may see the head and `good`, or a part of them.

    Of `bad` it may see the beginning of the line in which it goes wrong, as long as there's nothing wrong with that
    (what is streamed cannot be taken back), and nothing of what follows.
    """

    name: str
    good: bytes
    bad: bytes
    head: bytes = CHUNKED

    def may_be_seen(self, data: bytes) -> bool:
        whole = self.head + self.good
        rest = data[len(whole) :]
        return whole.startswith(data) or (data == whole + rest and self.bad.startswith(rest) and _is_harmless(rest))


def _is_harmless(part: bytes) -> bool:
    return re.fullmatch(rb"[\t -~\x80-\xff]*\r?", part) is not None


@dataclass(frozen=True, slots=True)
class ChoiceCase:
    """Refused, or taken for exactly these (target, data) pairs, on both sides of the router."""

    name: str
    raw: bytes
    data: bytes = b""
    target: bytes = b"/first"


CHUNK_SIZES = [
    *(
        b"",
        b" ",
        b"-1",
        b"-5",
        b"+5",
        b"0x5",
        b"0X5",
        b"x5",
        b"5h",
        b"g",
        b"5_0",
        b"5.0",
        b"5,5",
        b"5 5",
        b" 5",
        b"\t5",
    ),
    *(
        b"5 ",
        b"5\t",
        b"5\x0b",
        b"\x0b5",
        b"5\x0c",
        b"5\x00",
        b"\x005",
        b"5\xa0",
        b"\xb2",
        b"\xef\xbc\x95",
        b"'5'",
        b'"5"',
    ),
    *(
        b"5\r",
        b"\r5",
        b"5\n",
        b"\n5",
        b"5 \r",
        b"5:",
        b"5=5",
        b"5x;ext",
        b";ext",
        b" ;ext",
        b"--5",
        b"-0",
        b"+0",
        b"0x0",
    ),
    *(b"10000000000000005", b"ffffffffffffffff5", b"fffffffffffffffff", b"f" * 40, b"f" * 5000),
]
# Known ways to hide the end of a chunk's line from one of two readers.
EXTENSIONS = [b"5;a\nb", b"5;\nxx", b"5;a\rb", b"5;a\x00b", b"5;\x7f", b"5;a=\x0b", b"5\n;a", b"5;a\n", b"5;a\r"]


def chunk_lines() -> Iterator[BodyCase]:
    for line in CHUNK_SIZES:
        yield BodyCase(f"chunk size {shown(line)}", b"", line + b"\r\nhello\r\n0\r\n\r\n")
    for line in (b"-1", b"+5", b"0x5", b"5 5", b"", b"5\n", b"fffffffffffffffff", b"\xb2", b"1_0"):
        yield BodyCase(f"second chunk size {shown(line)}", b"3\r\nabc\r\n", line + b"\r\nhello\r\n0\r\n\r\n")
    for line in EXTENSIONS:
        yield BodyCase(f"chunk extension {shown(line)}", b"", line + b"\r\nhello\r\n0\r\n\r\n")
        last = line.replace(b"5", b"0", 1)
        yield BodyCase(f"last chunk extension {shown(last)}", b"5\r\nhello\r\n", last + b"\r\n\r\n")
    yield BodyCase("chunk size ended by LF", b"", b"5\nhello\r\n0\r\n\r\n")
    yield BodyCase("chunk size ended by CR", b"", b"5\rhello\r\n0\r\n\r\n")
    yield BodyCase("last chunk ended by LF", b"5\r\nhello\r\n", b"0\n\r\n")
    yield BodyCase("last chunk ended by LF LF", b"5\r\nhello\r\n", b"0\n\n")
    yield BodyCase("everything ended by LF", b"", b"5\nhello\n0\n\n")


def chunk_ends() -> Iterator[BodyCase]:
    for name, bad in {
        "nothing": b"0\r\n\r\n",
        "LF": b"\n0\r\n\r\n",
        "CR": b"\r0\r\n\r\n",
        "CR CR LF": b"\r\r\n0\r\n\r\n",
        "LF CR": b"\n\r0\r\n\r\n",
        "a byte too many": b"X\r\n0\r\n\r\n",
        "two bytes too many": b"XX0\r\n\r\n",
        "a space": b" \r\n0\r\n\r\n",
        "a zero byte": b"\x00\r\n0\r\n\r\n",
        "two line ends": b"\r\n\r\n0\r\n\r\n",
    }.items():
        # With two line ends the first is in order, and so is all before the second.
        good = b"5\r\nhello\r\n" if name == "two line ends" else b"5\r\nhello"
        yield BodyCase(f"{name} after a chunk", good, bad[2:] if name == "two line ends" else bad)


TRAILERS = [
    *(
        b"no colon",
        b": empty name",
        b" X: leading space",
        b"\tX: leading tab",
        b"X : space before the colon",
        b"X\t: 1",
    ),
    *(
        b"X: a\nb",
        b"X: a\rb",
        b"X: a\x00b",
        b"X\x00: 1",
        b"X: \x7f",
        b"X y: 1",
        b"X(: 1",
        b"X\n: 1",
        b"X: 1\r",
        b"\xe9: 1",
    ),
    *(b"GET /other HTTP/1.1", b"\x0b", b"\x00", b"X:\x0b1"),
]


def trailers() -> Iterator[BodyCase]:
    for line in TRAILERS:
        yield BodyCase(f"trailer {shown(line)}", b"5\r\nhello\r\n0\r\n", line + b"\r\n\r\n")
        yield BodyCase(f"second trailer {shown(line)}", b"0\r\nX-Sum: 1\r\n", line + b"\r\n\r\n")
    yield BodyCase("folded trailer", b"0\r\nX-Sum: 1\r\n", b" folded\r\n\r\n")
    yield BodyCase("trailer ended by LF", b"0\r\n", b"X-Sum: 1\n\r\n")
    yield BodyCase("trailers ended by LF", b"0\r\nX-Sum: 1\r\n", b"\n")
    yield BodyCase("trailers ended by CR", b"0\r\nX-Sum: 1\r\n", b"\r")
    yield BodyCase("no trailers, ended by LF", b"0\r\n", b"\n")


BODIES = [*chunk_lines(), *chunk_ends(), *trailers()]

# Cut off by a client that stops sending: never complete, however long one waits.
TRUNCATED = [
    BodyCase("of a length", b"hello", b"", head(b"Content-Length: 10")),
    BodyCase("of a length, nothing", b"", b"", head(b"Content-Length: 10")),
    BodyCase("of a great length", b"x" * 200_000, b"", head(b"Content-Length: 200001")),
    BodyCase("of chunks, nothing", b"", b""),
    BodyCase("of chunks, in the size", b"1", b""),
    BodyCase("of chunks, in the data", b"a\r\nhello", b""),
    BodyCase("of chunks, before the line end", b"5\r\nhello", b""),
    BodyCase("of chunks, in the line end", b"5\r\nhello\r", b""),
    BodyCase("of chunks, before the last", b"5\r\nhello\r\n", b""),
    BodyCase("of chunks, in the last", b"5\r\nhello\r\n0", b""),
    BodyCase("of chunks, before the blank line", b"5\r\nhello\r\n0\r\n", b""),
    BodyCase("of chunks, in a trailer", b"5\r\nhello\r\n0\r\nX-Sum: ", b""),
    BodyCase("of chunks, after a trailer", b"5\r\nhello\r\n0\r\nX-Sum: 1\r\n\r", b""),
    BodyCase("in the request line", b"", b"", b"GET /fir"),
    BodyCase("in a field", b"", b"", b"GET /first HTTP/1.1\r\nHost: wor"),
    BodyCase("before the blank line", b"", b"", b"GET /first HTTP/1.1\r\nHost: worker.test\r\n"),
    BodyCase("in the blank line", b"", b"", b"GET /first HTTP/1.1\r\nHost: worker.test\r\n\r"),
]


def choices() -> Iterator[ChoiceCase]:
    """Well-formed to the letter, or allowed to be mended; a strict router may still refuse them."""
    one = b"GET /first HTTP/1.1"
    yield ChoiceCase("leading zeros in a length", head(b"Content-Length: 00005") + b"hello", b"hello")
    yield ChoiceCase("space around a length", head(b"Content-Length: \t 5 \t") + b"hello", b"hello")
    yield ChoiceCase("an empty line before", b"\r\n" + head(start=one))
    yield ChoiceCase("two empty lines before", b"\r\n\r\n" + head(start=one))
    yield ChoiceCase("a bare LF before", b"\n" + head(start=one))
    yield ChoiceCase("an empty host", head(start=one, host=b"Host:"))
    yield ChoiceCase("coding in other case", head(b"Transfer-Encoding: ChUnKeD") + b"5\r\nhello\r\n0\r\n\r\n", b"hello")
    yield ChoiceCase("space around a coding", head(b"Transfer-Encoding:\t chunked \t") + b"0\r\n\r\n")
    yield ChoiceCase("coding after an empty element", head(b"Transfer-Encoding: ,chunked") + b"0\r\n\r\n")
    yield ChoiceCase("coding before an empty element", head(b"Transfer-Encoding: chunked,") + b"0\r\n\r\n")
    chunked = {
        "space before an extension": b"5 ;ext\r\nhello\r\n0\r\n\r\n",
        "many zeros in a chunk size": b"0000000000000000005\r\nhello\r\n0\r\n\r\n",
        "a last chunk of many zeros": b"5\r\nhello\r\n" + b"0" * 30 + b"\r\n\r\n",
        "an odd extension": b'5;=;;="\r\nhello\r\n0\r\n\r\n',
        "a long extension": b"5;" + b"x" * 60_000 + b"\r\nhello\r\n0\r\n\r\n",
        "long trailers": b"5\r\nhello\r\n0\r\n" + b"X: 1\r\n" * 5000 + b"\r\n",
        "trailers that frame": b"5\r\nhello\r\n0\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
    }
    for name, body in chunked.items():
        yield ChoiceCase(name, CHUNKED + body, b"hello")
    # Naming a field in Connection removes it; removing these would change where the message ends.
    lines = [b"Connection: Content-Length", b"Content-Length: 5"]
    yield ChoiceCase("a length named in Connection", head(*lines) + b"hello", b"hello")
    lines = [b"Connection: transfer-encoding", b"Transfer-Encoding: chunked"]
    yield ChoiceCase("a coding named in Connection", head(*lines) + b"5\r\nhello\r\n0\r\n\r\n", b"hello")
    yield ChoiceCase("the host named in Connection", head(b"Connection: Host", start=one))
    yield ChoiceCase("lower-case method", head(start=b"get /first HTTP/1.1"))
    # Any token may be a method; a router may know only those that are registered.
    for method in (b"abcXYZ", b"ABC", b"A", b"GETT", b"X_1.!#$%&'*+^`|~", b"G" * 300):
        yield ChoiceCase(f"method {shown(method)}", head(start=method + b" /first HTTP/1.1"))
    for target in (
        b"first",
        b"worker.test:80",
        b"*",
        b"?x",
        b"/caf\xe9",
        b"/#part",
        b"http:/first",
        b"ftp://a/b",
        b"//",
    ):
        yield ChoiceCase(f"target {shown(target)}", head(start=b"GET " + target + b" HTTP/1.1"), target=target)
    yield ChoiceCase("asterisk with a path", head(start=b"OPTIONS */first HTTP/1.1"), target=b"*/first")


CHOICES = list(choices())
