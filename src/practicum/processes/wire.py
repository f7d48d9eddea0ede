"""Messages between a pool, its fork server and its processes: a length, then a pickle."""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!Q")
_READ_BYTES = 1 << 18


def packed(message: Any) -> bytes:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class Unpacker:
    """Puts messages together from bytes as they come."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        self._buffer += data
        messages: list[Any] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            with memoryview(self._buffer) as view:
                messages.append(pickle.loads(view[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return messages


def receive(connection: socket.socket, unpacker: Unpacker) -> list[Any] | None:
    """The next messages of a blocking socket, at least one; None at its end."""
    while True:
        data = connection.recv(_READ_BYTES)
        if not data:
            return None
        messages = unpacker.feed(data)
        if messages:
            return messages
