"""One conversation: the model's turns and what is said to them, until it asks for nothing more or a limit is reached.

    prompt ─▶ turn of the model ─▶ reply of tools or environment ─▶ turn of the model ─▶ ... ─▶ one Sample
                 engine               processes that can be killed      seed of its own

It ends with `stop` when there is no reply, with `length` when a turn was cut off, when the next one would be one too
many or when there is no room left for it, and with `abort` when it was broken off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from practicum.errors import RolloutError
from practicum.models import encode_prompts
from practicum.rollout.agent.async_engine import Writing
from practicum.rollout.agent.partners import Talk
from practicum.rollout.agent.transcript import Transcript
from practicum.rollout.agent.turns import ChatMessage, TurnTemplate
from practicum.rollout.answers import Ending
from practicum.types import FinishReason, Message, Prompt, RolloutRequest, Sample


@dataclass(frozen=True, slots=True)
class TurnLimits:
    max_turns: int
    max_turn_tokens: int | None = None

    def of_turn(self, room: int) -> int:
        """Tokens that a turn may have where the conversation has room for so many."""
        return room if self.max_turn_tokens is None else min(room, self.max_turn_tokens)


class EngineFailed(Exception):
    """A turn could not be written, for the reason that is its cause."""


class Conversation:
    """One answer to a request. `begin` gives a turn to the engine; `first`, where given, is the first one under way.

    `on_said` is told of tokens that the model did not write.
    """

    def __init__(
        self,
        request: RolloutRequest,
        *,
        talk: Talk,
        template: TurnTemplate,
        tokenizer: Any,
        eos_ids: Sequence[int],
        limits: TurnLimits,
        begin: Callable[[RolloutRequest], Writing],
        first: tuple[Writing, Awaitable[Sample]] | None = None,
        on_said: Callable[[list[int]], None] = lambda ids: None,
    ) -> None:
        assert request.params.num_answers == 1
        self._request = request
        self._talk = talk
        self._template = template
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._limits = limits
        self._begin = begin
        self._first = first
        self._on_said = on_said
        self._transcript = Transcript(request.prompt, request.prompt_ids)
        self._writing: Writing | None = None if first is None else first[0]
        self._replying: asyncio.Future[Any] | None = None
        self._is_cancelled = False

    def cancel(self) -> None:
        """`run` returns soon, with what there is."""
        self._is_cancelled = True
        if self._writing is not None:
            self._writing.break_off()
        if self._replying is not None:
            self._replying.cancel()

    @property
    def num_turns(self) -> int:
        return self._transcript.num_turns

    async def run(self) -> Sample:
        turn = await self._opened()
        while turn is not None:
            self._transcript.add_turn(turn)
            if turn.finish_reason != "stop":
                return self._ended(turn, turn.finish_reason)
            is_last = self.num_turns == self._limits.max_turns
            marked = self._tokenizer.decode(turn.token_ids, skip_special_tokens=False)
            said = await self._unless_cancelled(self._talk.reply(turn.text, marked, is_last=is_last))
            if self._is_cancelled:
                return self._ended(turn, "abort")
            if said is None:
                return self._ended(turn, "stop")
            between = self._between(turn, said)
            if is_last or len(between) >= self._room:
                return self._ended(turn, "length")
            self._transcript.add_said(between)
            self._on_said(between.tolist())
            turn = await self._written(None)
        return self._ended(None, "abort")

    async def _opened(self) -> Sample | None:
        """The first turn, or the one that was broken off; None if it is cancelled before anything is written."""
        written = self._request.written
        if written is not None:
            self._transcript, turn = Transcript.of(written)
            if turn is not None and self._is_whole(turn):
                return replace(turn, finish_reason="stop", text=self._text(turn))
            return await self._written(turn)
        if self._first is None:
            told = await self._unless_cancelled(self._talk.begin(self._request.prompt))
            if told is not None:
                ids = _with_more(self._tokenizer, self._request.prompt, told)
                self._transcript = Transcript(self._request.prompt, ids)
                if self._room < 1:
                    raise RolloutError(
                        f"prompt {self._request.prompt.id}: what the environment says first is {len(ids)} tokens long "
                        "with the prompt and leaves no room for an answer: raise rollout.max_new_tokens."
                    )
        return await self._written(None)

    async def _written(self, begun: Sample | None) -> Sample | None:
        """The next turn, going on with what there is of it."""
        if self._is_cancelled:
            return begun
        first, self._first = self._first, None
        if first is None:
            self._writing = self._begin(self._turn_request(begun))
            first = self._writing, self._writing.answers[0]
        try:
            return await first[1]
        except Exception as error:
            raise EngineFailed from error
        finally:
            self._writing = None

    def _turn_request(self, begun: Sample | None) -> RolloutRequest:
        request, number = self._request, self.num_turns
        seed, answer = request.seed, request.first_answer
        if number:  # the first turn has the seed of an answer without turns
            seed = int(np.random.SeedSequence([seed, answer, number]).generate_state(1, np.uint64)[0])
            answer = 0
        params = replace(request.params, max_new_tokens=self._limits.of_turn(self._room))
        ids = self._transcript.all_ids
        return replace(request, prompt_ids=ids, params=params, seed=seed, first_answer=answer, written=begun)

    @property
    def _room(self) -> int:
        """Tokens that are left. What an environment says first is part of the prompt, and counts too."""
        said_first = len(self._transcript.prompt_ids) - len(self._request.prompt_ids)
        return self._request.params.max_new_tokens - said_first - self._transcript.num_tokens

    def _between(self, turn: Sample, said: Sequence[ChatMessage]) -> NDArray[np.int32]:
        if self._request.prompt.messages is None:
            return self._template.in_text(said)
        return self._template.between(turn.token_ids, said)

    def _ended(self, turn: Sample | None, reason: FinishReason) -> Sample:
        """The text is that of the model's last turn: its answer, without what tools have said."""
        outcome = self._talk.outcome
        metadata = None if outcome is None else {"environment": outcome}
        return self._transcript.sample("" if turn is None else turn.text, reason, metadata)

    async def _unless_cancelled(self, coroutine: Awaitable[Any]) -> Any:
        self._replying = asyncio.ensure_future(coroutine)
        if self._is_cancelled:
            self._replying.cancel()
        try:
            return await self._replying
        except asyncio.CancelledError:
            if not self._is_cancelled:
                raise
        finally:
            self._replying = None

    def _is_whole(self, turn: Sample) -> bool:
        """Whether it had been finished, and only the reply was missing."""
        ending = Ending(self._request.params, self._eos_ids, self._tokenizer)
        return ending.of(int(turn.token_ids[-1]), len(turn.token_ids), turn.token_ids.tolist()) == "stop"

    def _text(self, turn: Sample) -> str:
        text: str = self._tokenizer.decode(turn.token_ids, skip_special_tokens=True)
        return text


def _with_more(tokenizer: Any, prompt: Prompt, said: str) -> NDArray[np.int32]:
    """The tokens of a prompt after which an environment has said something."""
    if prompt.messages is None:
        longer = replace(prompt, text=f"{prompt.text}{said}")
    else:
        longer = replace(prompt, messages=(*prompt.messages, Message("user", said)))
    return encode_prompts(tokenizer, [longer])[0]
