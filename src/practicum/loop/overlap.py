"""Rollout and training at the same time: batches that are made ahead of the step that learns from them, and turns.

    step n learns from batch n ─▶ version n is out ─▶ batch n + 1 + staleness may be begun

    staleness 1     batch 3  [write][grade]
                    batch 4          [write][grade]
                    learner               [ 3 ]    [ 4 ]

A batch is begun once its oldest weights would be `staleness` versions old when it is learnt from, and no earlier: so no
token is ever older, and so many batches are under way or waiting at most. Each has a thread of its own, in which it is
written, graded, and written on where prompts are renewed. One writes at a time, the one that is learnt from first
before the others. Where learners and writers share processes or places, they take turns.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from practicum.config import Config
from practicum.errors import RolloutError
from practicum.loop.metrics import Stopwatch

T = TypeVar("T")
log = logging.getLogger("practicum")
_END_S, _TELL_S = 60.0, 300.0
_AHEAD = "time/ahead/"  # beside the step, not a part of it
FIRST = -1
"""The rank of those who go before all batches."""


class Turn:
    """A lock for whoever has the lowest rank of those who wait."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, int]] = []
        self._is_held = False
        self._is_over = False
        self._free_since = time.monotonic()

    @contextmanager
    def held(self, rank: int) -> Iterator[float]:
        """For the time of the block; how many seconds nobody had held it before. Whoever holds it has deadlines of its
        own."""
        mine = rank, next(self._numbers)
        with self._news:
            self._waiting.append(mine)
            try:
                self._news.wait_for(lambda: self._is_over or (not self._is_held and mine == min(self._waiting)))
            finally:
                self._waiting.remove(mine)
                self._news.notify_all()
            if self._is_over:
                raise RolloutError("the run has ended.")
            self._is_held = True
            free_s = time.monotonic() - self._free_since
        try:
            yield free_s
        finally:
            with self._news:
                self._is_held = False
                self._free_since = time.monotonic()
                self._news.notify_all()

    def end(self) -> None:
        """Whoever waits or comes gets an error."""
        with self._news:
            self._is_over = True
            self._news.notify_all()


class Turns:
    """Who has the writers, and who the places of the learners.

    Writers that live in the learners' processes or on their places take turns with them; so do models that grade and
    sleep otherwise. The learner goes before the writers: what is written after it has learnt is newer.
    """

    def __init__(self, config: Config, *, models_sleep: bool) -> None:
        self._places = Turn()
        self._writers = Turn() if config.rollout.placement == "standalone" else self._places
        self._models_sleep = models_sleep
        self._is_timed = config.trainer.staleness > 0

    @contextmanager
    def writing(self, rank: int, watch: Stopwatch) -> Iterator[None]:
        """`rank`: the number of the batch that is written, or `FIRST`."""
        asked = time.monotonic()
        with self._writers.held(rank) as free_s:
            if self._is_timed:
                watch.add("turn", time.monotonic() - asked)
                watch.add("idle", free_s)
            yield

    def grading(self, rank: int) -> AbstractContextManager[object]:
        """While scores are waited for."""
        return self._places.held(rank) if self._models_sleep else nullcontext()

    @contextmanager
    def learning(self, watch: Stopwatch) -> Iterator[None]:
        asked = time.monotonic()
        with self._places.held(FIRST):
            if self._is_timed:
                watch.add("turn", time.monotonic() - asked)
            yield

    def end(self) -> None:
        self._places.end()
        self._writers.end()


@dataclass(slots=True)
class _Batch(Generic[T]):
    make: Callable[[Stopwatch], T]
    watch: Stopwatch = field(default_factory=Stopwatch)
    made: T | None = None
    error: BaseException | None = None
    is_done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        try:
            self.made = self.make(self.watch)
        except BaseException as error:  # is raised where the batch is taken
            self.error = error
        finally:
            self.is_done.set()


class Buffer(Generic[T]):
    """Batches by the number of the step that learns from them. With staleness 0 each is made when it is taken."""

    def __init__(
        self,
        begin: Callable[[int], Callable[[Stopwatch], T]],
        *,
        staleness: int,
        last: int,
        break_off: Callable[[], None] = lambda: None,
    ) -> None:
        """`begin(number)` is called in order, in the caller's thread; what it returns makes the batch, in another one.
        `break_off` has all that are being made end soon, with an error."""
        self._begin = begin
        self._staleness = staleness
        self._last = last
        self._break_off = break_off
        self._batches: dict[int, _Batch[T]] = {}
        self._threads: list[threading.Thread] = []
        self._next = last + 1

    def begin_at(self, number: int) -> None:
        """Which step comes first: the weights of the one before it are out."""
        self._next = number
        self.published(number - 1)

    def published(self, version: int) -> None:
        """Batches may be written with these weights, and all that are young enough by now are begun."""
        if not self._staleness:
            return
        while self._next <= min(self._last, version + 1 + self._staleness):
            self._start(self._next)
            self._next += 1

    def take(self, number: int, watch: Stopwatch) -> T:
        """The batch; whatever went wrong with it is raised here."""
        if not self._staleness:
            return self._begin(number)(watch)
        batch = self._batches[number]
        num_ready = sum(one.is_done.is_set() for one in self._batches.values())
        with watch.phase("waiting"):
            while not batch.is_done.wait(_TELL_S):  # what its thread waits for has deadlines of its own
                done = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in batch.watch.seconds.items())
                log.warning("step %d still waits for its batch; done of it so far: %s", number, done or "nothing")
        del self._batches[number]
        if batch.error is not None:
            raise batch.error
        watch.besides |= {f"{_AHEAD}{name}_s": seconds for name, seconds in batch.watch.seconds.items()}
        watch.besides |= {f"{_AHEAD}ready": float(num_ready)}
        assert batch.made is not None
        return batch.made

    def close(self) -> None:
        """Whatever is under way is broken off. A thread that does not end is told to the log: it ends with the
        processes it waits for."""
        self._last = 0
        for number, batch in self._batches.items():
            if batch.error is not None:  # often the cause of what else went wrong, and nobody takes it any more
                log.warning("the batch of step %d had failed: %s", number, batch.error)
        running = [thread for thread in self._threads if thread.is_alive()]
        if not running:
            return
        self._break_off()
        deadline = time.monotonic() + _END_S
        for thread in running:
            thread.join(max(0.0, deadline - time.monotonic()))
        late = [thread.name for thread in running if thread.is_alive()]
        if late:
            log.warning("%s did not end within %g s", ", ".join(late), _END_S)

    def _start(self, number: int) -> None:
        batch = self._batches[number] = _Batch(self._begin(number))
        # A thread that hangs must not keep the process from ending.
        thread = threading.Thread(target=batch.run, name=f"practicum-batch-{number}", daemon=True)
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        thread.start()
