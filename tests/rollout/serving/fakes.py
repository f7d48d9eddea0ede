"""Services whose computation a test holds in its hands."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from practicum.rollout.inbox import Inbox, Ticket
from practicum.rollout.sleeping import SleepingWeights
from torch import nn

from practicum.demo.arithmetic import make_tokenizer
from practicum.models import load_config
from practicum.rollout.base import BaseRollout
from practicum.rollout.serving import ClassifyService, WritingService
from practicum.rollout.serving.classifier import Classifier
from practicum.rollout.serving.texts import Encoder, Limit
from practicum.types import FinishReason, RolloutRequest, Sample
from practicum.weights import WeightUpdate

WAIT_S = 20.0


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

    def scores(self, inputs: Sequence[NDArray[np.int32]]) -> list[float | Exception]:
        digits = [int(ids[0]) - 4 for ids in inputs]
        self.batches.append(digits)
        self.begun.release()
        if self._gated:
            assert self.go_on.acquire(timeout=WAIT_S)
        return [2.0 * digit if digit < 10 else ValueError("it is negative") for digit in digits]

    def service(self, names: frozenset[str] | None = None) -> ClassifyService:
        return ClassifyService("fake", cast(Classifier, self), max_batch_tokens=10, names=names)

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
        self.steps = threading.Semaphore(0)
        self.num_aborted = 0
        self.error: Exception | None = None
        self._version = 0
        self._awake = False

    def resume(self) -> None:
        self._awake = True

    def release(self) -> None:
        self._awake = False

    def update_weights(self, update: WeightUpdate) -> None:
        self._version = update.version

    def check(self, request: RolloutRequest) -> None:
        pass

    def log_probs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        raise NotImplementedError

    def write(self, inbox: Inbox) -> None:
        assert self._awake, "asked while asleep"
        running: list[tuple[Ticket, list[int]]] = []
        while running or not inbox.is_over:
            running += [(ticket, []) for ticket in inbox.take(100, 0.0 if running else 0.05)]
            if running and self.steps.acquire(timeout=0.01):
                for ticket, written in running:
                    written.append(5)
                    if ticket.on_tokens is not None:
                        ticket.on_tokens(0, [5], [-1.0])
            if self.error is not None:
                raise self.error
            for ticket, written in running:
                if len(written) == ticket.request.params.max_new_tokens:
                    self._done(ticket, written, "length")
                elif ticket.is_cancelled or inbox.is_aborted:
                    self.num_aborted += 1
                    self._done(ticket, written, "abort")
            running = [(ticket, written) for ticket, written in running if ticket.num_open]

    def _done(self, ticket: Ticket, written: list[int], reason: FinishReason) -> None:
        num = len(written)
        ids, log_probs = np.array(written, np.int32), np.full(num, -1.0, np.float32)
        mask, versions = np.ones(num, np.bool_), np.full(num, self._version, np.int32)
        request = ticket.request
        ticket.done(0, Sample(request.prompt, request.prompt_ids, ids, log_probs, mask, versions, "1" * num, reason))

    def service(self, model: Path) -> WritingService:
        return WritingService(
            "steps", self, model_config=load_config(str(model)), tokenizer=make_tokenizer(), dtype=torch.float32
        )
