from __future__ import annotations

import asyncio
import os
import signal
import socket
from typing import Any

from practicum.processes.link import Channel, ForkServerClient
from practicum.processes.work import Limits, Unpacker, packed
from tests.processes.works import Tricks


def test_a_line_carries_messages_of_any_size_both_ways_and_tells_its_end_once() -> None:
    async def test() -> None:
        here, there = socket.socketpair()
        heard: list[list[Any]] = [[], []]
        ends: list[str] = []
        ended = asyncio.Event()

        def over() -> None:
            ends.append("over")
            ended.set()

        one = Channel(here, heard[0].append, lambda: ends.append("closed by itself"))
        other = Channel(there, heard[1].append, over)
        messages = [b"a", b"x" * (5 << 20), b"b"]  # far more than the socket holds
        for message in messages:
            one.send(message)
            other.send_packed(packed(message))
        async with asyncio.timeout(20):
            while len(heard[0]) < 3 or len(heard[1]) < 3:
                await asyncio.sleep(0.001)
            assert heard == [messages, messages]
            one.close()
            one.send(b"nobody hears this")
            one.close()
            await ended.wait()
        other.send(b"nor this")
        other.send_with_fds(("nor this",), [])
        assert ends == ["over"]

    asyncio.run(test())


def test_the_first_of_many_messages_are_there_before_the_last_is_sent() -> None:
    async def test() -> None:
        here, there = socket.socketpair()
        channel = Channel(here, print, print)
        for _ in range(100):
            channel.send(b"x" * 100)
        there.setblocking(False)
        early = there.recv(1 << 20)  # without giving way to the loop
        assert len(packed(b"x" * 100)) < len(early) < 100 * len(packed(b"x" * 100))
        await asyncio.sleep(0)
        assert early + there.recv(1 << 20) == 100 * packed(b"x" * 100)
        channel.close()
        there.close()

    asyncio.run(test())


def test_sending_to_an_end_that_is_gone_is_found_out_by_the_reader() -> None:
    async def test() -> None:
        here, there = socket.socketpair()
        ended = asyncio.Event()
        channel = Channel(here, print, ended.set)
        there.close()
        channel.send_with_fds(("fork",), [0])
        channel.send(b"x")
        async with asyncio.timeout(10):
            await ended.wait()

    asyncio.run(test())


def test_file_descriptors_travel_with_a_message() -> None:
    async def test() -> None:
        here, there = socket.socketpair()
        channel = Channel(here, print, print)
        read, write = os.pipe()
        channel.send_with_fds(("fork",), [write])
        data, fds, _, _ = socket.recv_fds(there, 1000, 4)
        assert Unpacker().feed(data) == [("fork",)]
        os.write(fds[0], b"hello")
        assert os.read(read, 5) == b"hello"
        for fd in (read, write, *fds):
            os.close(fd)
        channel.close()
        there.close()

    asyncio.run(test())


def test_a_server_that_is_lost_is_told_and_can_be_started_again() -> None:
    async def test() -> None:
        lost: asyncio.Queue[int] = asyncio.Queue()
        link = ForkServerClient(Tricks(), Limits(128 << 20), 20.0, lambda message: None, lost.put_nowait)
        async with asyncio.timeout(30):
            await link.start()
            first = link._process
            assert link.is_up and first is not None
            os.kill(first.pid, signal.SIGKILL)
            assert await lost.get() == -signal.SIGKILL
            assert not link.is_up
            await link.start()
            assert link.is_up and link._process is not first
            await link.close()
            assert not link.is_up and link._process is not None and link._process.returncode == 0

    asyncio.run(test())
