"""Tools and environments, well and badly behaved. Processes import this file: it needs nothing heavy."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

from practicum.types import Prompt

HERE = str(Path(__file__))


def add(a: int, b: int = 0) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


async def patient(seconds: float) -> str:
    """Waits."""
    await asyncio.sleep(seconds)
    return "waited"


_num_met = 0


async def meet(num: int) -> int:
    """Waits for so many calls at a time."""
    global _num_met
    _num_met += 1
    while _num_met < num:
        await asyncio.sleep(0.005)
    return _num_met


def hang() -> None:
    """Never returns."""
    while True:
        time.sleep(60)


def fail(text: str) -> None:
    """Raises."""
    raise KeyError(text)


def crash() -> None:
    """Ends its process."""
    os._exit(3)


def pid() -> int:
    """Of the process it runs in."""
    return os.getpid()


async def patient_pid() -> int:
    """Of the process it runs in."""
    await asyncio.sleep(0.01)
    return os.getpid()


class Countdown:
    """Says how often the model must still say something."""

    def reset(self, prompt: Prompt) -> str | None:
        self.left, self.heard = int(prompt.answer), list[str]()
        return f"{self.left}+" if prompt.metadata.get("speaks") else None

    def step(self, text: str) -> str | None:
        if text == "raise":
            self.left = 99  # forgotten with the rest of the step
            raise RuntimeError("not that")
        if text == "hang":
            hang()
        self.heard.append(text)
        self.left -= 1
        return str(self.left) if self.left else None

    def outcome(self) -> dict[str, Any]:
        return {"heard": self.heard, "left": self.left}


class AsyncCountdown(Countdown):
    async def step(self, text: str) -> str | None:  # type: ignore[override]
        await asyncio.sleep(0.01)
        return super().step(text)


class NoEnvironment:
    """Has neither of the methods."""


class CannotReset:
    def reset(self, prompt: Prompt) -> None:
        raise ValueError("no level of that name")

    def step(self, text: str) -> None:
        raise AssertionError


class KeepsALock(Countdown):
    def reset(self, prompt: Prompt) -> str | None:
        self.lock = threading.Lock()
        return super().reset(prompt)
