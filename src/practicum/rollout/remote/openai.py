"""The engine `openai`: answers from any server that speaks the completions protocol and tells tokens and log-probs."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from practicum.errors import RolloutError
from practicum.models import load_tokenizer
from practicum.rollout.remote.completions import ServerFailure
from practicum.rollout.remote.dialect import shake_hands
from practicum.rollout.remote.engine import RemoteRollout
from practicum.rollout.remote.folders import eos_ids_of, write_folder
from practicum.weights import WeightUpdate

# Servers may be slow to load, and to hand memory back.
_CONTROL_S = 600.0
_ABSENT = (404, 405, 501)


class OpenAIRollout(RemoteRollout):
    """`servers` are addresses such as http://host:8000.

    `model_path` is the model that is trained: its tokenizer and end-of-text tokens count. `model` is what the servers
    call it; None takes the first they list. `router` is the address of a router in front of the servers; without one
    requests go to the servers in turn. Sleep, waking up and weights go to each of them. New weights pass through
    `exchange_dir`, a folder that the servers can read too.
    """

    def __init__(
        self,
        servers: Sequence[str],
        *,
        model_path: str,
        model: str | None = None,
        api_key_env: str | None = None,
        router: str | None = None,
        max_batch: int = 512,
        timeout_s: float = 300.0,
        exchange_dir: str | None = None,
    ) -> None:
        if not servers:
            raise RolloutError("the openai engine needs the address of a server: set rollout.openai.servers.")
        self._servers = [_base(server) for server in servers]
        self._fronts = itertools.cycle([_base(router)] if router is not None else self._servers)
        self._path = model_path
        self._model = model
        self._exchange_dir = exchange_dir
        super().__init__(
            tokenizer=load_tokenizer(model_path),
            eos_ids=eos_ids_of(model_path),
            max_batch=max_batch,
            timeout_s=timeout_s,
            api_key=_api_key(api_key_env),
        )

    def resume(self) -> None:
        self._everywhere("/wake_up")
        if self._dialect is None:
            # Every server is asked, since any of them may get a request; the last one's dialect counts for all.
            for server in self._servers:
                self._dialect = self._thread.run(shake_hands(self._client, server, self._model, self._tokenizer))
        self._awake = True

    def release(self) -> None:
        self._awake = False
        self._everywhere("/sleep")

    def update_weights(self, update: WeightUpdate) -> None:
        if self._known.owner != "practicum":
            raise RolloutError(
                f"server {self._name} cannot be given new weights, so a model cannot be trained with its answers. Only "
                "`practicum serve` can; or use rollout.engine=vllm or native."
            )
        with tempfile.TemporaryDirectory(prefix="weights-", dir=self._exchange_dir) as folder:
            write_folder(Path(folder), self._path, update.tensors)
            self._everywhere("/update_weights", {"path": folder, "version": update.version}, optional=False)
        self._version = update.version

    async def _score(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        if self._known.owner != "practicum":
            return await super()._score(sequences)
        found: list[list[float]] = []
        for server in self._servers:  # what one of them has taken wrongly, the others cannot excuse
            body = {"token_ids": [ids.tolist() for ids in sequences]}
            try:
                reply = await self._client.call(server, "POST", "/log_probs", body, _CONTROL_S)
            except ServerFailure as failure:
                raise RolloutError(f"{failure}.") from failure
            if found and reply["log_probs"] != found:
                raise RolloutError(f"servers {self._name} do not agree on log-probs: they hold different weights.")
            found = reply["log_probs"]
        return [np.array(one, np.float32) for one in found]

    def _address(self) -> str:
        return next(self._fronts)

    @property
    def _name(self) -> str:
        return ", ".join(self._servers)

    def _everywhere(self, path: str, body: Any = None, *, optional: bool = True) -> None:
        """What a server does not know is left out, where it is optional."""
        for server in self._servers:
            try:
                self._thread.run(self._client.call(server, "POST", path, body or {}, _CONTROL_S))
            except ServerFailure as failure:
                if not (optional and failure.status in _ABSENT):
                    raise RolloutError(f"{failure}.") from failure


def _base(address: str) -> str:
    """Without a path: many write the address with /v1 behind it."""
    if not address.startswith(("http://", "https://")):
        raise RolloutError(f"rollout.openai.servers: {address!r} is no address such as http://host:8000.")
    return address.rstrip("/").removesuffix("/v1").rstrip("/")


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise RolloutError(f"rollout.openai.api_key_env={variable}, but there is no such environment variable.")
    return key
