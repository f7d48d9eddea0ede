"""Where requests wait while no worker is ready for them: the urgent first, each only so long, and only so many."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from practicum.reward.router.heads import NUM_PRIORITIES

T = TypeVar("T")


class WaitingRoom(Generic[T]):
    def __init__(self, size: int) -> None:
        self._size = size
        self._lines: list[OrderedDict[T, None]] = [OrderedDict() for _ in range(NUM_PRIORITIES)]  # by priority
        self.num = 0

    def put(self, waiting: T, priority: int) -> T | None:
        """Let it in. When the room is full, whoever must go for it is returned: the newest of the least urgent, which
        may be itself."""
        if self.num >= self._size:
            for line in self._lines[:priority]:
                if line:
                    gone, _ = line.popitem()
                    self._lines[priority][waiting] = None
                    return gone
            return waiting
        self._lines[priority][waiting] = None
        self.num += 1
        return None

    def first(self) -> T:
        """Whose turn it is. There must be somebody."""
        return next(iter(next(line for line in reversed(self._lines) if line)))

    def remove(self, waiting: T, priority: int) -> None:
        del self._lines[priority][waiting]
        self.num -= 1

    def everyone(self) -> list[T]:
        return [waiting for line in self._lines for waiting in line]
