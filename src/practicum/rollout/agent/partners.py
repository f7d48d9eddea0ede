"""Who answers the model between its turns: tools that it calls, or an environment that reacts to what it says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from practicum.config import AgentConfig
from practicum.rollout.agent.calls import CALL_FORMATS, CallFormat
from practicum.rollout.agent.environment import EnvironmentBox
from practicum.rollout.agent.tools import ToolBox
from practicum.rollout.agent.turns import ChatMessage
from practicum.types import Prompt


class Talk(Protocol):
    """One conversation."""

    outcome: Any
    """For the reward function; None where there is none."""

    async def begin(self, prompt: Prompt) -> str | None:
        """What is said after the prompt, before the model's first turn."""

    async def reply(self, text: str, marked: str, *, is_last: bool) -> Sequence[ChatMessage] | None:
        """What is said to a turn of the model, given without and with special tokens; None: it is over.

        To the last turn there is no reply that the model could read; but whether it expects one counts.
        """


class Partner(Protocol):
    """Belongs to the event loop it is started in."""

    role: str
    """What a chat template calls those who speak."""
    speaks_first: bool
    """Whether `begin` may add to the prompt."""

    @property
    def counts(self) -> Counter[str]:
        """Calls or steps, by what came of them."""

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """Of tools."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def talk(self) -> Talk: ...


class ToolPartner:
    role = "tool"
    speaks_first = False

    def __init__(self, box: ToolBox, call_format: str) -> None:
        self._box = box
        self._parse = CALL_FORMATS[call_format]

    @property
    def counts(self) -> Counter[str]:
        return self._box.counts

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        return self._box.schemas

    async def start(self) -> None:
        await self._box.start()

    async def close(self) -> None:
        await self._box.close()

    def talk(self) -> Talk:
        return _ToolTalk(self._box, self._parse)


@dataclass(slots=True)
class _ToolTalk:
    box: ToolBox
    parse: CallFormat
    outcome: Any = None

    async def begin(self, prompt: Prompt) -> str | None:
        return None

    async def reply(self, text: str, marked: str, *, is_last: bool) -> Sequence[ChatMessage] | None:
        calls = self.parse(marked)
        if not calls or is_last:
            return [] if calls else None
        replies = await self.box.call_all(calls)
        return [{"role": "tool", "name": reply.name or "", "content": reply.text} for reply in replies]


class EnvironmentPartner:
    role = "user"
    speaks_first = True
    schemas: Sequence[Mapping[str, Any]] = ()

    def __init__(self, box: EnvironmentBox) -> None:
        self._box = box

    @property
    def counts(self) -> Counter[str]:
        return self._box.counts

    async def start(self) -> None:
        await self._box.start()

    async def close(self) -> None:
        await self._box.close()

    def talk(self) -> Talk:
        return _EnvironmentTalk(self._box)


@dataclass(slots=True)
class _EnvironmentTalk:
    box: EnvironmentBox
    state: bytes = b""
    outcome: Any = None

    async def begin(self, prompt: Prompt) -> str | None:
        step = await self.box.reset(prompt)
        self.state, self.outcome = step.state, step.outcome
        return step.said

    async def reply(self, text: str, marked: str, *, is_last: bool) -> Sequence[ChatMessage] | None:
        step = await self.box.step(self.state, text)
        if step.state is not self.state:
            self.state, self.outcome = step.state, step.outcome
        return None if step.said is None else [{"role": "user", "content": step.said}]


def partner_of(agent: AgentConfig) -> Partner:
    """Of what the config names: tools or an environment."""
    if agent.environment is not None:
        return EnvironmentPartner(EnvironmentBox(agent.environment, agent.tool_timeout_s))
    return ToolPartner(ToolBox(agent.tools, agent.tool_timeout_s), agent.call_format)
