from __future__ import annotations

import asyncio
from typing import Any

import pytest

from practicum.errors import RolloutError
from practicum.rollout.agent.environment import Environments
from practicum.types import Prompt
from tests.rollout.agents import HERE


def talk_with(
    name: str, *words: str, timeout_s: float = 0.5, **metadata: Any
) -> tuple[str | None, list[str | None], Any, dict[str, int]]:
    """Return what it says first, what it says to each word, the outcome, and the counts."""

    async def run() -> tuple[str | None, list[str | None], Any, dict[str, int]]:
        environments = Environments(f"{HERE}:{name}", timeout_s, num_processes=2)
        await environments.start()
        try:
            interaction = environments.interaction()
            first = await interaction.begin(Prompt("p", text="?", answer=2, metadata=metadata))
            said: list[str | None] = []
            for number, word in enumerate(words, 1):
                reply = await interaction.reply(word, word, is_last=number == len(words))  # it hears the last too
                assert reply is None or [message["role"] for message in reply] == ["user"]
                said.append(None if reply is None else str(reply[0]["content"]))
            return first, said, interaction.outcome, dict(interaction.counts)
        finally:
            await environments.close()

    return asyncio.run(run())


@pytest.mark.parametrize("name", ["Countdown", "AsyncCountdown"])
def test_an_environment_remembers_between_steps(name: str) -> None:
    first, said, outcome, counts = talk_with(name, "a", "b", speaks=True)
    assert (first, said) == ("2+", ["1", None])
    assert outcome == {"heard": ["a", "b"], "left": 0}
    assert counts == {"ok": 2}


@pytest.mark.parametrize("name", ["Countdown", "AsyncCountdown"])
def test_a_step_that_fails_is_told_and_forgotten(name: str) -> None:
    first, said, outcome, counts = talk_with(name, "raise", "hang", "a")
    assert first is None
    assert "RuntimeError: not that" in str(said[0]) and "took longer than 0.5 s" in str(said[1])
    assert said[2] == "1" and outcome == {"heard": ["a"], "left": 1}
    assert counts == {"ok": 1, "raised": 1, "timeout": 1}


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("CannotReset", "reset for prompt p raised ValueError: no level of that name"),
        ("KeepsALock", "cannot pickle"),
        ("NoEnvironment", "has no method reset and step"),
        ("Nobody", "has no class 'Nobody'"),
    ],
)
def test_what_cannot_be_an_environment_is_refused(name: str, complaint: str) -> None:
    with pytest.raises(RolloutError, match=complaint):
        talk_with(name)
