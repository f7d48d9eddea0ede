"""Tools and environments, well and badly behaved. Processes import this file: it needs nothing heavy."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

from practicum import ToolError
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


def refuse(text: str) -> None:
    """Says that the model has made a mistake."""
    raise ToolError(f"no such place: {text}")


async def refuse_later(text: str) -> None:
    """Says so after a while."""
    await asyncio.sleep(0.01)
    refuse(text)


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
            raise RuntimeError("not that")
        if text == "crash":
            crash()
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


class Echo:
    """Says first what the record has for it."""

    def reset(self, prompt: Prompt) -> str | None:
        return str(prompt.metadata["says"])

    def step(self, text: str) -> None:
        return None


class NoEnvironment:
    """Has neither of the methods."""


class CannotReset:
    def reset(self, prompt: Prompt) -> None:
        raise ValueError("no level of that name")

    def step(self, text: str) -> None:
        raise AssertionError


class ResetsTheSecondTime(Countdown):
    """Fails once for each `marker`, a file that is not there before."""

    def reset(self, prompt: Prompt) -> str | None:
        marker = Path(prompt.metadata["marker"])
        if not marker.exists():
            marker.touch()
            hang() if prompt.metadata["hangs"] else fail("not yet")
        return super().reset(prompt)


class Board:
    """Known to this file alone."""


class Odd(Countdown):
    """Returns what its prompt's metadata say."""

    def reset(self, prompt: Prompt) -> Any:
        self.odd = prompt.metadata["odd"]
        super().reset(prompt)
        return 3 if self.odd == "reset" else None

    def step(self, text: str) -> Any:
        returned = {"tuple": ("text", 1.0, True), "bytes": b"text", "unicode": "\ud800"}
        return returned.get(self.odd, text)

    def outcome(self) -> Any:
        if self.odd == "outcome":
            raise KeyError("score")
        return {"board": Board(), "lock": threading.Lock(), "coroutine": patient(0)}.get(self.odd)


class KeepsALock(Countdown):
    def reset(self, prompt: Prompt) -> str | None:
        self.lock = threading.Lock()
        return super().reset(prompt)
