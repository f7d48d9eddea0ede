"""A replica's HTTP side: who may ask what, when it sleeps, and how failures are told.

POST /classify or /v1/chat/completions ─ read in a thread ─▶ BatchQueue ─▶ reply
POST /sleep      waits for the requests under way; others get 503 from then on
POST /wake_up    500 with the reason if the memory cannot be had: it stays asleep
GET  /health     200 as long as the process lives, asleep or not: a sleeping replica is not a broken one
GET  /v1/models
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from practicum.reward.serving.batching import BatchQueue
from practicum.reward.serving.endpoint import Endpoint
from practicum.reward.serving.texts import BadRequest

log = logging.getLogger("practicum.reward")
_PATHS = ("/classify", "/v1/chat/completions")
_MAX_BODY_BYTES = 64 * 1024 * 1024


class Asleep(Exception):
    """Asked while asleep."""


class ModelApp:
    """To be made in the event loop that serves it."""

    def __init__(self, name: str, endpoint: Endpoint[Any, Any, Any], max_batch_tokens: int) -> None:
        self._name = name
        self._endpoint = endpoint
        self._queue = BatchQueue[Any, Any](endpoint.compute, max_batch_tokens)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="practicum-encode")
        self._is_awake = endpoint.weights.is_awake
        self._num_open = 0
        self._nobody_asks = asyncio.Event()
        self._nobody_asks.set()
        self._turn = asyncio.Lock()  # sleep and wake come one after another
        self.app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_told_as_json])
        self.app.add_routes([
            *(web.post(path, self._ask if path == endpoint.path else self._refuse) for path in _PATHS),
            web.post("/sleep", self._sleep),
            web.post("/wake_up", self._wake_up),
            web.get("/health", self._health),
            web.get("/v1/models", self._models),
        ])  # fmt: skip

    async def sleep(self) -> None:
        """Once the requests under way are answered. Does nothing when asleep."""
        async with self._turn:
            self._is_awake = False
            await self._nobody_asks.wait()
            await self._queue.run(self._endpoint.sleep)

    async def wake_up(self) -> None:
        """Does nothing when awake. If it fails, it stays asleep."""
        async with self._turn:
            if not self._is_awake:
                await self._queue.run(self._endpoint.wake)
                self._is_awake = True

    async def close(self) -> None:
        await self._queue.close()
        await asyncio.to_thread(self._reader.shutdown)

    @contextmanager
    def _open_request(self) -> Iterator[None]:
        if not self._is_awake:
            raise Asleep
        self._num_open += 1
        self._nobody_asks.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._nobody_asks.set()

    async def _ask(self, request: web.Request) -> web.Response:
        data = await request.read()
        loop, endpoint = asyncio.get_running_loop(), self._endpoint
        with self._open_request():
            asked = await loop.run_in_executor(self._reader, endpoint.read, data)
            results = await self._queue.submit(asked.jobs)
            return web.json_response(await loop.run_in_executor(self._reader, endpoint.reply, asked, results))

    async def _refuse(self, request: web.Request) -> web.Response:
        raise BadRequest(f"{self._name} does not answer {request.path}: ask it at POST {self._endpoint.path}.")

    async def _sleep(self, request: web.Request) -> web.Response:
        await self.sleep()
        return web.json_response({})

    async def _wake_up(self, request: web.Request) -> web.Response:
        await self.wake_up()
        return web.json_response({})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "awake" if self._is_awake else "asleep"})

    async def _models(self, request: web.Request) -> web.Response:
        limit = self._endpoint.limit.num_tokens
        model = {"id": self._name, "object": "model", "owned_by": "practicum", "max_model_len": limit}
        return web.json_response({"object": "list", "data": [model]})


@web.middleware
async def _told_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadRequest as error:
        return _error(400, str(error))
    except Asleep:
        return _error(503, "this replica is asleep: its weights are not in memory. POST /wake_up first.")
    except web.HTTPException as error:
        return _error(error.status, f"{request.method} {request.path}: {error.reason}")
    except Exception as error:  # whatever a model may raise: the client is told, and the replica lives on
        log.exception("%s %s failed", request.method, request.path)
        return _error(500, f"{type(error).__name__}: {error}")


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)
