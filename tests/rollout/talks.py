"""An environment that the demo's tokenizer has the characters for. Processes import this file: nothing heavy."""

from __future__ import annotations

from typing import Any

from practicum.types import Prompt


def shout(text: str) -> str:
    """Return the text in capitals."""
    return text.upper()


class Once:
    """Says one thing, and is content with whatever comes then."""

    def reset(self, prompt: Prompt) -> str | None:
        self.has_spoken = False
        return None

    def step(self, text: str) -> str | None:
        if self.has_spoken:
            return None
        self.has_spoken = True
        return "7"


class BreaksOnEven(Once):
    """Breaks where the answer to the prompt is even."""

    def reset(self, prompt: Prompt) -> str | None:
        self.is_even = int(str(prompt.answer)) % 2 == 0
        return super().reset(prompt)

    def step(self, text: str) -> str | None:
        if self.is_even:
            raise ConnectionError("the world is gone")
        return super().step(text)


class NeverResets(Once):
    def reset(self, prompt: Prompt) -> Any:
        raise FileNotFoundError("levels.json")
