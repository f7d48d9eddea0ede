"""Conversations of several turns over any engine, many at once, each a coroutine on the worker's event loop.

    prompt ─▶ turn of the model ─▶ reply of tools or environment ─▶ turn of the model ─▶ ... ─▶ one Sample
                 engine               processes that can be killed      seed of its own

A conversation ends with `stop` when there is no reply, with `length` when a turn was cut off, when the next one would
be one too many or when there is no room left for it, with `abort` when it was aborted, and with `error` when tools or
environment have failed: then its trajectory has a score without a value, as if it could not be graded.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from practicum.config import AgentConfig
from practicum.control_tokens import ControlTokens
from practicum.errors import ConversationError, RolloutError
from practicum.models import encode_prompts
from practicum.replay import decoded
from practicum.rollout.agent.environment import Environments
from practicum.rollout.agent.interaction import ChatMessage, InteractionFailed, UserCode
from practicum.rollout.agent.template import TurnTemplate
from practicum.rollout.agent.tools import Tools
from practicum.rollout.base import BaseRollout
from practicum.rollout.engine.sequence import Ending
from practicum.rollout.engine.sequence import Sequence as EngineSequence
from practicum.rollout.tokenizer import check_tokenizer
from practicum.types import FinishReason, Message, Prompt, PromptGroup, RoutedExperts, Sample, Score, Trajectory

log = logging.getLogger("practicum.rollout")

_Part = tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.bool_], NDArray[np.int32]]
"""Tokens of a transcript: ids, log-probs, loss mask, weight versions."""


class EngineFailed(Exception):
    """A turn could not be written, for the reason that is its cause."""


class Conversations:
    """Fills in prompt groups as `BaseRollout.generate` does, with a whole conversation in each sample.

    `start` it in the event loop that uses it. `is_partial`: conversations may go on under new weights; otherwise all
    turns of one are written with the same.
    """

    def __init__(self, engine: BaseRollout, tokenizer: Any, agent: AgentConfig, *, is_partial: bool = False) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.max_turns = agent.max_turns
        self.template = TurnTemplate(tokenizer)
        self.user_code: UserCode = (
            Tools(agent.tools, agent.tool_timeout_s, agent.call_format)
            if agent.environment is None
            else Environments(agent.environment, agent.tool_timeout_s)
        )
        self.max_turn_tokens = agent.max_turn_tokens
        self._is_partial = is_partial
        self._running: set[_Conversation] = set()
        self._is_closed = False

    async def start(self) -> None:
        """Raise `RolloutError` where tools, environment or chat template cannot be used."""
        self._check_template()
        await self.user_code.start()
        self.template = TurnTemplate(self.tokenizer, self.user_code.schemas)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def check(self, group: PromptGroup) -> None:
        """Raise `RolloutError` where the group cannot be written."""
        if self._is_closed:
            raise RolloutError("the engine has been closed")
        if self.user_code.speaks_first and any(one.samples and not one.is_finished for one in group.trajectories):
            raise RolloutError(
                f"prompt {group.prompt.id}: a conversation with an environment cannot be continued, since what the "
                "environment knew is gone. Ask for it anew."
            )
        self.engine.check(group)

    def generate(self, groups: Sequence[PromptGroup]) -> AsyncGenerator[list[PromptGroup], None]:
        """Yield the groups in lists as their conversations end; leaving early aborts the rest. The call itself checks
        the groups."""
        for group in groups:
            self.check(group)
        return self._generate(groups)

    async def _generate(self, groups: Sequence[PromptGroup]) -> AsyncGenerator[list[PromptGroup], None]:
        async with nullcontext() if self._is_partial else self.engine.generating():
            conversations = [
                _Conversation(self, group, trajectory)
                for group in groups
                for trajectory in group.trajectories
                if not trajectory.is_finished
            ]
            num_open = Counter(conversation.group for conversation in conversations)
            if finished := [group for group in groups if not num_open[group]]:
                yield finished
            self._running.update(conversations)
            # The first turns in one batch: what an engine reads together is then no matter of chance.
            first = {turn: c.first for c in conversations if (turn := c.begin()) is not None}
            work = [*map(self._run, conversations), self._write_first(first)]
            tasks = [asyncio.create_task(coroutine) for coroutine in work]
            ended: asyncio.Queue[asyncio.Task[PromptGroup | None]] = asyncio.Queue()
            for task in tasks:
                task.add_done_callback(ended.put_nowait)
            try:
                num_left = len(tasks)
                while num_left:
                    done = [await ended.get()]
                    while not ended.empty():
                        done.append(ended.get_nowait())
                    num_left -= len(done)
                    came = [own for task in done if task.exception() is None and (own := task.result()) is not None]
                    num_open.subtract(came)
                    if finished := [group for group in dict.fromkeys(came) if not num_open[group]]:
                        yield finished
                    for task in done:
                        task.result()
            finally:
                self._running.difference_update(conversations)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def abort(self) -> None:
        """End all conversations soon, with what there is of them and finish reason `abort`."""
        for conversation in tuple(self._running):
            conversation.cancel()

    async def close(self) -> None:
        """Abort everything and end the processes of tools or environments."""
        self._is_closed = True
        self.abort()
        await self.user_code.close()

    async def _write_first(self, turns: dict[EngineSequence, asyncio.Future[Sample]]) -> None:
        """Have the first turns written. A failure of the engine is raised here; who waits for them is cancelled."""
        async with aclosing(self.engine.stream_samples(list(turns))) as written:
            async for some in written:
                for turn, sample in some:
                    turns[turn].set_result(sample)

    async def _run(self, conversation: _Conversation) -> PromptGroup:
        prompt_id = conversation.group.prompt.id
        try:
            conversation.end(await conversation.run())
            return conversation.group
        except EngineFailed as failure:
            assert isinstance(failure.__cause__, Exception)
            raise failure.__cause__ from None
        except Exception as error:  # ours, or of a chat template
            log.exception("a conversation failed")
            what = f"prompt {prompt_id}: its conversation failed: {type(error).__name__}: {error}"
            raise ConversationError(what) from error
        finally:
            self._running.discard(conversation)

    def _check_template(self) -> None:
        """Refuse a chat template that cannot hold the turns. Prompts of plain text need none."""
        if self.tokenizer.chat_template is None:
            return
        report = check_tokenizer(self.tokenizer)
        needed = ("turns join", "tool messages") if self.user_code.role == "tool" else ("turns join",)
        if not all(report.holds(name) for name in needed):
            raise RolloutError(f"rollout.agent: the model's chat template cannot hold several turns:\n{report}")


class _Conversation:
    """One conversation, which becomes the sample of one trajectory."""

    def __init__(self, conversations: Conversations, group: PromptGroup, trajectory: Trajectory) -> None:
        self.group = group
        self.trajectory = trajectory
        self._of = conversations
        self._engine = conversations.engine
        self._tokenizer = conversations.tokenizer
        self._interaction = conversations.user_code.interaction()
        # All turns of all answers to a prompt begin with the same tokens: one engine has them at hand.
        self._session = group.session or f"{group.prompt.id}#{group.seed:x}"
        self._transcript = Transcript(group.prompt, group.prompt_ids)
        self._params = replace(group.params, num_answers=1)
        self.first: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()  # turn of the model
        self._turn: EngineSequence | None = None  # with the engine
        self._reply: asyncio.Future[Any] | None = None
        self._num_control_tokens = 0  # in what others said
        self._is_cancelled = False

    def end(self, sample: Sample) -> None:
        counts = self.trajectory.counts
        counts["turns"] = self._transcript.num_turns
        for status, num in self._interaction.counts.items():
            counts[f"calls_{status}"] = counts.get(f"calls_{status}", 0) + num
        if self._num_control_tokens:
            counts["control_tokens"] = counts.get("control_tokens", 0) + self._num_control_tokens
        self.trajectory.add(sample)

    def begin(self) -> EngineSequence | None:
        """Return the first turn, for the caller to have written; None where something else comes before it."""
        if not self._of.user_code.speaks_first and not self.trajectory.samples:
            self._turn = self._next_turn(None)
        return self._turn

    def cancel(self) -> None:
        """Have `run` return soon, with what there is."""
        self._is_cancelled = True
        if self._turn is not None:
            self._turn.is_aborted = True  # also where the engine does not have it yet
            self._engine.abort([self._turn])
        if self._reply is not None:
            self._reply.cancel()

    async def run(self) -> Sample:
        turn: Sample | None = None
        try:
            turn = await self._open()
            while turn is not None:
                self._transcript.add_turn(turn)
                if turn.finish_reason != "stop":
                    return self._ended(turn, turn.finish_reason)
                is_last = self._transcript.num_turns == self._of.max_turns
                marked = self._tokenizer.decode(turn.token_ids, skip_special_tokens=False)
                said = await self._unless_cancelled(self._interaction.reply(turn.text, marked, is_last=is_last))
                if self._is_cancelled:
                    return self._ended(turn, "abort")
                if said is None:
                    return self._ended(turn, "stop")
                between = self._between(turn, said)
                if is_last or len(between) >= self._room:
                    return self._ended(turn, "length")
                self._transcript.add_said(between)
                turn = await self._write(None)
            return self._ended(None, "abort")
        except InteractionFailed as failure:
            self.trajectory.score = Score.failed(failure.status, failure.reason)
            return self._ended(turn, "error")

    async def _open(self) -> Sample | None:
        """Return the first turn, or the one that was aborted; None where it is cancelled before anything is written."""
        if self._turn is not None:
            try:
                return await self.first
            finally:
                self._turn = None
        if self.trajectory.samples:
            self._transcript, turn = Transcript.of(self.trajectory.last)
            if turn is not None and self._is_whole(turn):
                text: str = self._tokenizer.decode(turn.token_ids, skip_special_tokens=True)
                return replace(turn, finish_reason="stop", text=text)
            return await self._write(turn)
        prompt = self.group.prompt
        said = await self._unless_cancelled(self._interaction.begin(prompt))
        if said is not None:
            self._num_control_tokens += self._of.template.control_tokens.count(said)
            ids = _with_more(self._tokenizer, prompt, said, self._of.template.control_tokens)
            self._transcript = Transcript(prompt, ids)
            if self._room < 1:
                raise InteractionFailed(
                    "invalid",
                    f"prompt {prompt.id}: what the environment says first is {len(ids)} tokens long with the prompt "
                    "and leaves no room for an answer: raise rollout.max_new_tokens",
                )
        return await self._write(None)

    async def _write(self, begun: Sample | None) -> Sample | None:
        """Have the engine write the next turn, going on with what there is of it."""
        if self._is_cancelled:
            return begun
        self._turn = self._next_turn(begun)
        try:
            (sample,) = await self._engine.collect_samples([self._turn])
            return sample
        except Exception as error:
            raise EngineFailed from error
        finally:
            self._turn = None

    def _next_turn(self, begun: Sample | None) -> EngineSequence:
        most = self._room if self._of.max_turn_tokens is None else min(self._room, self._of.max_turn_tokens)
        seed, number, num_turns = self.group.seed, self.trajectory.number, self._transcript.num_turns
        if num_turns:  # the first turn has the seed of an answer without turns
            seed = int(np.random.SeedSequence([seed, number, num_turns]).generate_state(1, np.uint64)[0])
            number = 0
        return EngineSequence(
            self.group.prompt,
            self._transcript.all_ids,
            replace(self._params, max_new_tokens=most),
            seed,
            number,
            written=begun,
            session=self._session,
        )

    @property
    def _room(self) -> int:
        """The tokens that are left. What an environment says first is part of the prompt, and counts too."""
        said_first = len(self._transcript.prompt_ids) - len(self.group.prompt_ids)
        return self._params.max_new_tokens - said_first - self._transcript.num_tokens

    def _between(self, turn: Sample, said: Sequence[ChatMessage]) -> NDArray[np.int32]:
        template = self._of.template
        self._num_control_tokens += template.control_tokens.count(said)
        return template.in_text(said) if self.group.prompt.messages is None else template.between(turn.token_ids, said)

    def _ended(self, turn: Sample | None, reason: FinishReason) -> Sample:
        """Make the sample. Its text is that of the model's last turn: its answer, without what tools have said."""
        outcome = self._interaction.outcome
        metadata = None if outcome is None else {"environment": outcome}
        return self._transcript.sample("" if turn is None else turn.text, reason, metadata)

    async def _unless_cancelled(self, coroutine: Awaitable[Any]) -> Any:
        self._reply = asyncio.ensure_future(coroutine)
        if self._is_cancelled:
            self._reply.cancel()
        try:
            return await self._reply
        except asyncio.CancelledError:
            if not self._is_cancelled:
                raise
        finally:
            self._reply = None

    def _is_whole(self, turn: Sample) -> bool:
        """Return whether an aborted turn had been finished, and only the reply was missing."""
        ending = Ending(self._params, self._engine.eos_ids, self._tokenizer)
        return ending.of(int(turn.token_ids[-1]), len(turn.token_ids), turn.token_ids.tolist()) == "stop"


