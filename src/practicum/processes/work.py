"""What a pool's processes do: one object, made ready once in the fork server and inherited by all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one process."""

    memory_bytes: int
    """What it may allocate on top of what it has when it starts."""
    capacity: int = 1
    """Jobs it has at a time. More than one only for work whose `run` is a coroutine function."""


class Work(ABC):
    """Picklable. `prepare` runs once, before the first process is forked; `run` once per job, in a process."""

    @abstractmethod
    def prepare(self) -> None: ...

    @property
    @abstractmethod
    def run(self) -> Callable[[Any], Any]:
        """From a job to its result, both picklable; a coroutine function if many are to run in one process."""
