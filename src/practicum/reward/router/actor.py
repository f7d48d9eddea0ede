"""A router as an actor of a Ray cluster: reachable from all its nodes, driven from the one that started it."""

from __future__ import annotations

import secrets
from urllib.parse import urlsplit

from practicum.controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker
from practicum.controller.host import host_address
from practicum.reward.router.launch import STOP_S, RouterHandle, RouterThread
from practicum.reward.router.settings import RouterSettings

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_EVERYWHERE = ("0.0.0.0", "::")


class RouterActor(Worker):
    def __init__(self, settings: RouterSettings) -> None:
        if settings.host in _LOOPBACK:  # callers on other nodes would not reach it there
            settings = settings.model_copy(update={"host": host_address()})
        self._host = host_address() if settings.host in _EVERYWHERE else None
        self._router = RouterThread(settings)

    def addresses(self) -> tuple[str, str]:
        """Return the addresses for callers on other nodes."""
        return self._seen_from_outside(self._router.url), self._seen_from_outside(self._router.admin_url)

    def _seen_from_outside(self, url: str) -> str:
        parts = urlsplit(url)
        return url if self._host is None else parts._replace(netloc=f"{self._host}:{parts.port}").geturl()

    def stop(self) -> None:
        self._router.stop()


class RouterOnRay(RouterHandle):
    """A router in an actor. Callers come from other machines, so that its control plane always has a token."""

    def __init__(self, settings: RouterSettings, pool: RayResourcePool | None) -> None:
        token = settings.token or secrets.token_urlsafe()
        settings = settings.model_copy(update={"token": token})
        self._own_pool = RayResourcePool([1]) if pool is None else None
        place = self._own_pool if pool is None else pool.sub_pool([0])
        assert place is not None
        try:
            self._group = RayWorkerGroup(
                place,
                RayClassWithInitArgs(RouterActor, settings),
                timeout_s=settings.drain_timeout_s + 2 * STOP_S,
            )
        except BaseException:
            if self._own_pool is not None:
                self._own_pool.release()
            raise
        url, admin_url = self._group.execute_rank_zero(RouterActor.addresses)
        self._stopped = False
        super().__init__(url, admin_url, token)
        self.token = token

    def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        try:
            self._group.execute_all(RouterActor.stop)
        finally:
            self._group.shutdown()
            if self._own_pool is not None:
                self._own_pool.release()
