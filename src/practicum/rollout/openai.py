"""The engine `openai`: answers from any server that speaks the completions protocol and returns tokens and log-probs.

    healthy ─ does not answer, or answers with other weights than it was given ─▶ excluded
      ▲                                                                             │ answers again
      └── has the newest weights, and the log-probs of the others ◀── the next update

A server that was ended and started again has the weights it was started with. So an excluded one stays out until it has
been given new ones; only servers that take none are asked again as soon as they answer. The router in front is told
which have the newest weights, and sends nothing to the others.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
from numpy.typing import NDArray

from practicum.adapters import LoneAdapters
from practicum.errors import RolloutError
from practicum.rollout.engine.sequence import Sequence
from practicum.rollout.engines import EngineSettings
from practicum.rollout.remote.capabilities import probe
from practicum.rollout.remote.client import CompletionsClient, ServerFailure
from practicum.rollout.remote.engine import CONTROL_TIMEOUT_S, RemoteRollout
from practicum.weights import WeightUpdate

log = logging.getLogger("practicum.rollout")
_INTERVAL_S = 2.0
_HEALTH_S = 10.0  # a busy machine takes its time even for this
_PAUSE_S = 0.5
_UNKNOWN_PATH = (404, 405, 501)
_OURS = "practicum"


class OpenAIRollout(RemoteRollout):
    """`servers` are addresses such as http://host:8000.

    `model_path` is the model that is trained: its tokenizer and end-of-text tokens count. `model` is what the servers
    call it; None takes the first they list. `router` is the address of a router in front of the servers; without one
    requests go to the servers in turn. Sleep, waking up and weights go to each of them. New weights pass through
    `exchange_dir`, a folder that the servers can read too. `router_token` is what the router wants to see; without
    it the router is not told who has the newest weights.
    """

    def __init__(
        self,
        servers: Items[str],
        *,
        model_path: str,
        model: str | None = None,
        api_key_env: str | None = None,
        router: str | None = None,
        router_token: str | None = None,
        max_batch: int = 512,
        adapters: LoneAdapters | None = None,
        timeout_s: float = 300.0,
        exchange_dir: str | None = None,
    ) -> None:
        if not servers:
            raise RolloutError("the openai engine needs the address of a server: set rollout.openai.servers.")
        self._addresses = [server_address(server) for server in servers]
        self._router = None if router is None else server_address(router)
        tokens = {} if self._router is None or router_token is None else {self._router: router_token}
        client = CompletionsClient(api_key=api_key(api_key_env), timeout_s=timeout_s, router_tokens=tokens)
        super().__init__(
            client, model_path=model_path, max_batch=max_batch, adapters=adapters, exchange_dir=exchange_dir
        )
        self._model = model
        self._control = None if router_token is None else CompletionsClient(api_key=router_token)
        self._next = itertools.count()
        self._excluded: dict[str, str] = {}  # servers, and why
        self._probed: set[str] = set()
        self._returned: set[str] = set()  # servers that got weights with the last update, after they had been excluded
        self._given_version: int | None = None  # of the weights of servers; None: those they were started with
        self._refreshing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, settings: EngineSettings) -> OpenAIRollout:
        return cls(
            settings.openai.servers,
            model_path=settings.model_path,
            model=settings.openai.model,
            api_key_env=settings.openai.api_key_env,
            router=settings.router,
            router_token=settings.router_token,
            max_batch=settings.max_batch,
            adapters=settings.adapters,
            timeout_s=settings.timeout_s,
            exchange_dir=settings.exchange_dir,
        )

    async def resume(self) -> None:
        # Every server is probed, since any of them may get a request; the last one's capabilities count for all.
        await asyncio.gather(*map(self._probe_or_exclude, self._healthy))
        self._check_any()
        self.is_awake = True

    async def release(self) -> None:
        for server in self._healthy:
            try:
                await self._switch(server, "/sleep")
            except ServerFailure as failure:
                await self._exclude_or_raise(server, failure)
        self.is_awake = False

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._control is not None:
            await self._control.close()
        await super().close()

    def submit(self, sequences: list[Sequence]) -> None:
        super().submit(sequences)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def update_weights(self, update: WeightUpdate) -> None:
        if self._known.owner != _OURS:
            raise RolloutError(
                f"server {self._name} cannot be given new weights, so a model cannot be trained with its answers. Only "
                "`practicum serve` can; or use rollout.engine=vllm or native."
            )
        await super().update_weights(update)

    async def log_probs(self, sequences: Items[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        assert self.is_awake, "log_probs before resume"
        if self._known.owner != _OURS:
            return await super().log_probs(sequences)
        body = {"token_ids": [ids.tolist() for ids in sequences]}
        found: list[list[float]] = []
        for server in sorted(self._healthy, key=lambda server: server in self._returned):
            try:
                reply = await self._client.call(server, "POST", "/log_probs", body, CONTROL_TIMEOUT_S)
            except ServerFailure as failure:
                await self._exclude_or_raise(server, failure)
                continue
            if found and reply["log_probs"] != found:  # what one has taken wrongly, the others cannot excuse
                if server not in self._returned:
                    raise RolloutError(f"servers {self._name} do not agree on log-probs: they hold different weights.")
                await self._exclude(server, "its log-probs are not those of the others")
                continue
            found = reply["log_probs"]
        self._check_any()
        return [np.array(one, np.float32) for one in found]

    async def _watch(self) -> None:
        """Check the servers while answers are written, but not while they take new weights."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            if not self._tasks and not self._waiting:
                return
            await self._refresh()
            try:
                self._check_any()
            except RolloutError as error:
                self._fail(error)

    async def _exclude_or_raise(self, server: str, failure: ServerFailure) -> None:
        if not failure.is_transient:
            raise RolloutError(f"{failure}.") from failure
        await self._exclude(server, str(failure))

    async def _probe_or_exclude(self, server: str) -> None:
        try:
            await self._probe(server)
        except ServerFailure as failure:
            await self._exclude_or_raise(server, failure)
        except RolloutError as error:
            cause = error.__cause__
            if not isinstance(cause, ServerFailure) or not cause.is_transient:
                raise
            await self._exclude(server, str(cause))

    async def _switch(self, server: str, path: str) -> None:
        """Have a server sleep or wake up, if it knows how to."""
        try:
            await self._client.call(server, "POST", path, {}, CONTROL_TIMEOUT_S)
        except ServerFailure as failure:
            if failure.status not in _UNKNOWN_PATH:
                raise

    async def _probe(self, server: str) -> None:
        await self._switch(server, "/wake_up")
        if server not in self._probed:
            self._capabilities = await probe(self._client, server, self._model, self._tokenizer)
            self._probed.add(server)

    async def _load(self, folder: str, version: int) -> None:
        """Give new weights to healthy servers, and to excluded ones that answer again; adapters are merged there."""
        await self._refresh()
        excluded = list(self._excluded)
        returned = await asyncio.gather(*map(self._has_returned, excluded))
        self._returned = {server for server, is_back in zip(excluded, returned, strict=True) if is_back}
        asked = [server for server in self._addresses if server in {*self._healthy, *self._returned}]

        async def give(server: str) -> bool:
            try:
                body = {"path": folder, "version": version}
                await self._client.call(server, "POST", "/update_weights", body, CONTROL_TIMEOUT_S)
            except ServerFailure as failure:
                if server in self._returned:
                    await self._exclude(server, str(failure))
                else:
                    await self._exclude_or_raise(server, failure)
                return False
            return True

        took = await asyncio.gather(*map(give, asked))
        newest = [server for server, has_taken in zip(asked, took, strict=True) if has_taken]
        try:
            await self._set_version(newest, version)
        except ServerFailure as failure:
            raise RolloutError(f"the router was not told of new weights: {failure}.") from failure
        self._check_any()

    async def _has_returned(self, server: str) -> bool:
        """Return whether an excluded server answers again as one of ours."""
        if await self._problem(server, minds_version=False):
            return False
        self._probed.discard(server)
        before = self._capabilities
        try:
            await self._probe(server)
        except (ServerFailure, RolloutError) as failure:
            log.warning("server %s answers, but is of no use: %s", server, failure)
        is_same, self._capabilities = self._capabilities == before and server in self._probed, before
        return is_same

    def _expects(self, version: int) -> bool:
        return self._given_version in (None, version)

    @property
    def _name(self) -> str:
        return ", ".join(self._addresses)

    # The servers: which are healthy, which are excluded and why

    @property
    def _healthy(self) -> list[str]:
        return [server for server in self._addresses if server not in self._excluded]

    def _check_any(self) -> None:
        """Raise `RolloutError` where no server is healthy."""
        if not self._healthy:
            reasons = "; ".join(f"{server}: {reason}" for server, reason in self._excluded.items())
            raise RolloutError(f"none of rollout.openai.servers can be asked any more. {reasons}.")

    def _address(self) -> str:
        """Return where the next request goes: to the router, or to each server in turn."""
        self._check_any()
        if self._router is not None:
            return self._router
        healthy = self._healthy
        return healthy[next(self._next) % len(healthy)]

    async def _exclude(self, server: str, reason: str) -> None:
        if server in self._excluded:
            return
        log.warning("server %s is left out until it is healthy and has the newest weights: %s", server, reason)
        self._excluded[server] = reason
        try:
            await self._tell_router(url=server, version=0)
        except ServerFailure as failure:  # its answers say which weights they are from
            log.warning("the router was not told that %s is excluded: %s", server, failure)

    def _include(self, server: str, remark: str = "") -> None:
        if self._excluded.pop(server, None) is not None:
            log.warning("server %s is back%s", server, remark)

    async def _set_version(self, servers: Items[str], version: int) -> None:
        """Record that these servers, and no others, have the weights of this version now."""
        self._given_version = version
        for server in servers:
            self._include(server, ", with the newest weights")
        # Not the version of the weights, which may go back with a checkpoint: no other server may count as newer.
        number = time.time_ns() // 1_000_000
        for server in servers:
            await self._tell_router(url=server, version=number)
        await self._tell_router(version=number)

    async def _refresh(self) -> None:
        """Find out which servers are healthy, once for all requests that ask for it at a time."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.get_running_loop().create_task(self._find_healthy())
        await asyncio.shield(self._refreshing)

    async def _problem(self, server: str, *, minds_version: bool = True) -> str:
        """Return what keeps a server from being asked; an empty text where nothing does."""
        try:
            reply = await self._health(server)
        except ServerFailure:
            await asyncio.sleep(_PAUSE_S)
            try:
                reply = await self._health(server)
            except ServerFailure as failure:
                return str(failure)
        found = reply.get("weight_version") if isinstance(reply, dict) else None
        if minds_version and None not in (found, self._given_version) and found != self._given_version:
            return f"it has weights of version {found}, not {self._given_version}: it may have been started again"
        return ""

    async def _find_healthy(self) -> None:
        # Those that take no weights may be asked again as soon as they answer.
        asked = self._addresses if self._given_version is None else self._healthy
        problems = await asyncio.gather(*map(self._problem, asked))
        for server, reason in zip(asked, problems, strict=True):
            if reason:
                await self._exclude(server, reason)
            else:
                self._include(server)

    async def _health(self, server: str) -> Any:
        try:
            return await self._client.call(server, "GET", "/health", timeout_s=_HEALTH_S)
        except ServerFailure as failure:
            if failure.is_transient and (failure.status is None or failure.status >= 500):
                raise
            return None  # it does not know this path, but it answers

    async def _tell_router(self, **fields: Any) -> None:
        if self._control is not None and self._router is not None:
            await self._control.call(self._router, "POST", "/router/version", fields, _HEALTH_S)


def server_address(address: str) -> str:
    """Return the address without a path: many write /v1 behind it."""
    if not address.startswith(("http://", "https://")):
        raise RolloutError(f"rollout.openai.servers: {address!r} is no address such as http://host:8000.")
    return address.rstrip("/").removesuffix("/v1").rstrip("/")


def api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise RolloutError(f"rollout.openai.api_key_env={variable}, but there is no such environment variable.")
    return key
