"""Connections of the event loop to the fork server and to the processes it forks."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from practicum.errors import ProcessError
from practicum.processes.work import Limits, Unpacker, Work, packed

_STOP_S = 5.0
_READ_BYTES = 1 << 18
_ENOUGH_BYTES = 1 << 12


class Channel:
    """Sends and receives messages over a connected socket, without waiting for either side."""

    def __init__(
        self, connection: socket.socket, on_message: Callable[[Any], None], on_end: Callable[[], None]
    ) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._on_message = on_message
        self._on_end = on_end
        self._unpacker = Unpacker()
        self._unsent = bytearray()
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        self._is_full = False
        self._loop.add_reader(connection.fileno(), self._read)

    def send(self, message: Any) -> None:
        self.send_packed(packed(message))

    def send_packed(self, message: bytes) -> None:
        if not self._is_open:
            return  # its end has been reported
        if not self._unsent:
            self._loop.call_soon(self._write)  # with whatever else is sent in this turn of the loop
        self._unsent += message
        if len(self._unsent) >= _ENOUGH_BYTES and not self._is_full:  # the other side can begin with these
            self._write()

    def send_with_fds(self, message: Any, fds: list[int]) -> None:
        """Send a short message to a side that reads at once: it is not kept."""
        if self._is_open:
            with suppress(BrokenPipeError, ConnectionResetError):  # it has ended: the reader will find out
                socket.send_fds(self._connection, [packed(message)], fds)

    def close(self) -> None:
        """Close without calling `on_end`."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._connection.fileno())
            self._loop.remove_writer(self._connection.fileno())
            self._connection.close()

    def drain(self) -> None:
        """Read now what has come already."""
        while self._is_open and self._read():
            pass

    def _read(self) -> bool:
        """Return whether there may be more."""
        try:
            data = self._connection.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        try:
            messages = self._unpacker.feed(data)
        except Exception:  # a job wrote to the connection, or its result cannot be read here
            data = b""
        if not data:
            self.close()
            self._on_end()
            return False
        for message in messages:
            if self._is_open:
                self._on_message(message)
        return len(data) == _READ_BYTES

    def _write(self) -> None:
        if not self._is_open or not self._unsent:
            return
        try:
            sent = self._connection.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            sent = len(self._unsent)  # it has ended: the reader will find out
        del self._unsent[:sent]
        if self._unsent:
            self._loop.add_writer(self._connection.fileno(), self._write)
            self._is_full = True
        elif self._is_full:
            self._loop.remove_writer(self._connection.fileno())
            self._is_full = False


class ForkServerClient:
    """Starts the fork server, asks it for processes and learns from it what became of them. `on_loss` gets the exit
    code of a server that was up."""

    def __init__(
        self,
        work: Work,
        limits: Limits,
        start_timeout_s: float,
        on_message: Callable[[tuple[Any, ...]], None],
        on_loss: Callable[[int], None],
    ) -> None:
        self._pickled = pickle.dumps((work, limits))
        self._start_timeout_s = start_timeout_s
        self._on_message = on_message
        self._on_loss = on_loss
        self._channel: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._first_words: asyncio.Future[tuple[str, str]] | None = None
        self.is_up = False

    async def start(self) -> None:
        """Start the server. Raises ProcessError if the server does not come up or the work cannot be made ready."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "practicum.processes.server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # a Ctrl-C at the terminal is for the driver
            )
        self._first_words = asyncio.get_running_loop().create_future()
        self._channel = Channel(ours, self._received, self._lost)
        self._channel.send((sys.path, os.getcwd(), self._pickled))
        try:
            async with asyncio.timeout(self._start_timeout_s):
                word, reason = await self._first_words
        except TimeoutError:
            word, reason = "late", f"they were not ready within {self._start_timeout_s:g} s"
            self._process.kill()  # it would not hear that the connection is closed
        if word != "ready":
            await self.close()
            raise ProcessError(f"its processes cannot start: {reason}.")
        self.is_up = True

    def fork(self, connection: socket.socket, current_fd: int) -> None:
        assert self._channel is not None
        self._channel.send_with_fds(("fork",), [connection.fileno(), current_fd])

    def kill(self, pid: int) -> None:
        assert self._channel is not None
        self._channel.send(("kill", pid))

    async def close(self) -> None:
        """Let the server end all its processes, then itself."""
        self.is_up = False
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            await asyncio.get_running_loop().run_in_executor(None, _ended, self._process)

    def _received(self, message: tuple[Any, ...]) -> None:
        assert self._first_words is not None
        if message[0] in ("ready", "failed"):
            if not self._first_words.done():
                self._first_words.set_result((message[0], message[1]))
        else:
            self._on_message(message)

    def _lost(self) -> None:
        assert self._first_words is not None and self._process is not None
        if not self.is_up:
            if not self._first_words.done():
                code = _ended(self._process)
                self._first_words.set_result(("failed", f"the process that starts them ended with exit code {code}"))
            return
        self.is_up = False
        self._on_loss(_ended(self._process))


def _ended(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
