"""An engine whose every word is known beforehand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from practicum.errors import RolloutError
from practicum.rollout.base import BaseRollout
from practicum.rollout.engine.sequence import Request
from practicum.rollout.engine.sequence import Sequence as EngineSequence
from practicum.types import RoutedExperts
from practicum.weights import WeightUpdate


class ScriptedEngine(BaseRollout):
    """Answers by `says(what it was given, as text)`, one token a step; `None` is an answer without end.

    Texts are written letter by letter, as no tokenizer would cut them up: whoever tokenises them again is found out.
    """

    def __init__(self, tokenizer: Any, says: Callable[[str], str | None], *, pause_s: float = 0.0) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self.eos_ids = [tokenizer.eos_token_id]
        self._says = says
        self._pause_s = pause_s
        self._version = 0
        self._tasks: dict[EngineSequence, asyncio.Task[None]] = {}
        self._aborted: set[EngineSequence] = set()
        self._is_closed = False
        self.begun: list[EngineSequence] = []
        self.batches: list[int] = []  # the number of sequences that were submitted together
        self.seen: list[list[int]] = []  # of each answer: all tokens that went in or came out
        self.fails = False
        self.num_tokens = 0
        self.routes = False

    async def resume(self) -> None:
        self.is_awake = True

    async def release(self) -> None:
        self.is_awake = False

    async def update_weights(self, update: WeightUpdate) -> None:
        assert not self._tasks
        self._version = update.version

    async def log_probs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        raise AssertionError

    async def close(self) -> None:
        self._is_closed = True

    def check(self, request: Request) -> None:
        if len(request.prompt_ids) > 50_000:
            raise RolloutError(f"prompt {request.prompt.id} is too long")

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    def submit(self, sequences: list[EngineSequence]) -> None:
        if self._is_closed:
            raise RolloutError("the engine has been closed")
        self.begun += sequences
        self.batches.append(len(sequences))
        for sequence in sequences:
            self._tasks[sequence] = asyncio.create_task(self._run(sequence))

    def abort_submitted(self, sequences: list[EngineSequence]) -> None:
        self._aborted.update(sequences)

    async def _run(self, sequence: EngineSequence) -> None:
        try:
            sequence.done.set_result(await self._write(sequence))
        except Exception as error:
            sequence.done.set_exception(error)
        finally:
            self._aborted.discard(sequence)
            del self._tasks[sequence]

    async def _write(self, sequence: EngineSequence) -> Any:
        if self.fails:
            raise RuntimeError("the engine is on fire")
        given = sequence.ids.tolist()
        said = self._says(self._tokenizer.decode(sequence.prompt_ids))
        letters = self._letters("12" * 999 if said is None else said)
        letters = letters if said is None else [*letters, self._tokenizer.eos_token_id]
        sequence.begin(self.eos_ids, self._tokenizer)
        reason = None
        while reason is None:
            if sequence in self._aborted:
                reason = "abort"
                break
            token = letters[sequence.num_written + len(sequence.token_ids)]
            reason = sequence.push(token, -token / 100)
            self.num_tokens += 1
            if sequence.on_tokens is not None:
                sequence.on_tokens([token], [-0.5])
            await asyncio.sleep(self._pause_s)
        new = sequence.token_ids
        self.seen.append([*given, *new])
        routes = self._routes(len(given) + len(new)) if self.routes else None
        return sequence.to_sample(self._tokenizer, self._version, reason, routes)

    def _letters(self, text: str) -> list[int]:
        return [i for letter in text for i in self._tokenizer(letter, add_special_tokens=False)["input_ids"]]

    def _routes(self, num_tokens: int) -> RoutedExperts:
        """Which expert tells how many turns there had been; of the last token nothing is known."""
        known = np.arange(num_tokens) < num_tokens - 1
        experts = np.full((num_tokens, 1, 1), len(self.seen), np.uint8)
        return RoutedExperts(experts, np.zeros(1, np.int32), known, 256)
