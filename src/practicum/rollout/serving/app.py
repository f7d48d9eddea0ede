"""A server's HTTP side: who may ask what, when it sleeps, and how failures are told.

POST /v1/completions, /v1/chat/completions, /classify, /update_weights,
     /log_probs   what the service answers, while awake
POST /tokenize, /detokenize   awake or not
POST /sleep      waits for the requests under way; others get 503 from then on
POST /wake_up    500 with the reason if the memory cannot be had: it stays asleep
GET  /health     200 as long as the process lives, asleep or not: a sleeping server is not a broken one
GET  /v1/models, /metrics
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from practicum.rollout.serving.metrics import Meter
from practicum.rollout.serving.refusals import BadRequest, NotNow, Refusal, Unauthorized, error_reply, http_error_reply
from practicum.rollout.serving.service import Service

log = logging.getLogger("practicum.server")
_PATHS = ("/v1/completions", "/v1/chat/completions", "/classify", "/update_weights", "/log_probs")
_OPEN_TO_ALL = ("/health", "/metrics")
_MAX_BODY_BYTES = 64 * 1024 * 1024
_TURN_S = 600.0  # for whoever asks over HTTP: longer than answers take


class ModelApp:
    """To be made in the event loop that serves it. With a `token`, callers must send it as bearer token."""

    def __init__(self, service: Service, token: str | None = None) -> None:
        self._service = service
        self._token = None if token is None else token.encode()
        self._lets_in = True
        self._is_ending = False
        self._num_open = 0
        self._nobody_asks = asyncio.Event()
        self._nobody_asks.set()
        self._turn = asyncio.Lock()  # sleep and wake come one after another
        self._turns: set[asyncio.Task[None]] = set()
        service.begin()
        service.meter.watch("awake", "1 while it answers, 0 while it sleeps.", lambda: float(self.is_awake))
        self.app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._guarded])
        self.app.add_routes([
            *(web.post(path, self._ask if path in service.handlers else self._refuse) for path in _PATHS),
            web.post("/tokenize", self._tokenize),
            web.post("/detokenize", self._detokenize),
            web.post("/sleep", self._sleep),
            web.post("/wake_up", self._wake_up),
            web.get("/health", self._health),
            web.get("/v1/models", self._models),
            web.get("/v1/models/{name:.+}", self._one_model),
            web.get("/metrics", self._metrics),
        ])  # fmt: skip

    @property
    def is_awake(self) -> bool:
        return self._lets_in and self._service.is_awake

    async def sleep(self, timeout_s: float) -> None:
        """Once the requests under way are answered. Does nothing when asleep; if they take too long, it stays awake."""
        await self._in_turn(self._fall_asleep(timeout_s))

    async def wake_up(self, timeout_s: float) -> None:
        """Does nothing when awake. If it fails, it stays asleep."""
        await self._in_turn(self._awaken(timeout_s))

    async def finish(self, timeout_s: float) -> None:
        """Let nobody in any more, and wait for the requests under way. They are broken off if they take longer."""
        self._is_ending = True
        await asyncio.wait([asyncio.create_task(self._nobody_asks.wait())], timeout=timeout_s)
        if self._num_open:
            log.warning("%d requests are broken off, as they took longer than %g s", self._num_open, timeout_s)

    async def close(self) -> None:
        await self._service.close()

    async def _in_turn(self, what: Coroutine[Any, Any, None]) -> None:
        """To its end, even when whoever asked for it has gone: half asleep would be of no use to anybody."""
        task = asyncio.create_task(what)
        self._turns.add(task)
        task.add_done_callback(self._turns.discard)
        await asyncio.shield(task)

    async def _fall_asleep(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        async with self._turn:
            if not self._service.is_awake:
                return
            self._lets_in = False
            try:
                await asyncio.wait_for(self._nobody_asks.wait(), timeout_s)
                await self._service.sleep(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise TimeoutError(
                    f"the model server was not done with falling asleep within {timeout_s:g} s: {self._num_open} "
                    "requests are under way"
                ) from None
            finally:
                self._lets_in = True

    async def _awaken(self, timeout_s: float) -> None:
        async with self._turn:
            if not self._service.is_awake:
                await self._service.wake(timeout_s)

    @contextmanager
    def _open_request(self) -> Iterator[None]:
        if self._is_ending:
            raise NotNow("this server is about to end.")
        if not self.is_awake:
            raise NotNow("this server is asleep: its weights are not in memory. POST /wake_up first.", "asleep")
        self._num_open += 1
        self._nobody_asks.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._nobody_asks.set()

    async def _ask(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        with self._open_request():
            return await self._service.handlers[request.path](request, data)

    async def _refuse(self, request: web.Request) -> web.StreamResponse:
        paths = ", ".join(path for path in _PATHS if path in self._service.handlers)
        raise BadRequest(f"{self._service.name} does not answer {request.path}: ask it at POST {paths}.")

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(await self._service.tokenize(await request.read()))

    async def _detokenize(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(await self._service.detokenize(await request.read()))

    async def _sleep(self, request: web.Request) -> web.StreamResponse:
        await self.sleep(_TURN_S)
        return web.json_response({})

    async def _wake_up(self, request: web.Request) -> web.StreamResponse:
        await self.wake_up(_TURN_S)
        return web.json_response({})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        version = self._service.weight_version
        weights = {} if version is None else {"weight_version": version}
        return web.json_response({"status": "awake" if self.is_awake else "asleep", **weights})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [self._described]})

    async def _one_model(self, request: web.Request) -> web.StreamResponse:
        self._service.check_name(request.match_info["name"])
        return web.json_response(self._described)

    @property
    def _described(self) -> dict[str, object]:
        model = {"id": self._service.name, "object": "model", "created": 0, "owned_by": "practicum"}
        return {**model, "max_model_len": self._service.limit.num_tokens}

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._service.meter.text(), headers={"Content-Type": Meter.CONTENT_TYPE})

    def _check_token(self, request: web.Request) -> None:
        if self._token is None or request.path in _OPEN_TO_ALL:
            return
        kind, _, sent = request.headers.get("Authorization", "").partition(" ")
        # Compared in a time that does not tell how much of it is right.
        if kind.lower() != "bearer" or not hmac.compare_digest(
            sent.strip().encode(errors="surrogateescape"), self._token
        ):
            raise Unauthorized("send this server's token: Authorization: Bearer ...")

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        start = time.monotonic()
        try:
            self._check_token(request)
            response = await handler(request)
        except Refusal as error:
            response = error_reply(error)
        except web.HTTPException as error:
            response = http_error_reply(request, error)
        except (asyncio.CancelledError, ConnectionError):
            self._service.meter.abandoned()
            raise
        except Exception as error:  # whatever a model may raise: the client is told, and the server lives on
            log.exception("%s %s failed", request.method, request.path)
            response = error_reply(error)
        resource = request.match_info.route.resource
        path = "other" if resource is None else resource.canonical
        self._service.meter.answered(path, response.status, time.monotonic() - start)
        return response
