from __future__ import annotations

import asyncio
from typing import Any

import pytest

from practicum.errors import RolloutError
from practicum.rollout.agent.environment import EnvironmentBox, Step
from practicum.types import Prompt
from tests.rollout.agents import HERE


def in_box(name: str, *words: str, timeout_s: float = 0.5, **metadata: Any) -> tuple[list[Step], dict[str, int]]:
    """The reset and the steps."""

    async def run() -> tuple[list[Step], dict[str, int]]:
        box = EnvironmentBox(f"{HERE}:{name}", timeout_s, num_processes=2)
        await box.start()
        try:
            steps = [await box.reset(Prompt("p", text="?", answer=2, metadata=metadata))]
            for word in words:
                steps.append(await box.step(steps[-1].state, word))
            return steps, dict(box.counts)
        finally:
            await box.close()

    return asyncio.run(run())


@pytest.mark.parametrize("name", ["Countdown", "AsyncCountdown"])
def test_an_environment_remembers_between_steps(name: str) -> None:
    steps, counts = in_box(name, "a", "b", speaks=True)
    assert [step.said for step in steps] == ["2+", "1", None]
    assert steps[-1].outcome == {"heard": ["a", "b"], "left": 0}
    assert counts == {"ok": 2}


@pytest.mark.parametrize("name", ["Countdown", "AsyncCountdown"])
def test_a_step_that_fails_is_told_and_forgotten(name: str) -> None:
    steps, counts = in_box(name, "raise", "hang", "a")
    assert steps[0].said is None
    assert "RuntimeError: not that" in str(steps[1].said) and "took longer than 0.5 s" in str(steps[2].said)
    assert steps[3].said == "1" and steps[3].outcome == {"heard": ["a"], "left": 1}
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
        in_box(name)
