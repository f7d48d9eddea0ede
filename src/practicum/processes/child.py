"""One process of a pool: takes jobs from a socket, answers each with its result or what it raised.

A job is answered by the process that was asked: one that a job has forked, and that comes back with a result of its
own, ends there. A process that a job leaves worn out (memory, threads, open files, processes, limits) says so with its
answer and is replaced.

Before each step of a job its number is written into shared memory. When the process hangs or dies, that is how the pool
knows which of its jobs did it.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from mmap import mmap
from typing import Any

import uvloop

from practicum.processes.work import Limits, Unpacker, packed, receive

NOBODY = 0
_NUMBER = struct.Struct("q")
_PAGE = os.sysconf("SC_PAGESIZE")
# Beyond this share of its memory and open files a process is replaced between two jobs, so that leaks never reach the
# limit.
_WORN_SHARE = 0.5
_MOST_THREADS = 64
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_MOST_WORDS = 2000
_ENOUGH_BYTES = 1 << 10


class SharedNumber:
    """A number that another process can read, whatever happens to this one."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap(fd, _PAGE)

    def write(self, number: int) -> None:
        _NUMBER.pack_into(self._memory, 0, number)

    def read(self) -> int:
        number: int = _NUMBER.unpack_from(self._memory, 0)[0]
        return number

    def close(self) -> None:
        self._memory.close()


