"""The running router: listens, ticks, and stops by finishing the requests it has."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time

from practicum.errors import RouterError
from practicum.reward.router.admin import Admin
from practicum.reward.router.client import ClientConnection
from practicum.reward.router.dispatcher import TICK_S, Dispatcher
from practicum.reward.router.pool import NOT_PROBED
from practicum.reward.router.settings import RouterSettings

# Connections that may wait to be accepted. An event loop's default of 100 makes bursts wait for a second.
BACKLOG = 4096


class RouterServer:
    """One router in the running event loop. `start` raises a `RouterError` when a port cannot be had."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._servers: list[asyncio.Server] = []
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
        self.port = await self._listen(settings.port, shared)
        if settings.admin_port is not None:
            try:
                self.admin_port = await self._listen(
                    settings.admin_port, Admin(self.dispatcher, settings.token, prefix="")
                )
            except RouterError:
                await self._stop_listening()
                raise
        self._tick()
        await self._first_probes()

    async def stop(self) -> None:
        """Take no new connections, finish the requests under way, and close. Waits `drain_timeout_s` at most."""
        self.dispatcher.draining = True
        await self._stop_listening()
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

    async def _listen(self, port: int, admin: Admin | None) -> int:
        host = self._settings.host
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            listener.close()
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            mine = " by this router itself" if port and port == self.port else ""
            advice = (
                "Choose another port, or 0 for a free one" if error.errno == errno.EADDRINUSE else "Check host and port"
            )
            raise RouterError(f"cannot listen at {host} port {port}: {reason}{mine}. {advice}.") from None
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: ClientConnection(self.dispatcher, admin), sock=listener, backlog=BACKLOG
        )
        self._servers.append(server)
        return int(listener.getsockname()[1])

    async def _stop_listening(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()

    def _tick(self) -> None:
        # The next one is set first: should this one raise, the loop logs it and the clock goes on.
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        self.dispatcher.tick()


def _url(host: str, port: int) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
