"""A model behind HTTP, on a thread with its own event loop, in whichever process holds the model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from aiohttp import web

from practicum.reward.serving.app import ModelApp
from practicum.reward.serving.endpoint import Endpoint

T = TypeVar("T")
_STOP_S = 10.0


class ModelServer:
    """Serves from the moment it is made until `close`, at a free port of `host`."""

    def __init__(self, name: str, endpoint: Endpoint[Any, Any, Any], *, host: str, max_batch_tokens: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="practicum-model-server", daemon=True)
        self._thread.start()
        self._model: ModelApp
        self._runner: web.AppRunner
        try:
            port = self._call(self._start(name, endpoint, host, max_batch_tokens), _STOP_S, "starting")
        except BaseException:
            self._stop_loop()
            raise
        self.url = f"http://{host}:{port}"

    def sleep(self, timeout_s: float) -> None:
        """Once the requests under way are answered."""
        self._call(self._model.sleep(), timeout_s, "falling asleep")

    def wake_up(self, timeout_s: float) -> None:
        self._call(self._model.wake_up(), timeout_s, "waking up")

    def close(self) -> None:
        """Requests under way are broken off. Closing twice does nothing."""
        if self._loop.is_closed():
            return
        try:
            self._call(self._stop(), _STOP_S, "stopping")
        finally:
            self._stop_loop()

    async def _start(self, name: str, endpoint: Endpoint[Any, Any, Any], host: str, max_batch_tokens: int) -> int:
        self._model = ModelApp(name, endpoint, max_batch_tokens)
        # A handler is cancelled when its client goes away, so that nothing is computed for nobody.
        self._runner = web.AppRunner(self._model.app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, 0, backlog=1024).start()
        return int(self._runner.addresses[0][1])

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._model.close()
        await self._loop.shutdown_default_executor()

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
