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
from dataclasses import dataclass
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


class RewardLoopWorker(Worker):
    """Grades by rule itself; hands what may hang to processes that can be killed, and asks models over HTTP.

    One round at a time: a stack of another round puts what is left of the last one aside.
    """

    def __init__(self, settings: HallSettings) -> None:
        self._settings = settings
        self._round = -1
        self._graded: list[tuple[int, Graded]] = []
        self._unread: deque[tuple[int, Sample]] = deque()  # to be graded by rule
        self._unbegun: deque[tuple[int, Sample]] = deque()  # for the hall
        self._tasks: set[asyncio.Task[None]] = set()
        self._news = threading.Condition()
        self._num_left = 0
        self._hall: GradingHall | None = None
        if not settings.rubric.is_by_rule or settings.cache_folder is not None:
            self._start_hall()

    def grade(self, stack: Stack, wait_s: float) -> Handout:
        """Begin with a stack, and hand out what is finished within `wait_s`."""
        if stack.round != self._round:
            self.abandon()
            self._round = stack.round
        with self._news:
            self._num_left += len(stack.samples)
        if self._hall is None:
            self._unread.extend(zip(stack.places, stack.samples, strict=True))
        else:
            self._loop.call_soon_threadsafe(self._begin, stack)
        return self.collect(wait_s)

    def collect(self, wait_s: float) -> Handout:
        """What has been finished since the last time; waits up to `wait_s` for all of it, or for a good part."""
        if self._hall is None:
            self._grade_by_rule(max(wait_s, _RULES_S))
            wait_s = 0.0
        with self._news:
            self._news.wait_for(lambda: self._num_left == 0 or len(self._graded) >= _HANDFUL, wait_s)
            graded, self._graded = self._graded, []
            return Handout(graded, self._num_left)

    def abandon(self) -> None:
        """Stop what is left of the round; its scores are not wanted any more."""
        self._round = -1
        if self._hall is not None:
            self._run(self._cancel_all())
        self._unread.clear()
        with self._news:
            self._graded, self._num_left = [], 0

    def close(self) -> None:
        if self._hall is not None:
            hall, self._hall = self._hall, None
            self._run(self._cancel_all())
            self._run(hall.close())
            self._end_loop()

    def _grade_by_rule(self, seconds: float) -> None:
        """Here and now, but no longer than that: whoever asks wants to hear how far it is."""
        now = time.monotonic()
        deadline = now + seconds
        while self._unread and now < deadline:
            place, sample = self._unread.popleft()
            start = now
            score = self._settings.rubric.grade_by_rule(sample)
            now = time.monotonic()
            self._graded.append((place, Graded(score, ran_s=now - start)))
            self._num_left -= 1

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
        if stack.round == self._round:  # else it was abandoned
            self._unbegun.extend(zip(stack.places, stack.samples, strict=True))
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
            place, sample = self._unbegun.popleft()
            task = self._loop.create_task(self._grade_one(self._round, place, sample))
            self._tasks.add(task)
            task.add_done_callback(self._one_done)
        if self._unbegun and num == _AT_A_TIME:
            self._loop.call_soon(self._go_on)

    def _one_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._unbegun:
            self._go_on()

    async def _grade_one(self, round_number: int, place: int, sample: Sample) -> None:
        assert self._hall is not None
        try:
            graded = await self._hall.grade(sample)
        except Exception as error:  # ours, not the grader's: nobody must wait for it for ever
            reason = "".join(traceback.format_exception(error)[-3:])
            graded = Graded(Score.failed("infra_error", f"the reward worker failed: {reason}"))
        with self._news:
            if round_number == self._round:
                self._graded.append((place, graded))
                self._num_left -= 1
                if self._num_left == 0 or len(self._graded) == _HANDFUL:
                    self._news.notify_all()

    async def _cancel_all(self) -> None:
        self._unbegun.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_STOP_S)
