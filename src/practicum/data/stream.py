"""An endless, shuffled, resumable stream of items: where it stands is one number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


class ShuffledStream(Generic[T]):
    """Each epoch is a permutation fixed by seed and epoch number, so `position` alone says what comes next."""

    def __init__(self, items: Sequence[T], *, seed: int, position: int = 0) -> None:
        if not items:
            raise ValueError("a stream needs at least one item")
        self._items = items
        self._seed = seed
        self.position = position
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def take(self, count: int) -> list[T]:
        """The next items; runs on into the next epoch when this one ends."""
        taken = [self._items[self._index(self.position + i)] for i in range(count)]
        self.position += count
        return taken

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, len(self._items))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self._items))
        return int(self._order[offset])
