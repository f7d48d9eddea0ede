"""The running router: listens, ticks, and stops by finishing the requests it has.

a connection comes ─▶ descriptors for it and for a worker's? accepted ─ no ─▶ it waits in the kernel's queue; until
one has gone, responses end their connections, so that all have their turn
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import time
from collections.abc import Callable

from practicum.errors import RouterError
from practicum.reward.router.admin import Admin
from practicum.reward.router.client import ClientConnection
from practicum.reward.router.dispatcher import TICK_S, Dispatcher
from practicum.reward.router.pool import NOT_PROBED
from practicum.reward.router.settings import RouterSettings

log = logging.getLogger("practicum.router")

# Connections that may wait to be accepted. An event loop's default of 100 makes bursts wait for a second.
BACKLOG = 4096
_MOST_AT_ONCE = 64  # that are accepted in one turn of the event loop
_MOST_DESCRIPTORS = 65_536  # what the soft limit is raised to, where the hard one allows it
# Left for probes, look-ups of names, files and, in a process that does other things too, for those.
_SPARE_DESCRIPTORS = 32
_LOG_EVERY_S = 60.0


class RouterServer:
    """One router in the running event loop. `start` raises a `RouterError` when a port cannot be had."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._listeners: dict[socket.socket, Callable[[], ClientConnection]] = {}
        self._accepting: set[asyncio.Task[object]] = set()
        self._is_paused = False
        self._most_clients = 1
        self._logged = -_LOG_EVERY_S
        self._timer: asyncio.TimerHandle | None = None
        self.dispatcher = Dispatcher(settings)
        self.port = 0
        self.admin_port: int | None = None

    @property
    def url(self) -> str:
        return _url(self._settings.host, self.port)

    @property
    def admin_url(self) -> str:
        """The URL that the control plane's calls begin with."""
        return f"{self.url}/router" if self.admin_port is None else _url(self._settings.host, self.admin_port)

    async def start(self) -> None:
        settings = self._settings
        shared = Admin(self.dispatcher, settings.token) if settings.admin_port is None else None
        self.port = self._listen(settings.port, shared)
        if settings.admin_port is not None:
            try:
                self.admin_port = self._listen(settings.admin_port, Admin(self.dispatcher, settings.token, prefix=""))
            except RouterError:
                self._stop_listening()
                raise
        room = max(2, raise_descriptor_limit() - len(os.listdir("/dev/fd")) - _SPARE_DESCRIPTORS)
        self._most_clients = self.dispatcher.most_connections = room // 2  # each has a worker's connection at most
        self.dispatcher.on_room = self._resume
        self._resume()
        self._tick()
        await self._first_probes()

    async def stop(self) -> None:
        """Take no new connections, finish the requests under way, and close. Waits `drain_timeout_s` at most."""
        self.dispatcher.draining = True
        self._stop_listening()
        deadline = time.monotonic() + self._settings.drain_timeout_s
        while time.monotonic() < deadline and (self.dispatcher.num_unfinished or self.dispatcher.clients):
            for client in list(self.dispatcher.clients):
                client.close_if_idle()
            await asyncio.sleep(TICK_S if self.dispatcher.num_unfinished else TICK_S / 5)  # to send the last responses
        for client in list(self.dispatcher.clients):
            client.close()
        if self._timer is not None:
            self._timer.cancel()
        self.dispatcher.health.stop()
        self.dispatcher.pool.close_connections()
        await asyncio.sleep(0)  # let the transports go

    async def _first_probes(self) -> None:
        """Wait until all workers are probed, so that the first requests find those that are there."""
        deadline = time.monotonic() + self._settings.probe_timeout_s
        while any(upstream.reason == NOT_PROBED for upstream in self.dispatcher.pool) and time.monotonic() < deadline:
            await asyncio.sleep(0.002)

    def _listen(self, port: int, admin: Admin | None) -> int:
        host = self._settings.host
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            mine = " by this router itself" if port and port == self.port else ""
            advice = (
                "Choose another port, or 0 for a free one" if error.errno == errno.EADDRINUSE else "Check host and port"
            )
            raise RouterError(f"cannot listen at {host} port {port}: {reason}{mine}. {advice}.") from None
        listener.setblocking(False)
        self._listeners[listener] = lambda: ClientConnection(self.dispatcher, admin)
        self._is_paused = True  # until `start` is done
        return int(listener.getsockname()[1])

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        self._listeners.clear()

    def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_MOST_AT_ONCE):
            if not self._has_room:
                self._pause(f"all {self._most_clients} that its descriptors are enough for")
                return
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                self.dispatcher.is_crowded = False
                return
            except OSError as error:  # this process has other uses for descriptors too
                self._pause(os.strerror(error.errno or 0))
                return
            connection.setblocking(False)
            task = loop.create_task(loop.connect_accepted_socket(self._listeners[listener], connection))
            self._accepting.add(task)
            task.add_done_callback(self._accepted)

    def _accepted(self, task: asyncio.Task[object]) -> None:
        self._accepting.discard(task)
        if not task.cancelled() and task.exception() is not None:  # it has gone again
            self._resume()

    @property
    def _has_room(self) -> bool:
        return len(self.dispatcher.clients) + len(self._accepting) < self._most_clients

    def _pause(self, reason: str) -> None:
        self._is_paused = self.dispatcher.is_crowded = True
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
        now = time.monotonic()
        if now - self._logged > _LOG_EVERY_S:
            self._logged = now
            log.warning("clients wait to be accepted: %s. Raise the limit of descriptors (ulimit -n).", reason)

    def _resume(self) -> None:
        if self._is_paused and self._has_room:
            self._is_paused = False
            for listener in self._listeners:
                asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _tick(self) -> None:
        # The next one is set first: should this one raise, the loop logs it and the clock goes on.
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        self.dispatcher.tick()
        self._resume()


def raise_descriptor_limit() -> int:
    """Raise the soft limit of this process as far as is of use and allowed. Return what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 1 << 20
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)


def _url(host: str, port: int) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
