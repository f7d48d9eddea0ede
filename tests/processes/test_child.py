from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from practicum.processes.child import NOBODY, SharedNumber, Watched, described
from practicum.processes.work import Unpacker, packed, receive


@pytest.fixture
def current_fd() -> int:
    fd = os.memfd_create("current")
    os.ftruncate(fd, os.sysconf("SC_PAGESIZE"))
    return fd


def test_what_is_written_can_be_read_elsewhere(current_fd: int) -> None:
    one, other = SharedNumber(current_fd), SharedNumber(current_fd)
    os.close(current_fd)
    assert other.read() == NOBODY
    one.write(1 << 40)
    assert other.read() == 1 << 40
    one.close()
    assert other.read() == 1 << 40


def test_each_step_of_a_coroutine_says_whose_it_is(current_fd: int) -> None:
    current = SharedNumber(current_fd)
    seen: list[int] = []

    async def look() -> str:
        for _ in range(3):
            seen.append(current.read())
            await asyncio.sleep(0)
        return "done"

    async def both() -> list[str]:
        tasks = [asyncio.create_task(Watched(look(), number, current)) for number in (7, 8)]
        await asyncio.sleep(0)
        seen.append(current.read())
        return await asyncio.gather(*tasks)

    assert asyncio.run(both()) == ["done", "done"]
    assert seen[:3] == [7, 8, NOBODY]
    assert seen.count(7) == seen.count(8) == 3
    os.close(current_fd)


def test_leaving_the_process_is_a_failure_of_the_coroutine_not_of_the_loop(current_fd: int) -> None:
    async def leave() -> None:
        sys.exit(4)

    async def main() -> None:
        with pytest.raises(RuntimeError, match="SystemExit: 4"):
            await asyncio.create_task(Watched(leave(), 1, SharedNumber(current_fd)))

    asyncio.run(main())
    os.close(current_fd)


def test_errors_are_described_with_or_without_words() -> None:
    assert described(ValueError("odd")) == "ValueError: odd"
    assert described(TimeoutError()) == "TimeoutError"


SERVE = """
import os, socket, sys, resource
from practicum.processes.child import SharedNumber, serve
from practicum.processes.work import Limits

def run(job):
    if job == "limits":
        return resource.getrlimit(resource.RLIMIT_CORE)
    if job == "memory":
        return len(bytearray(200 << 20))
    return job * 2

fd = os.memfd_create("current")
os.ftruncate(fd, 4096)
serve(socket.socket(fileno=int(sys.argv[1])), SharedNumber(fd), run, Limits(100 << 20))
"""


def test_a_process_serves_until_it_is_spent(tmp_path: Path) -> None:
    here, there = socket.socketpair()
    with here:
        with there:
            process = subprocess.Popen([sys.executable, "-c", SERVE, str(there.fileno())], pass_fds=[there.fileno()])
        here.settimeout(20)
        unpacker = Unpacker()
        assert receive(here, unpacker) == [(NOBODY, True, None, False)]  # it is up
        replies = []
        for number, job in enumerate([21, None, "limits", "memory"], start=1):
            here.sendall(packed((number, job)))
            messages = receive(here, unpacker)
            assert messages is not None
            replies += messages
        assert replies[0] == (1, True, 42, False)
        assert replies[1][:2] == (2, False) and replies[1][2].startswith("TypeError")
        assert replies[2] == (3, True, (0, 0), False)
        number, is_result, why, is_spent = replies[3]
        assert (number, is_result, is_spent) == (4, False, True) and why.startswith("MemoryError")
        assert receive(here, unpacker) is None  # out of memory once: it goes
        assert process.wait(10) == 0
