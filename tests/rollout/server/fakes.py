"""Services whose computation a test holds in its hands."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Coroutine
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from practicum.demo.arithmetic import make_tokenizer
from practicum.errors import RolloutError
from practicum.models import load_config
from practicum.rollout.base import BaseRollout
from practicum.rollout.engine.sequence import Request, Sequence
from practicum.rollout.engine.sleep import SleepingWeights
from practicum.rollout.server import ClassificationService, GenerationService, ModelServer, Service
from practicum.rollout.server.classification import Classifier
from practicum.rollout.server.encoder import Encoder, Limit
from practicum.types import FinishReason
from practicum.weights import WeightUpdate

WAIT_S = 20.0
T = TypeVar("T")


class FakeClassifier:
    """Doubles digits, and minds a minus. If `gated`, each batch says when it has begun and waits to be let on."""

    def __init__(self, *, gated: bool = False) -> None:
        self.encoder = Encoder(make_tokenizer())
        self.limit = Limit(7, "so it is")
        self.label = "doubled"
        self.wake_error: Exception | None = None
        self.batches: list[list[int]] = []
        self.begun, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self._gated = gated
        self._saved = nn.Linear(1, 1)
        self.weights = SleepingWeights(copy.deepcopy(self._saved), torch.device("cpu"), self._load)

    def scores(self, inputs: Items[NDArray[np.int32]]) -> list[float | Exception]:
        digits = [int(ids[0]) - 4 for ids in inputs]
        self.batches.append(digits)
        self.begun.release()
        if self._gated:
            assert self.go_on.acquire(timeout=WAIT_S)
        return [2.0 * digit if digit < 10 else ValueError("it is negative") for digit in digits]

    def service(self, names: frozenset[str] | None = None) -> ClassificationService:
        return ClassificationService("fake", cast(Classifier, self), max_batch_tokens=10, names=names)

    def _load(self) -> nn.Module:
        if self.wake_error is not None:
            raise self.wake_error
        return copy.deepcopy(self._saved)


def doubled(answer: tuple[int, Any]) -> list[float]:
    status, body = answer
    assert status == 200, body
    return [entry["probs"][0] for entry in body["data"]]


class StepEngine(BaseRollout):
    """Writes `1` after `1`, one to every answer under way at each step, and a step only when it is let on."""

    def __init__(self) -> None:
        super().__init__()
        self.num_aborted = 0
        self.error: Exception | None = None
        self._version = 0
        self._is_closed = False
        self._num_steps = 0
        self._running: list[Sequence] = []
        self._tokenizer = make_tokenizer()
        self._loop: asyncio.AbstractEventLoop | None = None

    def step(self, num: int = 1) -> None:
        """From any thread: let it make so many more steps."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._add_steps, num)

    async def resume(self) -> None:
        self.is_awake, self._loop = True, asyncio.get_running_loop()

    async def release(self) -> None:
        self.is_awake = False

    async def update_weights(self, update: WeightUpdate) -> None:
        self._version = update.version

    async def log_probs(self, sequences: Any) -> list[NDArray[np.float32]]:
        raise NotImplementedError

    async def close(self) -> None:
        self._is_closed = True

    def check(self, request: Request) -> None:
        pass

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, sequences: list[Sequence]) -> None:
        if self._is_closed:
            raise RolloutError("the engine has been closed")
        assert self.is_awake, "asked while asleep"
        for sequence in sequences:
            sequence.begin((), self._tokenizer)
        self._running += sequences
        asyncio.get_running_loop().call_soon(self._write)

    def abort_submitted(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self.num_aborted += 1
            self._end(sequence, "abort")

    def _add_steps(self, num: int) -> None:
        self._num_steps += num
        self._write()

    def _write(self) -> None:
        while self._running and (self._num_steps or self.error):
            if self.error is not None:
                for sequence in self._running:
                    sequence.done.set_exception(self.error)
                self._running.clear()
                return
            self._num_steps -= 1
            for sequence in list(self._running):
                reason = sequence.push(5, -1.0)
                if sequence.on_tokens is not None:
                    sequence.on_tokens([5], [-1.0])
                if reason is not None:
                    self._end(sequence, reason)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._running.remove(sequence)
        sequence.done.set_result(sequence.to_sample(self._tokenizer, self._version, reason))

    def service(self, model: Path) -> GenerationService:
        config = load_config(str(model))
        return GenerationService("steps", self, model_config=config, tokenizer=self._tokenizer, dtype=torch.float32)


class Served:
    """A model server on an event loop of its own in a thread, for tests that ask from outside."""

    def __init__(self, service: Service, *, host: str = "127.0.0.1", is_awake: bool = True, **settings: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self.server = self.run(self._started(service, host, is_awake, settings))
        except BaseException:
            self._stop()
            raise
        self.url = self.server.url

    @staticmethod
    async def _started(service: Service, host: str, is_awake: bool, settings: dict[str, Any]) -> ModelServer:
        server = await ModelServer(service, host=host, **settings).start()
        if is_awake:
            await server.wake_up(WAIT_S)
        return server

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(2 * WAIT_S)

    def close(self, finish_s: float = 0.0) -> None:
        if not self._loop.is_closed():
            self.run(self.server.close(finish_s))
            self._stop()

    def _stop(self) -> None:
        self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
