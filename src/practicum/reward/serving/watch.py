"""Looking after replicas while they work.

A router cannot tell a replica that hangs from one that is busy, so that requests would wait there until their timeout.
We can: a replica of ours answers `/health` in the middle of a forward pass. One that does not, twice in a row, is ended
and started again; its connections break, and the router sends what it had in hand to the others, or to the new one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from practicum.errors import PracticumError
from practicum.reward.serving.placed import PlacedReplica

log = logging.getLogger("practicum.reward")
_LOOK_EVERY_S = 1.0
_MOST_MISSES = 2
_MOST_REPLACEMENTS = 2


class Watch:
    """For the time of a `with` block. `replace` ends a replica and starts it again."""

    def __init__(self, replicas: Sequence[PlacedReplica], replace: Callable[[PlacedReplica], None]) -> None:
        self._replace = replace
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._look_after, args=(replica,), name="practicum-watch", daemon=True)
            for replica in replicas
            if not replica.problem
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()  # a look, and a start, have deadlines of their own

    def _look_after(self, replica: PlacedReplica) -> None:
        misses = replacements = 0
        while not self._over.wait(_LOOK_EVERY_S):
            misses = 0 if replica.is_well() else misses + 1
            if misses < _MOST_MISSES:
                continue
            if replacements == _MOST_REPLACEMENTS:
                log.warning("reward-model replica %d has died again and again: it stays away", replica.number)
                replica.end()
                return
            misses, replacements = 0, replacements + 1
            try:
                self._replace(replica)
            except PracticumError as error:
                log.warning("reward-model replica %d cannot be started again: %s", replica.number, error)
                return
