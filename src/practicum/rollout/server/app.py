"""A service behind HTTP: access, sleep, and failures in OpenAI's shape.

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
import errno
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Self

from aiohttp import web

from practicum.controller.host import host_address
from practicum.errors import RolloutError
from practicum.rollout.server.errors import (
    BadRequest,
    HttpError,
    Unauthorized,
    Unavailable,
    error_response,
    http_error_response,
)
from practicum.rollout.server.metrics import Metrics
from practicum.rollout.server.service import Service, held
from practicum.secret import is_bearer

log = logging.getLogger("practicum.server")
_PATHS = ("/v1/completions", "/v1/chat/completions", "/classify", "/update_weights", "/log_probs")
_OPEN_TO_ALL = ("/health", "/metrics")
_EVERYWHERE = ("0.0.0.0", "::")
_MAX_BODY_BYTES = 64 * 1024 * 1024
_SLEEP_S = 600.0  # over HTTP: longer than answers take


class ModelServer:
    """Serves from `start` to `close`, on the event loop that starts it. With a `token`, callers must send it as bearer
    token."""

    def __init__(self, service: Service, *, host: str, port: int = 0, token: str | None = None) -> None:
        self.url = ""
        self._host = host
        self._port = port
        self._service = service
        self._token = token
        self._lets_in = True
        self._is_ending = self._is_closed = False
        self._num_open = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._switching = asyncio.Lock()  # sleep and wake come one after another
        service.metrics.watch("awake", "1 while it answers, 0 while it sleeps.", lambda: float(self.is_awake))
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._guarded])
        app.add_routes([
            *(web.post(path, self._ask if path in service.handlers else self._refuse) for path in _PATHS),
            web.post("/tokenize", self._tokenize),
            web.post("/detokenize", self._tokenize),
            web.post("/sleep", self._sleep),
            web.post("/wake_up", self._wake_up),
            web.get("/health", self._health),
            web.get("/v1/models", self._models),
            web.get("/v1/models/{name:.+}", self._one_model),
            web.get("/metrics", self._metrics),
        ])  # fmt: skip
        # A handler is cancelled when its client goes away, and what it computes with it.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        self._site: web.TCPSite | None = None

    async def start(self) -> Self:
        """Listen, at a free port unless a port is given. Raise `RolloutError` where the address cannot be had."""
        try:
            await self._runner.setup()
            self._site = web.TCPSite(self._runner, self._host, self._port, backlog=1024)
            await self._site.start()
        except OSError as error:
            await self._runner.cleanup()
            await self._service.close()
            raise RolloutError(_why_not(error, self._host, self._port)) from error
        self.url = _url(self._host, int(self._runner.addresses[0][1]))
        return self

    @property
    def is_awake(self) -> bool:
        return self._lets_in and self._service.is_awake

    async def sleep(self, timeout_s: float) -> None:
        """Fall asleep once the requests under way are answered; if they take too long, stay awake."""
        await self._service.to_its_end(self._fall_asleep(timeout_s))

    async def wake_up(self, timeout_s: float) -> None:
        """Wake up; if it fails, stay asleep."""
        await self._service.to_its_end(self._awaken(timeout_s))

    async def close(self, finish_s: float = 0.0) -> None:
        """Refuse new requests, and give those under way so long to be answered. Closing twice does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._site is not None:
            await self._site.stop()  # takes no more connections
        self._is_ending = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_idle.wait(), finish_s)
        if self._num_open:
            log.warning("%d requests are aborted, as they took longer than %g s", self._num_open, finish_s)
        await self._runner.cleanup()
        await self._service.close()

    async def _fall_asleep(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        async with held(self._switching, timeout_s, "an earlier call to sleep or wake up"):
            if not self._service.is_awake:
                return
            self._lets_in = False
            try:
                await asyncio.wait_for(self._is_idle.wait(), max(0.0, deadline - time.monotonic()))
                await self._service.sleep(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise TimeoutError(
                    f"the model server was not done with falling asleep within {timeout_s:g} s: {self._num_open} "
                    "requests are under way"
                ) from None
            finally:
                self._lets_in = True

    async def _awaken(self, timeout_s: float) -> None:
        async with held(self._switching, timeout_s, "an earlier call to sleep or wake up"):
            if not self._service.is_awake:
                try:
                    await self._service.wake(timeout_s)
                except TimeoutError:
                    what = f"the model server was not done with waking up within {timeout_s:g} s"
                    raise TimeoutError(what) from None

    # Requests

    @contextmanager
    def _open_request(self) -> Iterator[None]:
        if self._is_ending:
            raise Unavailable("this server is about to end.")
        if not self.is_awake:
            raise Unavailable("this server is asleep: its weights are not in memory. POST /wake_up first.", "asleep")
        self._num_open += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._is_idle.set()

    async def _ask(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        with self._open_request():
            return await self._service.handlers[request.path](request, data)

    async def _refuse(self, request: web.Request) -> web.StreamResponse:
        paths = ", ".join(path for path in _PATHS if path in self._service.handlers)
        raise BadRequest(f"{self._service.name} does not answer {request.path}: ask it at POST {paths}.")

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        convert = self._service.tokenize if request.path == "/tokenize" else self._service.detokenize
        return web.json_response(await self._service.in_encoder(convert, await request.read()))

    async def _sleep(self, request: web.Request) -> web.StreamResponse:
        await self.sleep(_SLEEP_S)
        return web.json_response({})

    async def _wake_up(self, request: web.Request) -> web.StreamResponse:
        await self.wake_up(_SLEEP_S)
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
        return web.Response(body=self._service.metrics.text(), headers={"Content-Type": Metrics.CONTENT_TYPE})

    def _check_token(self, request: web.Request) -> None:
        if self._token is None or request.path in _OPEN_TO_ALL:
            return
        sent = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not is_bearer(sent, self._token):
            raise Unauthorized("send this server's token: Authorization: Bearer ...")

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        start = time.monotonic()
        try:
            self._check_token(request)
            response = await handler(request)
        except HttpError as error:
            response = error_response(error)
        except web.HTTPException as error:
            response = http_error_response(request, error)
        except (asyncio.CancelledError, ConnectionError):
            self._service.metrics.num_abandoned.inc()
            raise
        except Exception as error:  # whatever a model may raise: the client reads it, and the server lives on
            log.exception("%s %s failed", request.method, request.path)
            response = error_response(error)
        resource = request.match_info.route.resource
        path = "other" if resource is None else resource.canonical
        self._service.metrics.answered(path, response.status, time.monotonic() - start)
        return response


async def serve(
    service: Service,
    on_ready: Callable[[str], None],
    *,
    host: str,
    port: int,
    token: str | None = None,
    wake_s: float = 600.0,
    finish_s: float = 30.0,
) -> None:
    """Wake the service, report its address, and serve until SIGTERM or SIGINT; then finish what is under way. A second
    signal ends the process at once."""
    stopped = asyncio.Event()
    server = await ModelServer(service, host=host, port=port, token=token).start()
    try:
        await server.wake_up(wake_s)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, _stop_now_or_later, stopped)
        on_ready(server.url)
        await stopped.wait()
    finally:
        await server.close(finish_s)


def _stop_now_or_later(stopped: asyncio.Event) -> None:
    if stopped.is_set():
        os._exit(1)
    stopped.set()


def _url(host: str, port: int) -> str:
    """Return the address by which others reach it."""
    host = host_address() if host in _EVERYWHERE else host
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use: stop who has it, or take another (0 for a free one)."
    if error.errno == errno.EACCES:
        return f"port {port} of {host} may not be used by this user: take one from 1024 on (0 for a free one)."
    return f"cannot listen at {host}, port {port}: {error.strerror or error}. Is it an address of this machine?"
