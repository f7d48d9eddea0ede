"""A router in an event loop of the caller's own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from practicum.errors import RouterError
from practicum.reward.router import RouterSettings
from practicum.reward.router.server import RouterServer
from tests.reward.router.fakes import FakeWorker


def test_it_runs_in_any_event_loop(start_worker: Callable[..., FakeWorker]) -> None:
    worker = start_worker()

    async def serve() -> bytes:
        server = RouterServer(RouterSettings(workers=(worker.url,)))
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 5.0)
        writer.close()
        await server.stop()
        return answer

    assert asyncio.run(serve()).endswith(b"\r\n\r\n/x")


def test_a_worker_that_does_not_answer_its_first_probe_holds_up_nothing() -> None:
    async def serve() -> float:
        silent = await asyncio.start_server(lambda reader, writer: asyncio.sleep(30), "127.0.0.1", 0)
        port = silent.sockets[0].getsockname()[1]
        server = RouterServer(RouterSettings(workers=(f"http://127.0.0.1:{port}",), probe_timeout_s=0.2))
        start = time.monotonic()
        await server.start()
        seconds = time.monotonic() - start
        await server.stop()
        silent.close()
        return seconds

    assert asyncio.run(serve()) < 1.0


def test_an_admin_port_in_use_leaves_nothing_open() -> None:
    async def serve() -> None:
        first = RouterServer(RouterSettings())
        await first.start()
        second = RouterServer(RouterSettings(admin_port=first.port))
        with pytest.raises(RouterError, match=f"port {first.port}"):
            await second.start()
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", second.port)
        await first.stop()

    asyncio.run(serve())


def test_addresses() -> None:
    async def serve(**settings: object) -> tuple[str, str]:
        server = RouterServer(RouterSettings(**settings))  # type: ignore[arg-type]
        await server.start()
        await server.stop()
        return server.url, server.admin_url

    url, admin_url = asyncio.run(serve(host="0.0.0.0"))
    assert url.startswith("http://127.0.0.1:") and admin_url == f"{url}/router"
    url, admin_url = asyncio.run(serve(admin_port=0))
    assert admin_url.startswith("http://127.0.0.1:") and admin_url != url and "/router" not in admin_url
