from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from practicum.errors import RolloutError, ToolError
from practicum.rollout.agent.environment import Environments
from practicum.rollout.agent.interaction import InteractionFailed
from practicum.types import Prompt
from tests.rollout.agents import HERE
from tests.samples import make_sample


def talk_with(
    name: str, *words: str, timeout_s: float = 0.5, **metadata: Any
) -> tuple[str | None, list[str | None], Any, dict[str, int]]:
    """Return what it says first, what it says to each word, the outcome, and the counts."""

    async def run() -> tuple[str | None, list[str | None], Any, dict[str, int]]:
        environments = Environments(name if ":" in name else f"{HERE}:{name}", timeout_s, num_processes=2)
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
@pytest.mark.parametrize(
    ("word", "status", "reason"),
    [
        ("raise", "infra_error", "step raised RuntimeError: not that (agents.py, line"),
        ("crash", "infra_error", "step its process ended with exit code 3"),
        ("hang", "timeout", "step took longer than 0.5 s"),
    ],
)
def test_a_step_that_fails_is_no_answer_to_the_model(name: str, word: str, status: str, reason: str) -> None:
    with pytest.raises(InteractionFailed) as caught:
        talk_with(name, "a", word)
    assert caught.value.status == status
    assert f"rollout.agent.environment={HERE}:{name}: {name}.{reason}" in caught.value.reason


@pytest.mark.parametrize("hangs", [False, True])
def test_a_reset_that_fails_is_tried_once_more(tmp_path: Path, hangs: bool) -> None:
    metadata = {"marker": str(tmp_path / "marker"), "hangs": hangs, "speaks": True}
    assert talk_with("ResetsTheSecondTime", **metadata)[0] == "2+"
    with pytest.raises(InteractionFailed, match=r"CannotReset.reset raised ValueError: no level of that name"):
        talk_with("CannotReset")


@pytest.mark.parametrize(
    ("odd", "complaint"),
    [
        ("reset", "Odd.reset returned int 3, and must return text, or None"),
        (
            "tuple",
            r"Odd.step returned tuple \('text', 1.0, True\).*rewards are for the reward function",
        ),
        ("bytes", "Odd.step returned bytes b'text', and must return text"),
        ("unicode", "Odd.step returned text that is not valid Unicode"),
        ("outcome", r"Odd.outcome raised KeyError: 'score' \(agents.py"),
        ("board", "Odd.outcome returned something that no other process can read .*: return numbers, texts"),
        ("lock", "Odd.outcome returned lock .*, which no other process can be sent: TypeError: cannot pickle"),
        ("coroutine", "Odd.outcome returned a coroutine"),
    ],
)
def test_what_an_environment_returns_is_checked_by_method(odd: str, complaint: str) -> None:
    with pytest.raises(InteractionFailed, match=complaint) as caught:
        talk_with("Odd", "a", timeout_s=5.0, odd=odd)
    assert caught.value.status == "infra_error"


def test_the_environment_and_the_tool_of_the_docs_do_as_they_say(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "agents.md").read_text()
    world, reward, tool = (block.partition("```")[0] for block in page.split("```python\n")[1:])
    (tmp_path / "my_world.py").write_text(world)
    environment = f"{tmp_path}/my_world.py:World"
    _, said, outcome, _ = talk_with(environment, "one", "1", "3", "2", timeout_s=10.0)
    assert said == ["Write a number.", "higher", "lower", None] and outcome == {"tries": 4}
    names: dict[str, Any] = {"CITIES": {"Ulm": 130_000}}
    exec(reward, names)
    sample = make_sample(text=" 2\n", truth="2")
    asked = replace(sample, prompt=replace(sample.prompt, metadata={"environment": outcome}))
    assert names["grade"](asked) == 0.25
    exec(tool, names)
    assert names["population"]("Ulm") == 130_000
    with pytest.raises(ToolError, match="there is no city 'Atlantis'"):
        names["population"]("Atlantis")


def test_an_environment_must_travel_between_processes() -> None:
    with pytest.raises(InteractionFailed, match=r"KeepsALock.reset left an object .* cannot pickle"):
        talk_with("KeepsALock")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("NoEnvironment", "has no method reset and step"), ("Nobody", "has no class 'Nobody'")],
)
def test_what_cannot_be_an_environment_is_refused(name: str, complaint: str) -> None:
    with pytest.raises(RolloutError, match=complaint):
        talk_with(name)
