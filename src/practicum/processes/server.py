"""The fork server: a small process without threads that makes the work ready once and forks a process when asked.

Started as `python -m practicum.processes.server FD`. It gets: `("fork",)` with a socket and a piece of
shared memory, `("kill", pid)`. It sends: `("ready", "")` or `("failed", why)`, then `("forked", pid)` in the order
of the requests, and `("ended", pid, status)`.

A process is killed with everything it has started: its group, its descendants, and what was cut loose from it, of which
it is the nearest reaper, and after it the server. All of it ends when the pool closes the connection, however that
comes. What processes print comes to the server, which passes on a bounded part of it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Collection
from contextlib import suppress
from typing import Any, NoReturn

import psutil

from practicum.processes.child import SharedNumber, described, serve
from practicum.processes.work import Limits, Unpacker, Work, packed, receive

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MOST_FDS = 64
_MOST_PRINTED = 64 << 10  # bytes a minute
_MINUTE_S = 60.0
_MARGIN = b"    | "  # before each line of it, to tell it from the log around it


class Output:
    """The output of processes, up to a limit a minute. What is left out is counted and told."""

    def __init__(self, target_fd: int = 2) -> None:
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.reader, False)
        self._target_fd = target_fd
        self._began = time.monotonic()
        self._num_kept = self._num_dropped = 0
        self._is_line_start = True

    def forward(self) -> bool:
        """Pass on what has come. Return whether there was anything."""
        try:
            data = os.read(self.reader, 1 << 16)
        except BlockingIOError:
            return False
        if time.monotonic() - self._began > _MINUTE_S:
            self.tell_dropped()
            self._began = time.monotonic()
            self._num_kept = 0
        kept = data[: _MOST_PRINTED - self._num_kept]
        self._num_kept += len(kept)
        self._num_dropped += len(data) - len(kept)
        self._write(kept)
        return True

    def tell_dropped(self) -> None:
        if self._num_dropped:
            note = f"... and {self._num_dropped:,} bytes more in this minute, which are left out\n"
            self._write((b"" if self._is_line_start else b"\n") + note.encode())
        self._num_dropped = 0

    def _write(self, data: bytes) -> None:
        lines = data.splitlines(keepends=True)
        margins = [self._is_line_start, *(line.endswith((b"\n", b"\r")) for line in lines[:-1])]
        if lines:
            self._is_line_start = lines[-1].endswith((b"\n", b"\r"))
        with suppress(OSError):
            os.write(self._target_fd, b"".join(_MARGIN * new + line for new, line in zip(margins, lines, strict=False)))


class ForkServer:
    def __init__(self, connection: socket.socket, work: Work, limits: Limits) -> None:
        self._connection = connection
        self._work = work
        self._limits = limits
        self._children: set[int] = set()
        self._pid = os.getpid()
        self._output = Output()

    def run(self) -> None:
        ring, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        unpacker = Unpacker()
        poll = select.poll()  # `select.select` cannot watch numbers from 1,024 on, and it has its from another process
        for fd in (self._connection.fileno(), ring, self._output.reader):
            poll.register(fd, select.POLLIN)
        try:
            while True:
                ready = {fd for fd, _ in poll.poll()}
                if ring in ready:
                    os.read(ring, 4096)
                    self._reap()
                if self._output.reader in ready:
                    self._output.forward()
                if self._connection.fileno() in ready:
                    try:
                        data, fds, _, _ = socket.recv_fds(self._connection, 1 << 16, _MOST_FDS)
                    except ConnectionResetError:  # closed with something unread
                        return
                    if not data:
                        return
                    for message in unpacker.feed(data):
                        if message[0] == "fork":
                            self._fork(fds.pop(0), fds.pop(0))
                        else:
                            self._kill(message[1])
        finally:
            self._end_all()
            while self._output.forward():
                pass
            self._output.tell_dropped()

    def _send(self, *message: Any) -> None:
        self._connection.sendall(packed(message))

    def _fork(self, connection_fd: int, current_fd: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user's modules may have started threads: so be it
            pid = os.fork()
        if pid == 0:
            self._be_child(connection_fd, current_fd)
        os.close(connection_fd)
        os.close(current_fd)
        self._children.add(pid)
        self._send("forked", pid)

    def _be_child(self, connection_fd: int, current_fd: int) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._pid:
                os._exit(code)  # the server died before that could be said
            os.setsid()
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # a daemon that a job starts is found among its children
            self._connection.close()
            for fd in (1, 2):
                os.dup2(self._output.writer, fd)
            serve(socket.socket(fileno=connection_fd), SharedNumber(current_fd), self._work.run, self._limits)
            code = 0
        except (BrokenPipeError, ConnectionResetError):
            code = 0  # the pool has gone
        except MemoryError:
            pass  # the exit code says so; there is no room for more
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _kill(self, pid: int) -> None:
        if pid not in self._children:
            return
        _kill_below(pid)
        _kill_group(pid)
        os.kill(pid, signal.SIGKILL)  # it may not have come to have a group of its own yet

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._children:
                self._children.discard(pid)
                _kill_group(pid)  # what it had started and left in its group
                _kill_below(spare=self._children)  # what was cut loose from a process that has ended
                with suppress(OSError):
                    self._send("ended", pid, status)

    def _end_all(self) -> None:
        while True:
            _kill_below()
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return


def _kill_below(pid: int | None = None, spare: Collection[int] | None = None) -> None:
    """Kill the descendants of a process, by default this one; with `spare`, only its other children."""
    with suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=spare is None):
            if process.pid not in (spare or ()):
                with suppress(psutil.Error):
                    process.kill()


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    messages = receive(connection, Unpacker())
    if messages is None:
        return
    ((import_paths, folder, pickled),) = messages
    sys.path[:] = import_paths
    try:
        os.chdir(folder)
        work, limits = pickle.loads(pickled)  # only now: its classes may be found on those paths
        pid = os.getpid()
        work.prepare()
        if os.getpid() != pid:
            os._exit(0)  # a copy, forked by a module that was imported
    except BaseException as error:
        connection.sendall(packed(("failed", described(error))))
        return
    gc.collect()
    gc.freeze()  # so that collections in the processes do not touch, and copy, what they share
    connection.sendall(packed(("ready", "")))
    ForkServer(connection, work, limits).run()


if __name__ == "__main__":
    main()
