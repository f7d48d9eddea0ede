"""Work for pools, well and badly behaved. A job is the name of one of its methods and an argument."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from practicum.processes import Work


class Tricks(Work):
    def __init__(self) -> None:
        self.is_ready = False
        self.leaked: list[bytearray] = []
        self.num_met = 0

    def prepare(self) -> None:
        self.is_ready = True

    @property
    def run(self) -> Callable[[Any], Any]:
        return self._run

    def _run(self, job: tuple[str, Any]) -> Any:
        assert self.is_ready
        return getattr(self, job[0])(job[1])

    def square(self, number: int) -> int:
        return number * number

    def pid(self, _: object) -> int:
        return os.getpid()

    def nap(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def hang(self, _: object) -> None:
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(60)

    def say_and_hang(self, path: str) -> None:
        """Writes its pid first, for whoever waits until it has begun."""
        announce(path, os.getpid())
        self.hang(None)

    def raise_error(self, text: str) -> None:
        raise KeyError(text)

    def exit_hard(self, code: int) -> None:
        os._exit(code)

    def exit_softly(self, code: int) -> None:
        sys.exit(code)

    def segfault(self, _: object) -> None:
        ctypes.string_at(0)

    def allocate(self, _: object) -> None:
        hoard = []
        while True:
            hoard.append(bytearray(16 << 20))

    def leak(self, megabytes: int) -> int:
        self.leaked.append(bytearray(os.urandom(1 << 20)) * megabytes)
        return os.getpid()

    def leak_threads(self, num: int) -> int:
        for _ in range(num):
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        return os.getpid()

    def leak_files(self, num: int) -> int:
        for _ in range(num):
            os.open("/dev/null", os.O_RDONLY)
        return os.getpid()

    def lower_limits(self, _: object) -> int:
        resource.setrlimit(resource.RLIMIT_NOFILE, (4, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        return os.getpid()

    def set_alarm(self, seconds: float) -> int:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        return os.getpid()

    def fork_and_return(self, value: float) -> float:
        """Both come back, the copy first."""
        pid = os.fork()
        if pid == 0:
            return -1.0
        time.sleep(0.005)
        return value

    def fork_and_raise(self, value: float) -> float:
        if os.fork() == 0:
            raise KeyboardInterrupt
        time.sleep(0.005)
        return value

    def fork_and_stay(self, path: str) -> int:
        """A copy that goes on for ever."""
        if os.fork() == 0:
            self.say_and_hang(path)
        return os.getpid()

    def write_everywhere(self, data: bytes) -> float:
        for fd in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(fd, data)
        time.sleep(60)
        return 1.0

    def print_much(self, megabytes: int) -> int:
        print("first words")
        for _ in range(megabytes):
            print("x" * (1 << 20))
        return megabytes

    def close_sockets(self, seconds: float) -> float:
        os.closerange(3, 256)
        time.sleep(seconds)
        return 1.0

    def kill_itself(self, path: str) -> None:
        with open(path, "a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)

    def cannot_be_sent(self, _: object) -> Any:
        return threading.Lock()

    def large(self, megabytes: int) -> bytes:
        return b"x" * (megabytes << 20)

    def length(self, data: bytes) -> int:
        return len(data)

    def start_others(self, path: str) -> None:
        """A child, one in a session of its own, a daemon forked twice; then hangs."""
        sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
        pids = [subprocess.Popen(sleeper).pid, subprocess.Popen(sleeper, start_new_session=True).pid]
        pids.append(daemon_pid())
        announce(path, *pids)
        self.hang(None)

    def start_others_and_return(self, path: str) -> None:
        pids = [multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)), None]
        pids[0].start()  # type: ignore[union-attr]
        announce(path, pids[0].pid, daemon_pid())  # type: ignore[union-attr]


def daemon_pid() -> int:
    """Of a process that has cut itself loose."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        pid = os.fork()
        if pid:
            os.write(write, str(pid).encode())
            os._exit(0)
        time.sleep(600)
        os._exit(0)
    pid = int(os.read(read, 32))
    os.wait()
    return pid


def announce(path: str, *pids: int | None) -> None:
    hidden = Path(path + ".part")
    hidden.write_text(" ".join(map(str, pids)))
    hidden.rename(path)


class AsyncTricks(Tricks):
    @property
    def run(self) -> Callable[[Any], Any]:
        return self._run_async

    async def _run_async(self, job: tuple[str, Any]) -> Any:
        assert self.is_ready
        return await getattr(self, "async_" + job[0])(job[1])

    async def async_pid(self, _: object) -> int:
        return os.getpid()

    async def async_nap(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    async def async_meet(self, num: int) -> int:
        """Ends when so many are under way."""
        self.num_met += 1
        while self.num_met < num:
            await asyncio.sleep(0.01)
        return self.num_met

    async def async_fork_and_return(self, value: float) -> float:
        return self.fork_and_return(value)

    async def async_leak_threads(self, num: int) -> int:
        return self.leak_threads(num)

    async def async_block(self, _: object) -> None:
        await asyncio.sleep(0.05)
        time.sleep(60)

    async def async_raise_error(self, text: str) -> None:
        raise KeyError(text)

    async def async_swallow(self, _: object) -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    async def async_swallow_then_block(self, _: object) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(0.05)
        time.sleep(60)

    async def async_exit_hard(self, code: int) -> None:
        await asyncio.sleep(0.05)
        os._exit(code)

    async def async_exit_softly(self, code: int) -> None:
        await asyncio.sleep(0.05)
        sys.exit(code)

    async def async_kill_itself(self, path: str) -> None:
        await asyncio.sleep(0.05)
        self.kill_itself(path)

    async def async_allocate(self, _: object) -> None:
        self.allocate(None)

    async def async_cannot_be_sent(self, _: object) -> Any:
        return threading.Lock()

    async def async_large(self, megabytes: int) -> bytes:
        return self.large(megabytes)


class CannotPrepare(Tricks):
    def prepare(self) -> None:
        raise FileNotFoundError("no such schema")


class ExitsInPrepare(Tricks):
    def prepare(self) -> None:
        os._exit(5)


class NeverReady(Tricks):
    def prepare(self) -> None:
        time.sleep(60)
