"""An endpoint without a model, whose computation a test holds in its hands."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from practicum.reward.serving.batching import Job
from practicum.reward.serving.endpoint import Asked, Body, Endpoint
from practicum.reward.serving.texts import Limit
from practicum.reward.serving.weights import SleepingWeights

WAIT_S = 20.0


class FakeBody(Body):
    numbers: list[int]


class FakeEndpoint(Endpoint[FakeBody, int, int]):
    """Doubles numbers. If `gated`, each batch says when it has begun and waits to be let on."""

    path = "/classify"
    body_class = FakeBody

    def __init__(self, *, gated: bool = False) -> None:
        self.limit = Limit(7, "so it is")
        self.wake_error: Exception | None = None
        self.batches: list[list[int]] = []
        self.begun, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self._gated = gated
        self._saved = nn.Linear(1, 1)
        self.weights = SleepingWeights(copy.deepcopy(self._saved), torch.device("cpu"), self._load)

    def jobs(self, body: FakeBody) -> list[Job[int]]:
        return [Job(number, 1) for number in body.numbers]

    def compute(self, payloads: Sequence[int]) -> Sequence[int | Exception]:
        self.batches.append(list(payloads))
        self.begun.release()
        if self._gated:
            assert self.go_on.acquire(timeout=WAIT_S)
        return [2 * payload if payload >= 0 else ValueError("it is negative") for payload in payloads]

    def reply(self, asked: Asked[FakeBody, int], results: Sequence[int]) -> dict[str, Any]:
        return {"doubled": list(results)}

    def _load(self) -> nn.Module:
        if self.wake_error is not None:
            raise self.wake_error
        return copy.deepcopy(self._saved)
