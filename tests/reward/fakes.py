"""An HTTP service that answers as a test tells it, and what asks it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from aiohttp import web

from practicum import Sample
from practicum.reward.client import RewardClient, Target
from practicum.reward.executors import HttpExecutor
from practicum.reward.graders.remote import RemoteGrader
from practicum.types import Score

DEADLINE_S = 30.0
Answer = Callable[[web.Request, Any], Awaitable[web.StreamResponse]]


class FakeService:
    """Answers `POST` anywhere with `reply`; what it was asked is in `asked`, with which headers in `headers`.

    `reply` is a JSON value, or a function of the request and its body that returns a response. It runs on a thread of
    its own, so that clients in other processes reach it too. A context manager.
    """

    def __init__(self, reply: Any) -> None:
        self.reply = reply
        self.asked: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FakeService:
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(DEADLINE_S)
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(DEADLINE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()

    async def _start(self) -> str:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/{path:.*}", self._answer)
        app.router.add_get("/health", self._healthy)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def _healthy(self, request: web.Request) -> web.StreamResponse:
        return web.Response()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.headers.append(dict(request.headers))
        self.paths.append(request.path_qs)
        if callable(self.reply):
            answer: web.StreamResponse = await self.reply(request, body)
            return answer
        return web.json_response(text=json.dumps(self.reply))


def saying(status: int, text: str) -> Answer:
    async def answer(request: web.Request, body: Any) -> web.StreamResponse:
        return web.Response(status=status, text=text)

    return answer


async def hang(request: web.Request, body: Any) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


async def hang_up(request: web.Request, body: Any) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def within_deadline() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await test()

    asyncio.run(within_deadline())


def score_by(grader: RemoteGrader, sample: Sample, url: str, timeout_s: float = 10.0) -> Score:
    """What comes of asking the service at `url`, whatever the grader calls it."""
    scores: list[Score] = []

    async def ask() -> None:
        client = RewardClient({grader.target: Target(url, window=8, timeout_s=timeout_s)})
        try:
            graded = await HttpExecutor(grader, client, None).grade(sample)
            scores.append(graded.score)
        finally:
            await client.close()

    run(ask)
    return scores[0]
