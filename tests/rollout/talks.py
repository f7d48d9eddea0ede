"""An environment that the demo's tokenizer has the characters for. Processes import this file: nothing heavy."""

from __future__ import annotations

from practicum.types import Prompt


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
