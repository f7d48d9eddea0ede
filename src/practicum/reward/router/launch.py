"""Where a router runs: in this process, in one of its own, or on a Ray cluster. It is the same router everywhere."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import uvloop

from practicum.errors import RouterError
from practicum.reward.router.handle import RouterHandle
from practicum.reward.router.server import RouterServer
from practicum.reward.router.settings import RouterSettings

if TYPE_CHECKING:
    from practicum.controller import RayResourcePool

# Beyond the time for draining, for a router to end.
STOP_S = 5.0


class Router:
    """A router as described by `RouterSettings`; nothing runs before one of these is called:

    - `run()`: here, until the process is told to stop
    - `start()`: in this process, on a thread of its own
    - `start_process()`: in a child process, which ends with this one at the latest
    - `start_actor()`: as an actor of a Ray cluster
    """

    def __init__(self, workers: Sequence[str] = (), **settings: Any) -> None:
        if isinstance(workers, str) or not isinstance(workers, Sequence):
            raise RouterError(f"workers={workers!r}: give a list of URLs, one for each worker.")
        self.settings = RouterSettings.make(workers=tuple(workers), **settings)

    def run(self, on_ready: Callable[[RouterServer], None] = lambda server: None) -> None:
        """Serve until SIGTERM or SIGINT, then drain. A second signal ends it at once."""
        serve_until_told(self.settings, on_ready)

    def start(self) -> RouterHandle:
        return RouterThread(self.settings)

    def start_process(self, timeout_s: float = 60.0) -> RouterProcess:
        return RouterProcess(self.settings, timeout_s)

    def start_actor(self, pool: RayResourcePool | None = None) -> RouterHandle:
        """On the first place of a pool, or on a node of Ray's choice. A loopback `host` becomes the node's address,
        since callers come from other nodes."""
        from practicum.reward.router.actor import RouterOnRay

        return RouterOnRay(self.settings, pool)


def serve_until_told(
    settings: RouterSettings, on_ready: Callable[[RouterServer], None], *, told_by_stdin: bool = False
) -> None:
    """Serve in this process until a signal comes or, if so asked, until standard input is closed."""

    async def serve() -> None:
        told = asyncio.Event()
        server = RouterServer(settings)
        await server.start()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _stop_now_or_later, told)
        if told_by_stdin:
            loop.add_reader(sys.stdin.fileno(), told.set)
        gc.collect()
        gc.freeze()  # what there is now stays: no need to look through it again and again
        on_ready(server)
        await told.wait()
        if told_by_stdin:
            loop.remove_reader(sys.stdin.fileno())
        await server.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


def _stop_now_or_later(told: asyncio.Event) -> None:
    if told.is_set():
        raise SystemExit(1)
    told.set()


class RouterThread(RouterHandle):
    """A router in this process, on a thread of its own."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._loop = uvloop.new_event_loop()
        self._server = RouterServer(settings)
        try:
            self._loop.run_until_complete(self._server.start())
        except RouterError:
            self._loop.close()
            raise
        super().__init__(self._server.url, self._server.admin_url, settings.token)
        self._thread = threading.Thread(target=self._loop.run_forever, name="practicum-router", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._loop.is_closed():
            return
        stopping = asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop)
        stopping.result(self._settings.drain_timeout_s + STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)
        self._loop.close()


class RouterProcess(RouterHandle):
    """A router in a child process. It drains and ends when its standard input closes, however this process ends."""

    def __init__(self, settings: RouterSettings, timeout_s: float) -> None:
        self._settings = settings
        self._process = subprocess.Popen(
            [sys.executable, "-m", "practicum.reward.router.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C at the terminal is for the parent, which will close the input
        )
        assert self._process.stdin is not None
        self.pid = self._process.pid
        try:
            self._process.stdin.write(settings.model_dump_json().encode() + b"\n")
            self._process.stdin.flush()
            told = self._first_words(timeout_s)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        super().__init__(told["url"], told["admin_url"], settings.token)

    def stop(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(self._settings.drain_timeout_s + STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _first_words(self, timeout_s: float) -> dict[str, str]:
        assert self._process.stdout is not None
        if not wait([self._process.stdout.fileno()], timeout_s):  # select refuses descriptors from 1024 on
            raise RouterError(f"the router's process (pid {self.pid}) was not ready within {timeout_s:g} s.")
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait(STOP_S)
            raise RouterError(f"the router's process (pid {self.pid}) ended with exit code {code} before it was ready.")
        told: dict[str, str] = json.loads(line)
        if "error" in told:
            raise RouterError(told["error"])
        return told
