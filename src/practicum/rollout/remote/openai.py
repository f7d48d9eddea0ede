"""The engine `openai`: answers from any server that speaks the completions protocol and tells tokens and log-probs."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from practicum.adapters import LoneAdapters, write_adapters
from practicum.errors import RolloutError
from practicum.models import load_tokenizer
from practicum.rollout.remote.completions import CompletionsClient, ServerFailure
from practicum.rollout.remote.dialect import shake_hands
from practicum.rollout.remote.engine import RemoteRollout
from practicum.rollout.remote.folders import eos_ids_of, write_folder
from practicum.rollout.remote.servers import Servers
from practicum.weights import WeightUpdate

log = logging.getLogger("practicum.rollout")
# Servers may be slow to load, and to hand memory back.
_CONTROL_S = 600.0
_ABSENT = (404, 405, 501)
_OURS = "practicum"


class OpenAIRollout(RemoteRollout):
    """`servers` are addresses such as http://host:8000.

    `model_path` is the model that is trained: its tokenizer and end-of-text tokens count. `model` is what the servers
    call it; None takes the first they list. `router` is the address of a router in front of the servers; without one
    requests go to the servers in turn. Sleep, waking up and weights go to each of them. New weights pass through
    `exchange_dir`, a folder that the servers can read too. `router_token` is for the router's control plane; without
    it the router is not told who has the weights of now.
    """

    def __init__(
        self,
        servers: Sequence[str],
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
        addresses = [server_address(server) for server in servers]
        self._path = model_path
        self._model = model
        self._exchange_dir = exchange_dir
        self._adapters = adapters
        super().__init__(
            CompletionsClient(api_key=api_key(api_key_env), timeout_s=timeout_s),
            tokenizer=load_tokenizer(model_path),
            eos_ids=eos_ids_of(model_path),
            max_batch=max_batch,
        )
        self._control = None if router_token is None else CompletionsClient(api_key=router_token)
        front = None if router is None else server_address(router)
        self._servers = Servers(addresses, self._client, front, self._control)
        self._greeted: set[str] = set()
        self._newcomers: set[str] = set()

    def resume(self) -> None:
        self._thread.run(self._greet_all())
        self._awake = True

    def release(self) -> None:
        self._awake = False
        self._thread.run(self._put_to_sleep())

    def close(self) -> None:
        if self._control is not None and not self._thread.loop.is_closed():
            self._thread.run(self._control.close())
        super().close()

    def update_weights(self, update: WeightUpdate) -> None:
        if self._known.owner != _OURS:
            raise RolloutError(
                f"server {self._name} cannot be given new weights, so a model cannot be trained with its answers. Only "
                "`practicum serve` can; or use rollout.engine=vllm or native."
            )
        with tempfile.TemporaryDirectory(prefix="weights-", dir=self._exchange_dir) as folder:
            if self._adapters is None:
                write_folder(Path(folder), self._path, update.tensors)
            else:  # servers merge them when they load the folder
                write_adapters(Path(folder), self._adapters, update.tensors)
            self._thread.run(self._give({"path": folder, "version": update.version}))
        self._version = update.version

    async def _greet_all(self) -> None:
        """Every server is asked, since any of them may get a request; the last one's dialect counts for all."""
        await asyncio.gather(*map(self._greet_or_lose, self._servers.well))
        self._servers.check_hope()

    async def _greet_or_lose(self, server: str) -> None:
        try:
            await self._greet(server)
        except (ServerFailure, RolloutError) as error:
            failure = error.__cause__ if isinstance(error, RolloutError) else error
            if not isinstance(failure, ServerFailure) or not failure.may_pass:
                raise (error if isinstance(error, RolloutError) else RolloutError(f"{error}.")) from failure
            await self._servers.lose(server, str(failure))

    async def _greet(self, server: str) -> None:
        try:
            await self._client.call(server, "POST", "/wake_up", {}, _CONTROL_S)
        except ServerFailure as failure:
            if failure.status not in _ABSENT:
                raise
        if server not in self._greeted:
            self._dialect = await shake_hands(self._client, server, self._model, self._tokenizer)
            self._greeted.add(server)

    async def _put_to_sleep(self) -> None:
        for server in self._servers.well:
            try:
                await self._client.call(server, "POST", "/sleep", {}, _CONTROL_S)
            except ServerFailure as failure:
                if failure.status in _ABSENT:
                    continue
                if not failure.may_pass:
                    raise RolloutError(f"{failure}.") from failure
                await self._servers.lose(server, str(failure))

    async def _give(self, body: Mapping[str, Any]) -> None:
        """To those that are well, and to those that were lost and answer again."""
        await self._servers.look()
        self._newcomers = set(filter(None, await asyncio.gather(*map(self._back, self._servers.lost))))
        asked = [server for server in self._servers.addresses if server in {*self._servers.well, *self._newcomers}]

        async def give(server: str) -> bool:
            try:
                await self._client.call(server, "POST", "/update_weights", body, _CONTROL_S)
            except ServerFailure as failure:
                if not failure.may_pass and server not in self._newcomers:
                    raise RolloutError(f"{failure}.") from failure
                await self._servers.lose(server, str(failure))
                return False
            return True

        took = await asyncio.gather(*map(give, asked))
        newest = [server for server, has_taken in zip(asked, took, strict=True) if has_taken]
        try:
            await self._servers.given(newest, int(body["version"]))
        except ServerFailure as failure:
            raise RolloutError(f"the router was not told of new weights: {failure}.") from failure
        self._servers.check_hope()

    async def _back(self, server: str) -> str | None:
        """Whether it answers again as one of ours."""
        if await self._servers.problem(server, minds_version=False):
            return None
        self._greeted.discard(server)
        before = self._dialect
        try:
            await self._greet(server)
        except (ServerFailure, RolloutError) as failure:
            log.warning("server %s answers, but is of no use: %s", server, failure)
        is_same, self._dialect = self._dialect == before and server in self._greeted, before
        return server if is_same else None

    async def _score(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        if self._known.owner != _OURS:
            return await super()._score(sequences)
        body = {"token_ids": [ids.tolist() for ids in sequences]}
        found: list[list[float]] = []
        for server in sorted(self._servers.well, key=lambda server: server in self._newcomers):
            try:
                reply = await self._client.call(server, "POST", "/log_probs", body, _CONTROL_S)
            except ServerFailure as failure:
                if not failure.may_pass:
                    raise RolloutError(f"{failure}.") from failure
                await self._servers.lose(server, str(failure))
                continue
            if found and reply["log_probs"] != found:  # what one has taken wrongly, the others cannot excuse
                if server not in self._newcomers:
                    raise RolloutError(f"servers {self._name} do not agree on log-probs: they hold different weights.")
                await self._servers.lose(server, "its log-probs are not those of the others")
                continue
            found = reply["log_probs"]
        self._servers.check_hope()
        return [np.array(one, np.float32) for one in found]

    def _address(self) -> str:
        return self._servers.front()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        watching = asyncio.run_coroutine_threadsafe(self._servers.watch(), self._thread.loop)
        try:
            yield
        finally:
            watching.cancel()

    def _check_hope(self) -> None:
        self._servers.check_hope()

    async def _after_failure(self) -> None:
        await self._servers.look()

    def _expects(self, version: int) -> bool:
        return self._servers.version in (None, version)

    @property
    def _name(self) -> str:
        return ", ".join(self._servers.addresses)


def server_address(address: str) -> str:
    """Without a path: many write the address with /v1 behind it."""
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
