"""Where a message's body ends. Bodies are passed on as they are; they are only read to find their end.

Framing (from the head) ──▶ Body, one per message: take(data) says how many of these bytes still belong to it
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import httptools

_CHUNKED_HEAD = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
_END = b"\r\n\r\n"


class BadBody(Exception):
    """Chunks that cannot be read without a doubt."""


class Framing(NamedTuple):
    kind: Literal["length", "chunked", "until_close"]
    length: int = 0  # of kind "length"

    @staticmethod
    def of_length(length: int) -> Framing:
        return EMPTY if length == 0 else Framing("length", length)

    def body(self) -> Body:
        if self.kind == "length":
            return SizedBody(self.length)
        return ChunkedBody() if self.kind == "chunked" else EndlessBody()


EMPTY = Framing("length", 0)
CHUNKED = Framing("chunked")
UNTIL_CLOSE = Framing("until_close")


class SizedBody:
    __slots__ = ("_left",)

    def __init__(self, length: int) -> None:
        self._left = length

    @property
    def done(self) -> bool:
        return self._left == 0

    def take(self, data: bytes) -> int:
        taken = min(self._left, len(data))
        self._left -= taken
        return taken


class EndlessBody:
    """Ends when its connection does."""

    __slots__ = ()
    done = False

    def take(self, data: bytes) -> int:
        return len(data)


class _End:
    """What httptools calls back."""

    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen = False

    def on_message_complete(self) -> None:
        self.seen = True


class ChunkedBody:
    """Chunks, extensions and trailers are read by llhttp. It does not say where in the data the body ended, so it is
    fed up to each place where one could end: strictly read, that is only right behind an empty line."""

    __slots__ = ("_end", "_parser")

    def __init__(self) -> None:
        self._end = _End()
        self._parser = httptools.HttpRequestParser(self._end)
        self._parser.feed_data(_CHUNKED_HEAD)

    @property
    def done(self) -> bool:
        return self._end.seen

    def take(self, data: bytes) -> int:
        start = 0
        for end in (1, 2, 3):  # an empty line may have begun in the data before
            self._feed(data[start:end])
            start = end
            if self.done:
                return min(end, len(data))
        while start < len(data):
            found = data.find(_END, start - 3)
            end = len(data) if found < 0 else max(found + len(_END), start + 1)
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
            raise BadBody(f"bad chunk: {error}") from None


Body = SizedBody | ChunkedBody | EndlessBody