class Transcript:
    """A conversation as one sample: turns of the model and what was said in between, token by token, only appended."""

    def __init__(self, prompt: Prompt, prompt_ids: NDArray[np.int32]) -> None:
        self.prompt = prompt
        self.prompt_ids = prompt_ids
        self.num_turns = 0
        self.num_tokens = 0
        """The number of tokens after the prompt."""
        empty = np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.bool_), np.empty(0, np.int32)
        self._parts: list[_Part] = [empty]
        self._routes: RoutedExperts | None = None

    @property
    def all_ids(self) -> NDArray[np.int32]:
        """The tokens that the engine is given for the next turn."""
        if not self.num_tokens:
            return self.prompt_ids  # shared by its answers
        return np.concatenate([self.prompt_ids, *(ids for ids, *_ in self._parts)])

    def add_turn(self, turn: Sample) -> None:
        """Append what the model wrote, as it wrote it."""
        assert len(turn.prompt_ids) == len(self.prompt_ids) + self.num_tokens, "a turn that follows something else"
        self._add(turn.token_ids, turn.log_probs, turn.loss_mask, turn.versions)
        self.num_turns += 1
        if turn.routes is not None:
            routes = decoded([turn.routes])[0]
            self._routes = routes if self._routes is None else self._routes.grown(routes)

    def add_said(self, token_ids: NDArray[np.int32]) -> None:
        """Append what others said, and the marks around it: the model does not learn to say it."""
        num = len(token_ids)
        self._add(token_ids, np.full(num, np.nan, np.float32), np.zeros(num, np.bool_), np.full(num, -1, np.int32))

    def sample(self, text: str, reason: FinishReason, metadata: dict[str, Any] | None = None) -> Sample:
        """Return all of it; `metadata` is added to that of the prompt."""
        prompt = replace(self.prompt, metadata={**self.prompt.metadata, **metadata}) if metadata else self.prompt
        token_ids, log_probs, loss_mask, versions = map(np.concatenate, zip(*self._parts, strict=True))
        return Sample(
            prompt=prompt,
            prompt_ids=self.prompt_ids,
            token_ids=token_ids,
            log_probs=log_probs,
            loss_mask=loss_mask,
            versions=versions,
            text=text,
            finish_reason=reason,
            routes=None if self._routes is None else self._routes.padded(len(self.prompt_ids) + self.num_tokens),
        )

    def _add(self, *part: *_Part) -> None:
        self._parts.append(part)
        self.num_tokens += len(part[0])

    @classmethod
    def of(cls, sample: Sample) -> tuple[Transcript, Sample | None]:
        """Take an aborted conversation apart: all but the turn of the model it ends with, and that turn."""
        transcript = cls(sample.prompt, sample.prompt_ids)
        edges = np.flatnonzero(np.diff(sample.loss_mask)) + 1
        bounds = [0, *edges.tolist(), len(sample.loss_mask)] if len(sample.loss_mask) else []
        routes = None if sample.routes is None else decoded([sample.routes])[0]
        last: Sample | None = None
        for start, end in pairwise(bounds):
            span = slice(start, end)
            if not sample.loss_mask[start]:
                transcript.add_said(sample.token_ids[span])
                continue
            turn = Sample(
                transcript.prompt,
                transcript.all_ids,
                sample.token_ids[span],
                sample.log_probs[span],
                sample.loss_mask[span],
                sample.versions[span],
                "",
                "abort",
            )
            if end == len(sample.loss_mask):
                last = turn
            else:
                transcript.add_turn(turn)
        transcript._routes = routes
        return transcript, last


def _with_more(tokenizer: Any, prompt: Prompt, said: str, control_tokens: ControlTokens) -> NDArray[np.int32]:
    """Return the tokens of a prompt after which an environment has said something."""
    if prompt.messages is None:
        text = f"{prompt.text}{control_tokens.mark(said, has_edges=True)}"
        return np.array(control_tokens.encode(text, add_special_tokens=True), np.int32)
    longer = replace(prompt, messages=(*prompt.messages, Message("user", said)))
    return encode_prompts(tokenizer, [longer], control_tokens=control_tokens)[0]
