"""An endless, shuffled, resumable stream of items: where it stands is one number."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


class ShuffledStream(Generic[T]):
    """Each epoch is a permutation fixed by seed and epoch number, so `position` alone says what comes next.

    Items that were drawn and never used are put back by giving their positions as `again`: they come first.
    """

    def __init__(self, items: Sequence[T], *, seed: int, position: int = 0, again: Iterable[int] = ()) -> None:
        if not items:
            raise ValueError("a stream needs at least one item")
        self._items = items
        self._seed = seed
        self.position = position
        self.again = deque(again)
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def draw(self, count: int) -> list[int]:
        """The positions of the next items; runs on into the next epoch when this one ends."""
        drawn = [self.again.popleft() for _ in range(min(count, len(self.again)))]
        num_new = count - len(drawn)
        drawn += range(self.position, self.position + num_new)
        self.position += num_new
        return drawn

    def at(self, positions: Sequence[int]) -> list[T]:
        return [self._items[self._index(position)] for position in positions]

    def take(self, count: int) -> list[T]:
        """The next items."""
        return self.at(self.draw(count))

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, len(self._items))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self._items))
        return int(self._order[offset])
