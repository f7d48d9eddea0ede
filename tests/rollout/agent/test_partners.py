from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from practicum.config import AgentConfig
from practicum.rollout.agent.partners import partner_of
from practicum.types import Prompt
from tests.rollout.agents import HERE

PROMPT = Prompt("p", text="?", answer=2)


def talk_with(agent: AgentConfig, *turns: tuple[str, bool]) -> tuple[list[Any], Any, dict[str, int]]:
    async def run() -> tuple[list[Any], Any, dict[str, int]]:
        partner = partner_of(agent)
        await partner.start()
        try:
            talk = partner.talk()
            replies: list[Sequence[Any] | str | None] = [await talk.begin(PROMPT)]
            for text, is_last in turns:
                replies.append(await talk.reply(text, f"{text}<end>", is_last=is_last))
            return replies, talk.outcome, dict(partner.counts)
        finally:
            await partner.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("call_format", "call"),
    [("plain", "[1, 2]"), ("hermes", '<tool_call>{"name":"add","arguments":{"a":3}}</tool_call>')],
)
def test_tools_answer_calls_and_nothing_else(call_format: Any, call: str) -> None:
    agent = AgentConfig(tools=(f"{HERE}:add",), call_format=call_format)
    replies, outcome, counts = talk_with(agent, (call, False), ("three", False), (call, True))
    assert replies == [None, [{"role": "tool", "name": "add", "content": "3"}], None, []]
    assert outcome is None
    assert counts == {"ok": 1}  # after the last turn nothing is called: nobody would read the result


def test_an_environment_answers_every_turn_as_the_user_and_hears_the_last() -> None:
    agent = AgentConfig(environment=f"{HERE}:Countdown")
    replies, outcome, _ = talk_with(agent, ("a", False), ("b", True))
    assert replies == [None, [{"role": "user", "content": "1"}], None]
    assert outcome == {"heard": ["a", "b"], "left": 0}


def test_tools_and_an_environment_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="set tools or environment, not both"):
        AgentConfig(tools=("a.py:f",), environment="a.py:E")
