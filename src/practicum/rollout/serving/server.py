"""A service behind HTTP: on a thread with its own event loop beside what else the process does, or as all it does."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aiohttp import web

from practicum.controller.host import host_address
from practicum.errors import RolloutError
from practicum.rollout.serving.app import ModelApp
from practicum.rollout.serving.service import Service

T = TypeVar("T")
_STOP_S = 10.0
_GRACE_S = 5.0
_EVERYWHERE = ("0.0.0.0", "::")


class ModelServer:
    """Serves from the moment it is made until `close`, at a free port of `host` unless told another."""

    def __init__(self, service: Service, *, host: str, port: int = 0, token: str | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="practicum-model-server", daemon=True)
        self._thread.start()
        self._site: _Site
        try:
            self._site = self._call(_Site.started(service, host, port, token), _STOP_S, "starting")
        except BaseException:
            self._stop_loop()
            raise
        self.url = self._site.url

    def sleep(self, timeout_s: float) -> None:
        """Once the requests under way are answered."""
        self._call(self._site.model.sleep(timeout_s), timeout_s + _GRACE_S, "falling asleep")

    def wake_up(self, timeout_s: float) -> None:
        self._call(self._site.model.wake_up(timeout_s), timeout_s + _GRACE_S, "waking up")

    def close(self, finish_s: float = 0.0) -> None:
        """Requests under way have so long to be answered. Closing twice does nothing."""
        if self._loop.is_closed():
            return
        try:
            self._call(self._site.stop(finish_s), finish_s + _STOP_S, "stopping")
        finally:
            self._stop_loop()

    def _call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        running = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return running.result(timeout_s)
        except TimeoutError:
            if running.done():  # its own
                raise
            running.cancel()
            raise TimeoutError(f"the model server was not done with {what} within {timeout_s:g} s") from None

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)
        self._loop.close()


def serve_until_told(
    service: Service,
    on_ready: Callable[[str], None],
    *,
    host: str,
    port: int,
    token: str | None = None,
    wake_s: float = 600.0,
    finish_s: float = 30.0,
) -> None:
    """Wake it, say where it is, and serve until SIGTERM or SIGINT; then finish what is under way. A second signal ends
    the process at once."""

    async def serve() -> None:
        told = asyncio.Event()
        site = await _Site.started(service, host, port, token)
        try:
            await site.model.wake_up(wake_s)
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, _stop_now_or_later, told)
            on_ready(site.url)
            await told.wait()
        finally:
            await site.stop(finish_s)

    asyncio.run(serve())


def _stop_now_or_later(told: asyncio.Event) -> None:
    if told.is_set():
        os._exit(1)
    told.set()


class _Site:
    """In an event loop."""

    def __init__(self, model: ModelApp, runner: web.AppRunner, site: web.TCPSite, url: str) -> None:
        self.model = model
        self.url = url
        self._runner = runner
        self._site = site

    @classmethod
    async def started(cls, service: Service, host: str, port: int, token: str | None) -> _Site:
        model = ModelApp(service, token)
        # A handler is cancelled when its client goes away, so that nothing is computed for nobody.
        runner = web.AppRunner(model.app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        try:
            await runner.setup()
            site = web.TCPSite(runner, host, port, backlog=1024)
            await site.start()
        except OSError as error:
            await runner.cleanup()
            await model.close()
            raise RolloutError(_why_not(error, host, port)) from error
        return cls(model, runner, site, _url(host, int(runner.addresses[0][1])))

    async def stop(self, finish_s: float) -> None:
        await self._site.stop()  # takes no more connections
        await self.model.finish(finish_s)
        await self._runner.cleanup()
        await self.model.close()
        await asyncio.get_running_loop().shutdown_default_executor()


def _url(host: str, port: int) -> str:
    """As others reach it."""
    host = host_address() if host in _EVERYWHERE else host
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use: stop who has it, or take another (0 for a free one)."
    if error.errno == errno.EACCES:
        return f"port {port} of {host} may not be used by this user: take one from 1024 on (0 for a free one)."
    return f"cannot listen at {host}, port {port}: {error.strerror or error}. Is it an address of this machine?"
