"""The work of a pool's processes, one object made ready once in the fork server and inherited by all of them; and the
messages between pool, fork server and processes: a length, then a pickle.
"""

from __future__ import annotations

import pickle
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one process."""

    memory_bytes: int
    """What it may allocate on top of what it has when it starts."""
    capacity: int = 1
    """Jobs it has at a time. More than one only for work whose `run` is a coroutine function."""


class Work(ABC):
    """The work of a pool; picklable. `prepare` runs once, before the first fork; `run` once per job, in a process."""

    @abstractmethod
    def prepare(self) -> None: ...

    @property
    @abstractmethod
    def run(self) -> Callable[[Any], Any]:
        """Turn a job into its result, both picklable; a coroutine function if many are to run in one process."""


_LENGTH = struct.Struct("!Q")
_READ_BYTES = 1 << 18
_MOST_BYTES = 1 << 40


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
            if length > _MOST_BYTES:
                raise ValueError(f"a message of {length} bytes: this is no message")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            with memoryview(self._buffer) as view:
                messages.append(pickle.loads(view[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return messages


def receive(connection: socket.socket, unpacker: Unpacker) -> list[Any] | None:
    """Return the next messages of a blocking socket, at least one; None at its end."""
    while True:
        data = connection.recv(_READ_BYTES)
        if not data:
            return None
        messages = unpacker.feed(data)
        if messages:
            return messages
