"""HTTP/1.1 as bytes: just enough to find where a message ends, and no more lenient than the standard.

Fake worker and raw client both read with it. It shares no code with the router, so the two can't be wrong together.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"upgrade"})
# Naming one of these in Connection must not change where the message ends or whom it is for.
NEVER_DROPPED = frozenset({b"content-length", b"transfer-encoding", b"trailer", b"host"})
WITHOUT_BODY = frozenset({204, 304})

_FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([\t -~\x80-\xff]*?)[ \t]*")
_CHUNK_LINE = re.compile(rb"0*([0-9A-Fa-f]{1,16})([ \t]*;[\t -~\x80-\xff]*)?")


class WireError(Exception):
    """The peer sent something that is not HTTP."""


class ClosedError(WireError):
    """The peer closed in the middle of a message."""


class LateError(WireError):
    """The peer did not send what was waited for in time."""


@dataclass(frozen=True)
class Head:
    """A start line and its fields, with the blank line."""

    raw: bytes

    @property
    def start(self) -> bytes:
        return self.raw.split(b"\r\n", 1)[0]

    @property
    def method(self) -> bytes:
        return self.start.split(b" ")[0]

    @property
    def target(self) -> bytes:
        return self.start.split(b" ")[1]

    @property
    def status(self) -> int:
        return int(self.start.split(b" ")[1])

    @cached_property
    def fields(self) -> list[tuple[bytes, bytes]]:
        pairs = []
        for line in self.raw[:-4].split(b"\r\n")[1:]:
            match = _FIELD.fullmatch(line)
            if match is None:
                raise WireError(f"not a header field: {line[:200]!r}")
            pairs.append((match[1], match[2]))
        return pairs

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.fields if key.lower() == name.lower()]

    def tokens(self, name: bytes) -> set[bytes]:
        return {token.strip().lower() for value in self.values(name) for token in value.split(b",")}

    def end_to_end(self) -> bytes:
        """The head as it must look beyond the router: without the fields that belong to one connection only."""
        dropped = (HOP_BY_HOP | self.tokens(b"connection")) - NEVER_DROPPED
        lines = self.raw[:-4].split(b"\r\n")
        kept = [line for line in lines[1:] if line.split(b":")[0].lower() not in dropped]
        return b"\r\n".join([lines[0], *kept]) + b"\r\n\r\n"

    def length(self) -> int | None:
        """Content-Length; None without one."""
        values = self.values(b"content-length")
        if self.values(b"transfer-encoding") and values:
            raise WireError(f"both Content-Length and Transfer-Encoding: {self.raw[:300]!r}")
        if not values:
            return None
        if len(values) > 1 or not re.fullmatch(rb"[0-9]{1,18}", values[0]):
            raise WireError(f"Content-Length {values}")
        return int(values[0])

    def is_chunked(self) -> bool:
        values = self.values(b"transfer-encoding")
        if values and [value.lower() for value in values] != [b"chunked"]:
            raise WireError(f"Transfer-Encoding {values}")
        return bool(values)


class Reader:
    """Reads messages from a socket; each read has `timeout_s` in all, however the bytes trickle in."""

    def __init__(self, sock: socket.socket, timeout_s: float, on_bytes: Callable[[bytes], None] | None = None) -> None:
        self.sock = sock
        self.timeout_s = timeout_s
        self.buffer = bytearray()
        self.on_bytes = on_bytes

    def fill(self, deadline: float, what: str) -> bool:
        """One more packet; False when the peer has closed (a reset is a close too)."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise LateError(f"{what} did not come in {self.timeout_s:g} s; had {bytes(self.buffer[-200:])!r}")
        self.sock.settimeout(left)
        try:
            data = self.sock.recv(1 << 16)
        except TimeoutError:
            raise LateError(f"{what} did not come in {self.timeout_s:g} s; had {bytes(self.buffer[-200:])!r}") from None
        except ConnectionError:
            return False
        if data and self.on_bytes is not None:
            self.on_bytes(data)
        self.buffer += data
        return bool(data)

    def take(self, count: int) -> bytes:
        data = bytes(self.buffer[:count])
        del self.buffer[:count]
        return data

    def head(self) -> Head | None:
        """The next head; None when the peer closed instead of beginning one."""
        if not self.buffer and not self.fill(self._deadline(), "a head"):
            return None
        return Head(self._until(b"\r\n\r\n", "the end of a head"))

    def exactly(self, count: int) -> bytes:
        deadline = self._deadline()
        while len(self.buffer) < count:
            if not self.fill(deadline, f"a body of {count} bytes"):
                raise ClosedError(
                    f"closed after {len(self.buffer)} of {count} body bytes: {bytes(self.buffer[:200])!r}"
                )
        return self.take(count)

    def some(self) -> bytes:
        """Whatever is there, or comes next; b"" at the end."""
        if not self.buffer:
            self.fill(self._deadline(), "anything")
        return self.take(len(self.buffer))

    def chunk(self) -> tuple[bytes, bytes]:
        """One chunk: raw, with its size line (for the last one: with the trailers), and its data."""
        line = self._until(b"\r\n", "a chunk size")
        match = _CHUNK_LINE.fullmatch(line[:-2])
        if match is None:
            raise WireError(f"not a chunk size: {line[:200]!r}")
        size = int(match[1], 16)
        if size:
            data = self.exactly(size + 2)
            if data[-2:] != b"\r\n":
                raise WireError(f"no line end after a chunk: {data[-20:]!r}")
            return line + data, data[:-2]
        raw = line
        while line != b"\r\n":
            line = self._until(b"\r\n", "a trailer")
            if line != b"\r\n" and _FIELD.fullmatch(line[:-2]) is None:
                raise WireError(f"not a trailer: {line[:200]!r}")
            raw += line
        return raw, b""

    def chunked(self) -> tuple[bytes, bytes]:
        """A chunked body: raw, and its data."""
        raws, datas = [], []
        while True:
            raw, data = self.chunk()
            raws.append(raw)
            datas.append(data)
            if not data:
                return b"".join(raws), b"".join(datas)

    def to_close(self) -> bytes:
        """All that comes until the peer closes."""
        deadline = self._deadline()
        while self.fill(deadline, "the end of the connection"):
            pass
        return self.take(len(self.buffer))

    def _until(self, mark: bytes, what: str) -> bytes:
        deadline = self._deadline()
        while (end := self.buffer.find(mark)) < 0:
            if not self.fill(deadline, what):
                raise ClosedError(f"closed before {what}: {bytes(self.buffer[:200])!r}")
        return self.take(end + len(mark))

    def _deadline(self) -> float:
        return time.monotonic() + self.timeout_s