def serve(connection: socket.socket, current: SharedNumber, run: Callable[[Any], Any], limits: Limits) -> None:
    """Run jobs until the pool closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which ends the pool
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = _data_bytes() + limits.memory_bytes
    # Counts what is private and writable, touched or not, but no reserved address space: large libraries load.
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    is_worn = _wear(limits)
    connection.sendall(packed((NOBODY, True, None, False)))  # here I am
    if inspect.iscoroutinefunction(run):
        uvloop.run(_AsyncChild(connection, current, run, is_worn).serve())
    else:
        _one_by_one(connection, current, run, is_worn)


def _one_by_one(
    connection: socket.socket, current: SharedNumber, run: Callable[[Any], Any], is_worn: Callable[[], bool]
) -> None:
    unpacker = Unpacker()
    home, pid = os.getcwd(), os.getpid()
    while (messages := receive(connection, unpacker)) is not None:
        for number, job in messages:
            current.write(number)
            reply = _outcome(number, lambda job=job: run(job))  # type: ignore[misc]
            _end_if_forked(pid)
            _flush_output()
            for timer in _TIMERS:
                signal.setitimer(timer, 0)
            spent = _is_spent(reply) or _has_children() or is_worn()
            connection.sendall(_sendable(reply, spent))
            current.write(NOBODY)  # not before: if the job has closed the connection, that is its fault
            if spent:
                return
            os.chdir(home)  # wherever the job has gone


def _end_if_forked(pid: int) -> None:
    """End this process if it is a copy of the one that was asked, which answers itself."""
    if os.getpid() != pid:
        os._exit(0)


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # whatever the job has put in its place
            stream.flush()


def _has_children() -> bool:
    """Return whether a process that a job has started still runs. Those that have ended are collected."""
    while True:
        try:
            if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG) is None:
                return True
        except ChildProcessError:
            return False


def _wear(limits: Limits) -> Callable[[], bool]:
    """Return a function that tells whether this process is to be replaced before it runs out of something."""
    ours = _rlimits()
    resident, data, threads, files = _use()
    more = int(_WORN_SHARE * limits.memory_bytes)
    most_files = max(files, int(_WORN_SHARE * resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    most = (resident + more, data + more, threads + _MOST_THREADS, most_files)

    def is_worn() -> bool:
        try:
            use = _use()
        except OSError:  # no descriptor is left
            return True
        return any(used > limit for used, limit in zip(use, most, strict=True)) or _rlimits() != ours

    return is_worn


def _rlimits() -> list[tuple[int, int]]:
    return [resource.getrlimit(limit) for limit in _LIMITS]


def _use() -> tuple[int, int, int, int]:
    """Return the bytes in memory, the bytes of private data (with the stacks of threads), threads and open files."""
    with open("/proc/self/statm", "rb") as file:
        pages = file.read().split()
    threads = os.stat("/proc/self/task").st_nlink - 2
    return int(pages[1]) * _PAGE, int(pages[5]) * _PAGE, threads, len(os.listdir("/proc/self/fd"))


def _outcome(number: int, call: Callable[[], Any]) -> tuple[int, bool, Any]:
    try:
        return number, True, call()
    except BaseException as error:  # also SystemExit: it is this job's failure
        return number, False, described(error)


def _sendable(reply: tuple[int, bool | None, Any], is_spent: bool) -> bytes:
    try:
        return packed((*reply, is_spent))
    except Exception as error:
        return packed((reply[0], False, f"{described(error)} (its result cannot be sent)", is_spent))


def described(error: BaseException) -> str:
    """Describe what was raised, and in which line."""
    try:
        text = str(error)
    except Exception as broken:  # an exception of the user's own making may break here too
        text = f"(its text cannot be had: {type(broken).__name__})"
    if len(text) > _MOST_WORDS:
        text = f"{text[:_MOST_WORDS]} ... ({len(text):,} characters)"
    name = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if len(frames) > 1 else ""
    return name + where


def _is_spent(reply: tuple[int, bool | None, Any]) -> bool:
    """Return whether it ran out of memory: what is left may be in pieces."""
    return reply[1] is False and reply[2].split(":")[0].split(" ")[0].endswith("MemoryError")


class _AsyncChild:
    """Runs many jobs at once. A message with None for a job cancels it and is answered at once."""

    def __init__(
        self,
        connection: socket.socket,
        current: SharedNumber,
        run: Callable[[Any], Any],
        is_worn: Callable[[], bool],
    ) -> None:
        self._connection = connection
        self._current = current
        self._run = run
        self._is_worn = is_worn
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._unsent = bytearray()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        self._connection.setblocking(False)
        unpacker = Unpacker()
        while data := await loop.sock_recv(self._connection, 1 << 18):
            for number, job in unpacker.feed(data):
                if job is not None:
                    self._start(number, job)
                else:
                    self._cancel(number)

    def _start(self, number: int, job: Any) -> None:
        task = asyncio.create_task(Watched(self._run(job), number, self._current))
        self._tasks[number] = task
        task.add_done_callback(lambda task: self._answer(number, task))

    def _answer(self, number: int, task: asyncio.Task[Any]) -> None:
        if self._tasks.pop(number, None) is None:
            if not task.cancelled():
                task.exception()  # cancelled, and something else came of it: nobody asks any more
        elif task.cancelled():
            self._send((number, False, "CancelledError"))
        else:
            self._send(_outcome(number, task.result))

    def _cancel(self, number: int) -> None:
        task = self._tasks.pop(number, None)
        if task is not None:  # else its answer is on its way
            task.cancel()
            self._send((number, None, None))

    def _send(self, reply: tuple[int, bool | None, Any]) -> None:
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)  # with whatever else is answered in this turn
            _flush_output()
        self._unsent += _sendable(reply, _is_spent(reply) or self._is_worn())
        if len(self._unsent) >= _ENOUGH_BYTES:  # the pool can begin with these
            self._flush()

    def _flush(self) -> None:
        """Send. Answers are small and the pool always reads, so that waiting for room is rare and short."""
        unsent, self._unsent = self._unsent, bytearray()
        if not unsent:
            return  # gone already
        self._connection.setblocking(True)
        try:
            self._connection.sendall(unsent)
        finally:
            self._connection.setblocking(False)


class Watched(Coroutine[Any, Any, Any]):
    """A coroutine that writes down its number before each of its steps, and turns SystemExit into a plain failure."""

    def __init__(self, inner: Coroutine[Any, Any, Any], number: int, current: SharedNumber) -> None:
        self._inner = inner
        self._number = number
        self._current = current
        self._pid = os.getpid()

    def send(self, value: Any) -> Any:
        return self._step(self._inner.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._inner.throw, *error)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise AssertionError("is run as a task")

    def _step(self, step: Callable[..., Any], *args: Any) -> Any:
        self._current.write(self._number)
        try:
            return step(*args)
        except (SystemExit, KeyboardInterrupt) as error:
            raise RuntimeError(described(error)) from error
        finally:
            _end_if_forked(self._pid)
            self._current.write(NOBODY)


def _data_bytes() -> int:
    """Return what RLIMIT_DATA counts: see Linux's mm/mmap.c."""
    with open("/proc/self/status", "rb") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(b"VmData:"))
