"""A reward worker: takes stacks of samples, grades them at once or over time, and hands out scores as they come."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import uvloop

from practicum.controller import Worker
from practicum.reward.desks import Graded
from practicum.reward.hall import GradingHall, HallSettings
from practicum.types import PackedSamples, Sample, Score

_STOP_S = 10.0
_AT_A_TIME = 32
_RULES_S = 0.05
_FEW = 128  # samples
_HANDFUL = 256  # finished samples that are worth a way to the manager


@dataclass(frozen=True, slots=True)
class Stack:
    """Samples of one round with their places in it."""

    round: int
    places: Sequence[int]
    samples: Sequence[Sample]

    def first(self, num: int) -> Stack:
        return Stack(self.round, self.places[:num], self.samples[:num])

    def rest(self, num: int) -> Stack:
        return Stack(self.round, self.places[num:], self.samples[num:])

    def __reduce__(self) -> Any:
        packed: PackedSamples | bytes | None = PackedSamples.of(self.samples) if self.samples else None
        if len(self.samples) < _FEW:
            packed = pickle.dumps(packed, protocol=5)  # as one piece: Ray has its own work with every array
        return _unpacked, (self.round, self.places, packed)


def _unpacked(number: int, places: Sequence[int], packed: PackedSamples | bytes | None) -> Stack:
    if isinstance(packed, bytes):
        packed = pickle.loads(packed)
    assert not isinstance(packed, bytes)
    return Stack(number, places, packed.unpack() if packed else [])


@dataclass(frozen=True, slots=True)
class Handout:
    """What a worker has finished, and how many samples it still has."""

    graded: list[tuple[int, Graded]]
    num_left: int

    def __reduce__(self) -> Any:
        # As plain tuples, which pickle several times faster than the objects.
        rows = [
            (place, one.score.__reduce__()[1], (one.waited_s, one.ran_s, one.cache_hits)) for place, one in self.graded
        ]
        return _handed_out, (rows, self.num_left)


def _handed_out(rows: list[tuple[Any, ...]], num_left: int) -> Handout:
    return Handout([(place, Graded(Score(*score), *took)) for place, score, took in rows], num_left)


@dataclass(slots=True)
class _Round:
    """What a worker has of a round that is open."""

    num_left: int = 0
    graded: list[tuple[int, Graded]] = field(default_factory=list)  # not handed out yet
    unread: deque[tuple[int, Sample]] = field(default_factory=deque)  # to be graded by rule


class RewardLoopWorker(Worker):
    """Grades by rule itself; hands what may hang to processes that can be killed, and asks models over HTTP.

    Several rounds may be open at a time. They share what grades; their samples and scores are kept apart.
    """

    def __init__(self, settings: HallSettings) -> None:
        self._settings = settings
        self._rounds: dict[int, _Round] = {}  # with samples that are not handed out, by number
        self._unbegun: deque[tuple[int, int, Sample]] = deque()  # for the hall, each with its round and place
        self._tasks: dict[asyncio.Task[None], int] = {}  # and the round each is of
        self._news = threading.Condition()
        self._hall: GradingHall | None = None
        if not settings.rubric.is_by_rule or settings.cache_folder is not None:
            self._start_hall()

    def grade(self, stack: Stack, wait_s: float) -> Handout:
        """Begin with a stack, and hand out what is finished of its round within `wait_s`."""
        with self._news:
            own = self._rounds.setdefault(stack.round, _Round())
            own.num_left += len(stack.samples)
        if self._hall is None:
            own.unread.extend(zip(stack.places, stack.samples, strict=True))
        else:
            self._loop.call_soon_threadsafe(self._begin, stack)
        return self.collect(stack.round, wait_s)

    def collect(self, number: int, wait_s: float) -> Handout:
        """What has been finished of a round since the last time; waits up to `wait_s` for all of it, or for a good
        part."""
        own = self._rounds.get(number)
        if own is None:
            return Handout([], 0)
        if self._hall is None:
            self._grade_by_rule(own, max(wait_s, _RULES_S))
            wait_s = 0.0
        with self._news:
            self._news.wait_for(lambda: own.num_left == 0 or len(own.graded) >= _HANDFUL, wait_s)
            graded, own.graded = own.graded, []
            if own.num_left == 0:
                del self._rounds[number]
            return Handout(graded, own.num_left)

    def abandon(self, number: int) -> None:
        """Stop what is left of a round; its scores are not wanted any more."""
        with self._news:
            self._rounds.pop(number, None)
        if self._hall is not None:
            self._run(self._cancel(number))

    def close(self) -> None:
        if self._hall is not None:
            hall, self._hall = self._hall, None
            self._run(self._cancel())
            self._run(hall.close())
            self._end_loop()

    def _grade_by_rule(self, own: _Round, seconds: float) -> None:
        """Here and now, but no longer than that: whoever asks wants to hear how far it is."""
        now = time.monotonic()
        deadline = now + seconds
        while own.unread and now < deadline:
            place, sample = own.unread.popleft()
            start = now
            score = self._settings.rubric.grade_by_rule(sample)
            now = time.monotonic()
            own.graded.append((place, Graded(score, ran_s=now - start)))
            own.num_left -= 1

    def _start_hall(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="practicum-hall", daemon=True)
        self._thread.start()
        hall = GradingHall(self._settings)
        try:
            self._run(hall.start())
        except BaseException:
            self._end_loop()
            raise
        self._hall = hall
        gc.collect()
        gc.freeze()  # what there is now stays: no need to look through it again and again while samples come and go

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)
        self._loop.close()

    def _run(self, coroutine: Any) -> Any:
        """In the hall's loop, waited for here."""
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result()

    # In the hall's loop

    def _begin(self, stack: Stack) -> None:
        if stack.round in self._rounds:  # else it was abandoned
            self._unbegun.extend(
                (stack.round, place, sample) for place, sample in zip(stack.places, stack.samples, strict=True)
            )
            self._go_on()

    def _go_on(self) -> None:
        """A few at a time, so that these are already under way while the next are made ready.

        And not more than can be of use: what is made ready early takes its time from those whose turn it is.
        """
        assert self._hall is not None
        num = len(self._unbegun)
        if not self._hall.takes_lists:
            num = min(num, _AT_A_TIME, self._hall.most_at_once - len(self._tasks))
        for _ in range(num):
            number, place, sample = self._unbegun.popleft()
            task = self._loop.create_task(self._grade_one(number, place, sample))
            self._tasks[task] = number
            task.add_done_callback(self._one_done)
        if self._unbegun and num == _AT_A_TIME:
            self._loop.call_soon(self._go_on)

    def _one_done(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if self._unbegun:
            self._go_on()

    async def _grade_one(self, number: int, place: int, sample: Sample) -> None:
        assert self._hall is not None
        try:
            graded = await self._hall.grade(sample)
        except Exception as error:  # ours, not the grader's: nobody must wait for it for ever
            reason = "".join(traceback.format_exception(error)[-3:])
            graded = Graded(Score.failed("infra_error", f"the reward worker failed: {reason}"))
        with self._news:
            own = self._rounds.get(number)
            if own is not None:
                own.graded.append((place, graded))
                own.num_left -= 1
                if own.num_left == 0 or len(own.graded) == _HANDFUL:
                    self._news.notify_all()

    async def _cancel(self, number: int | None = None) -> None:
        """What is left of a round, or of all."""
        self._unbegun = deque(one for one in self._unbegun if number is not None and one[0] != number)
        tasks = [task for task, of in self._tasks.items() if number is None or of == number]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_STOP_S)
