"""An engine whose every word is known beforehand."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from practicum.rollout.answers import Ending, sample_of, untouched, written_ids
from practicum.rollout.inbox import Inbox

from practicum.rollout.base import BaseRollout
from practicum.types import RolloutRequest, RoutedExperts
from practicum.weights import WeightUpdate


class ScriptedEngine(BaseRollout):
    """Answers by `says(what it was given, as text)`, one token a step; `None` is an answer without end.

    Texts are written letter by letter, as no tokenizer would cut them up: whoever tokenises them again is found out.
    """

    def __init__(self, tokenizer: Any, says: Callable[[str], str | None], *, pause_s: float = 0.0) -> None:
        self._tokenizer = tokenizer
        self.eos_ids = [tokenizer.eos_token_id]
        self._says = says
        self._pause_s = pause_s
        self._version = 0
        self.begun: list[RolloutRequest] = []
        self.seen: list[list[int]] = []  # of each answer: all tokens that went in or came out
        self.fails = False
        self.num_tokens = 0
        self.routes = False

    def resume(self) -> None: ...

    def release(self) -> None: ...

    def update_weights(self, update: WeightUpdate) -> None:
        self._version = update.version

    def check(self, request: RolloutRequest) -> None: ...

    def log_probs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        raise AssertionError

    def write(self, inbox: Inbox) -> None:
        while not inbox.is_over:
            for ticket in inbox.take(64, 0.05):
                if self.fails:
                    raise RuntimeError("the engine is on fire")
                self.begun.append(ticket.request)
                for answer in range(ticket.request.params.num_answers):
                    self._write(ticket, answer, inbox)

    def _write(self, ticket: Any, answer: int, inbox: Inbox) -> None:
        request = ticket.request
        given = written_ids(request).tolist()
        before = 0 if request.written is None else len(request.written.token_ids)
        said = self._says(self._tokenizer.decode(request.prompt_ids))
        letters = self._letters("12" * 999 if said is None else said)
        letters = letters if said is None else [*letters, self._tokenizer.eos_token_id]
        ending = Ending(request.params, self.eos_ids, self._tokenizer)
        new: list[int] = []
        reason = None
        while reason is None:
            if ticket.is_cancelled or inbox.is_aborted:
                if not new:
                    ticket.done(answer, untouched(request))
                    return
                reason = "abort"
                break
            time.sleep(self._pause_s)
            new.append(letters[before + len(new)])
            self.num_tokens += 1
            if ticket.on_tokens is not None:
                ticket.on_tokens(answer, new[-1:], [-0.5])
            reason = ending.of(new[-1], before + len(new), new)
        ids = np.array(new, np.int32)
        self.seen.append([*given, *new])
        routes = self._routes(len(given) + len(new)) if self.routes else None
        sample = sample_of(request, ids, -ids.astype(np.float32) / 100, self._version, reason, self._tokenizer, routes)
        ticket.done(answer, sample)

    def _letters(self, text: str) -> list[int]:
        return [i for letter in text for i in self._tokenizer(letter, add_special_tokens=False)["input_ids"]]

    def _routes(self, num_tokens: int) -> RoutedExperts:
        """Which expert tells how many turns there had been; of the last token nothing is known."""
        known = np.arange(num_tokens) < num_tokens - 1
        experts = np.full((num_tokens, 1, 1), len(self.seen), np.uint8)
        return RoutedExperts(experts, np.zeros(1, np.int32), known, 256)
