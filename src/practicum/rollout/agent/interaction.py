"""The user's code that answers the model between turns, tools or an environment, in processes that may be killed."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, ClassVar

from practicum.errors import ProcessError, RolloutError
from practicum.processes import JobFailed, ProcessPool, Work
from practicum.processes.work import Limits
from practicum.types import Prompt, ScoreStatus

DESCRIBE_S = 60.0
"""Time for a process to describe the user's code, imports included."""
_MEMORY_BYTES = 2048 << 20
_NUM_COROUTINES = 128

ChatMessage = Mapping[str, Any]


class InteractionFailed(Exception):
    """Tools or environment have failed, through no fault of the model. The conversation ends without a score."""

    def __init__(self, status: ScoreStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Interaction(ABC):
    """The other side of one conversation. Its methods raise `InteractionFailed`."""

    def __init__(self) -> None:
        self.outcome: Any = None
        """A result for the reward function; None where there is none."""
        self.counts: Counter[str] = Counter()
        """Calls or steps by their status."""

    async def begin(self, prompt: Prompt) -> str | None:
        """Return what is said after the prompt, before the model's first turn."""
        return None

    @abstractmethod
    async def reply(self, text: str, marked: str, *, is_last: bool) -> Sequence[ChatMessage] | None:
        """Answer a turn of the model, given without and with special tokens; None ends the conversation.

        The model cannot read a reply to its last turn, but whether it expects one counts.
        """


class UserCode(ABC):
    """Tools or an environment. Belongs to the event loop that starts it."""

    role: ClassVar[str]
    """The role in which a chat template shows what is said."""
    speaks_first: ClassVar[bool]
    """Whether `Interaction.begin` may add to the prompt."""
    complaint: ClassVar[str]

    def __init__(self, timeout_s: float, num_processes: int | None = None) -> None:
        self._timeout_s = timeout_s
        self._num_processes = num_processes or max(2, min(8, os.cpu_count() or 1))
        self._pools = AsyncExitStack()

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The schemas of tools, as chat templates and servers take them."""
        return []

    @abstractmethod
    def interaction(self) -> Interaction:
        """Return the other side of a new conversation."""

    @abstractmethod
    async def _start(self) -> None: ...

    async def start(self) -> None:
        """Raise `RolloutError` where the user's code cannot be used."""
        try:
            await self._start()
        except BaseException as error:
            await self.close()
            if isinstance(error, ProcessError | JobFailed):
                raise RolloutError(f"{self.complaint}: {error}") from error
            raise

    async def close(self) -> None:
        await self._pools.aclose()

    async def _pool(self, work: Work, *, is_async: bool) -> ProcessPool:
        """Start processes: several with one job at a time or, for async code, one with many jobs side by side."""
        size, capacity = (1, _NUM_COROUTINES) if is_async else (self._num_processes, 1)
        pool = ProcessPool(work, size=size, limits=Limits(_MEMORY_BYTES, capacity))
        self._pools.push_async_callback(pool.close)
        await pool.start()
        return pool
