"""An engine without a model, whose pace a test decides."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from practicum.errors import RolloutError
from practicum.rollout.answers import sample_of, untouched
from practicum.rollout.base import BaseRollout
from practicum.rollout.inbox import Inbox, Ticket
from practicum.types import RolloutRequest
from practicum.weights import WeightUpdate


class _Tokenizer:
    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(map(str, ids))


class FakeEngine(BaseRollout):
    """Writes one token a step for every answer it has taken, `max_batch` requests at a time; the token is its number.

    A step is taken when the test says `step()`, or freely after `let_go()`. It raises `fails_with` at the next step.
    """

    def __init__(self, max_batch: int = 4) -> None:
        self.max_batch = max_batch
        self.version = 0
        self.fails_with: Exception | None = None
        self.batches: list[list[str]] = []
        """The prompts it has begun with together."""
        self.is_awake = False
        self._steps = threading.Semaphore(0)
        self._is_free = False

    def step(self, num: int = 1) -> None:
        self._steps.release(num)

    def let_go(self) -> None:
        self._is_free = True
        self._steps.release()

    def resume(self) -> None:
        self.is_awake = True

    def release(self) -> None:
        self.is_awake = False

    def update_weights(self, update: WeightUpdate) -> None:
        self.version = update.version

    def check(self, request: RolloutRequest) -> None:
        if request.params.max_new_tokens > 1000:
            raise RolloutError(f"prompt {request.prompt.id} is too long")

    def log_probs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        return [np.zeros(len(ids) - 1, np.float32) for ids in sequences]

    def write(self, inbox: Inbox) -> None:
        running: list[tuple[Ticket, int, list[int]]] = []
        while running or not inbox.is_over:
            room = self.max_batch - len({id(ticket) for ticket, _, _ in running})
            taken = inbox.take(room, 0.0 if running else 0.05)
            if taken:
                self.batches.append([ticket.request.prompt.id for ticket in taken])
            running += [(t, n, []) for t in taken for n in range(t.request.params.num_answers)]
            if running and not (inbox.is_aborted or any(ticket.is_cancelled for ticket, _, _ in running)):
                if not self._is_free and not self._steps.acquire(timeout=0.02):
                    continue
                if self.fails_with is not None:
                    error, self.fails_with = self.fails_with, None
                    raise error
                for row in running:
                    row[2].append(len(row[2]))
            running = [row for row in running if not self._ended(row, inbox)]

    def _ended(self, row: tuple[Ticket, int, list[int]], inbox: Inbox) -> bool:
        ticket, answer, tokens = row
        before = 0 if ticket.request.written is None else len(ticket.request.written.token_ids)
        is_whole = before + len(tokens) >= ticket.request.params.max_new_tokens
        if not is_whole and not (inbox.is_aborted or ticket.is_cancelled):
            return False
        if not is_whole and not tokens:
            ticket.done(answer, untouched(ticket.request))
            return True
        ids = np.array(tokens, np.int32) + before
        reason = "length" if is_whole else "abort"
        made = sample_of(ticket.request, ids, np.zeros(len(ids), np.float32), self.version, reason, _Tokenizer())  # type: ignore[arg-type]
        ticket.done(answer, made)
        return True
