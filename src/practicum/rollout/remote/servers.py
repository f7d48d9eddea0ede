"""The servers of one engine: who may be asked, who is lost, and who has the weights of now.

    well ─ does not answer, or answers with other weights than it was given ─▶ lost
      ▲                                                                          │ answers again
      └── has the newest weights, and the log-probs of the others ◀── the next update

A server that was ended and started again has the weights it was started with. So whoever is lost stays out until it has
been given new ones; only servers that take none are asked again as soon as they answer. The router in front is told who
has the weights of now, and sends nothing to the others.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence
from typing import Any

from practicum.errors import RolloutError
from practicum.rollout.remote.completions import CompletionsClient, ServerFailure, Transport

log = logging.getLogger("practicum.rollout")
_EVERY_S = 2.0
_LOOK_S = 10.0  # a machine with much to do takes its time even for this
_PAUSE_S = 0.5


class Servers:
    """`router` is an address too, that of a router in front; `control` is who asks it for its control plane.

    Beside what is only read, all of it is for the event loop's thread.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        client: Transport,
        router: str | None = None,
        control: CompletionsClient | None = None,
    ) -> None:
        self.addresses = list(addresses)
        self.lost: dict[str, str] = {}  # and why
        self.version: int | None = None
        """Of the weights that they were given; None: they have those they were started with."""
        self._client = client
        self._router = router
        self._control = control
        self._turns = itertools.count()
        self._looking: asyncio.Task[None] | None = None

    @property
    def well(self) -> list[str]:
        return [server for server in self.addresses if server not in self.lost]

    def check_hope(self) -> None:
        if not self.well:
            told = "; ".join(f"{server}: {why}" for server, why in self.lost.items())
            raise RolloutError(f"none of rollout.openai.servers can be asked any more. {told}.")

    def front(self) -> str:
        """Where the next request goes: to the router, or to each in turn."""
        self.check_hope()
        if self._router is not None:
            return self._router
        well = self.well
        return well[next(self._turns) % len(well)]

    async def lose(self, server: str, why: str) -> None:
        if server in self.lost:
            return
        log.warning("server %s is left out until it is well and has the newest weights: %s", server, why)
        self.lost[server] = why
        try:
            await self._tell_router(url=server, version=0)
        except ServerFailure as failure:  # its answers tell which weights they are from
            log.warning("the router was not told that %s is lost: %s", server, failure)

    async def given(self, servers: Sequence[str], version: int) -> None:
        """These have the weights of this version now, and nobody else."""
        self.version = version
        for server in servers:
            if self.lost.pop(server, None) is not None:
                log.warning("server %s is back, with the newest weights", server)
        # Not the version of the weights, which may go back with a checkpoint: nobody must count as newer than this.
        number = time.time_ns() // 1_000_000
        for server in servers:
            await self._tell_router(url=server, version=number)
        await self._tell_router(version=number)

    async def look(self) -> None:
        """At all of them, once for all who ask for it at a time."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        await asyncio.shield(self._looking)

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            await self.look()

    async def problem(self, server: str, *, minds_version: bool = True) -> str:
        """What keeps it from being asked; empty where nothing does."""
        try:
            told = await self._health(server)
        except ServerFailure:
            await asyncio.sleep(_PAUSE_S)
            try:
                told = await self._health(server)
            except ServerFailure as failure:
                return str(failure)
        found = told.get("weight_version") if isinstance(told, dict) else None
        if minds_version and None not in (found, self.version) and found != self.version:
            return f"it has weights of version {found}, not {self.version}: it may have been started again"
        return ""

    async def _look(self) -> None:
        # Those that take no weights may be asked again as soon as they answer.
        looked_at = self.addresses if self.version is None else self.well
        problems = await asyncio.gather(*map(self.problem, looked_at))
        for server, why in zip(looked_at, problems, strict=True):
            if why:
                await self.lose(server, why)
            elif self.lost.pop(server, None) is not None:
                log.warning("server %s is back", server)

    async def _health(self, server: str) -> Any:
        try:
            return await self._client.call(server, "GET", "/health", timeout_s=_LOOK_S)
        except ServerFailure as failure:
            if failure.may_pass and (failure.status is None or failure.status >= 500):
                raise
            return None  # not everybody knows this path, but whoever says so is there

    async def _tell_router(self, **fields: Any) -> None:
        if self._control is not None and self._router is not None:
            await self._control.call(self._router, "POST", "/router/version", fields, _LOOK_S)
