"""A router that runs out of descriptors serves its clients in turn, and blames no worker for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from practicum.reward.router import RouterControl
from practicum.reward.router.server import raise_descriptor_limit

WAIT_S = 120.0
LIMIT = 256


@contextlib.contextmanager
def router_with_few_descriptors(worker: str, *options: str) -> Iterator[str]:
    command = f'ulimit -n {LIMIT}; exec "$0" -m practicum router --worker {worker} --port 0 "$@"'
    with subprocess.Popen(
        ["bash", "-c", command, sys.executable, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.kill()


@contextlib.asynccontextmanager
async def slow_worker(seconds: float) -> AsyncIterator[tuple[str, Counter[str]]]:
    """Answers each request after a while, as many at a time as come."""
    seen = Counter[str]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                found = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
                await reader.readexactly(int(found[1]) if found else 0)
                seen[head.split(" ")[1]] += 1
                await asyncio.sleep(seconds)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=1024)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", seen
    finally:
        server.close()


async def statuses_of(url: str, num_clients: int, num_requests: int) -> Counter[Any]:
    async def client() -> list[Any]:
        found: list[Any] = []
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(WAIT_S)) as session:
            for _ in range(num_requests):
                try:
                    async with session.post(f"{url}/grade", json={}) as reply:
                        await reply.read()
                        found.append(reply.status)
                except aiohttp.ClientError as error:
                    found.append(type(error).__name__)
        return found

    several = await asyncio.gather(*(client() for _ in range(num_clients)))
    return Counter(status for found in several for status in found)


def figures_of(url: str) -> dict[str, Any]:
    (worker,) = RouterControl(f"{url}/router").workers()
    return worker


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1024, reason="this process needs 900 descriptors")
def test_more_clients_than_descriptors_are_all_served_in_turn() -> None:
    async def test() -> tuple[Counter[Any], dict[str, Any], Counter[str]]:
        async with slow_worker(0.01) as (worker, seen):
            with router_with_few_descriptors(worker) as url:
                found = await statuses_of(url, num_clients=600, num_requests=3)
                return found, await asyncio.to_thread(figures_of, url), seen

    found, worker, seen = asyncio.run(test())
    assert found == {200: 1800}
    assert seen["/grade"] == 1800
    assert (worker["failures"], worker["ejections"], worker["state"]) == (0, 0, "up")


def test_clients_that_say_nothing_do_not_keep_others_out() -> None:
    async def test() -> Counter[Any]:
        async with slow_worker(0.0) as (worker, _):
            with router_with_few_descriptors(worker) as url:
                host, port = url.removeprefix("http://").split(":")
                silent = [await asyncio.open_connection(host, int(port)) for _ in range(LIMIT)]
                found = await statuses_of(url, num_clients=10, num_requests=2)
                for _, writer in silent:
                    writer.close()
                return found

    assert asyncio.run(test()) == {200: 20}


def test_a_router_without_a_descriptor_for_a_worker_says_so_and_blames_nobody(start_worker: Any) -> None:
    """The process of a router on a thread has other uses for descriptors too."""
    worker = start_worker()
    code = (
        "import json, os, resource, socket, sys, time, urllib.request\n"
        "from practicum.reward.router import Router\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))\n"
        "url = sys.argv[1]\n"
        "with Router([url], probe_interval_s=300.0).start() as router:\n"
        "    urllib.request.urlopen(router.url + '/x', timeout=30).read()\n"
        "    while router.workers()[0]['connections']: time.sleep(0.1)  # idle ones are closed\n"
        "    asking = [socket.create_connection((router.host, router.port)) for _ in range(2)]\n"
        "    while 'clients 3.0' not in router.metrics(): time.sleep(0.1)  # with the one that asks\n"
        "    taken = []\n"
        "    for _ in range(10):  # the router closes what asked for its figures in its own time\n"
        "        try:\n"
        "            while True: taken.append(os.open('/dev/null', os.O_RDONLY))\n"
        "        except OSError: time.sleep(0.1)\n"
        "    asking[0].sendall(b'GET /x HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n')\n"
        "    first = asking[0].recv(1000).decode()\n"
        "    for one in taken: os.close(one)\n"
        "    asking[1].sendall(b'GET /x HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n')\n"
        "    second = asking[1].recv(1000).decode()\n"
        "    (figures,) = router.workers()\n"
        "    print(json.dumps([first, second, figures]))\n"
    )
    run = subprocess.run([sys.executable, "-c", code, worker.url], capture_output=True, text=True, timeout=WAIT_S)
    assert run.returncode == 0, run.stderr[-3000:]
    first, second, figures = json.loads(run.stdout)
    assert first.startswith("HTTP/1.1 503 ") and "no_descriptors" in first and "ulimit -n" in first
    assert second.startswith("HTTP/1.1 200 ")
    assert (figures["failures"], figures["ejections"], figures["state"]) == (0, 0, "up")


def test_the_soft_limit_is_raised() -> None:
    code = (
        "import resource; from practicum.reward.router.server import raise_descriptor_limit as up\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))\n"
        "now = up(); assert resource.getrlimit(resource.RLIMIT_NOFILE) == (now, hard), now; assert now > 100"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_S)
    assert raise_descriptor_limit() == raise_descriptor_limit()
