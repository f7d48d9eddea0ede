"""A reward worker: takes samples in lists, and streams what came of them as they are graded.

Rules are graded here. What may hang goes to processes that can be killed, models and services are asked over HTTP; see
executors.py. Samples of several calls may be under way at a time.
"""

from __future__ import annotations

import asyncio
import gc
import time
import traceback
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from practicum.controller import Worker
from practicum.errors import ProcessError, RewardError
from practicum.processes import Limits, ProcessPool
from practicum.reward.cache import ScoreCache
from practicum.reward.client import RewardClient, Target
from practicum.reward.executors import (
    Executor,
    Graded,
    GradingWork,
    HttpExecutor,
    InlineExecutor,
    JudgeExecutor,
    ProcessExecutor,
)
from practicum.reward.graders.base import IsolatedGrader, Rule
from practicum.reward.graders.function import UserFunction
from practicum.reward.graders.judge import Judge
from practicum.reward.graders.remote import RemoteGrader
from practicum.reward.limits import LimitClient
from practicum.reward.rubric import Rubric, Term, combined
from practicum.types import Sample, Score

_STOP_S = 10.0
_TURN_S = 0.05  # so long rules may hold up the event loop
_REPORT_S = 0.25  # no longer than that without a word: silence is a worker that hangs
_HANDFUL = 256  # graded samples that are worth a way to the manager
_WAITING = 64

Finished = list[tuple[int, Graded]]
"""What came of some samples of a list, each with its index in it."""


@dataclass(frozen=True, slots=True)
class RewardSettings:
    """The work of one reward worker, and its share of what it works with."""

    rubric: Rubric
    timeout_s: float
    num_processes: int = 1
    memory_bytes: int = 2048 << 20
    num_coroutines: int = 128
    """Calls of an async function at a time."""
    targets: Mapping[str, Target] = field(default_factory=dict)
    """The servers that are asked over HTTP, by the names that graders have for them."""
    limits_at: tuple[str, int] | None = None
    secret: str = field(default="", repr=False)
    """Of the run: what the keeper of the limits wants to hear."""
    cache_folder: str | None = None
    cache_version: str = ""

    @property
    def most_at_once(self) -> int:
        """Return how many samples are of use to a worker at a time: those under way, and some that wait behind."""
        graders = [term.grader for term in self.rubric.terms]
        if any(isinstance(grader, UserFunction) and grader.shape.takes_list for grader in graders):
            return 1 << 30  # a function of a list sees all that came together
        windows = [target.window for target in self.targets.values()]
        return max(self.num_processes, self.num_coroutines, *windows) + _WAITING

    @property
    def is_inline(self) -> bool:
        """True if every grader is a rule and nothing is looked up: no executor ever waits."""
        return self.rubric.is_by_rule and self.cache_folder is None


class RewardLoopWorker(Worker):
    """Grades samples. Belongs to the event loop in which it is started."""

    def __init__(self, settings: RewardSettings) -> None:
        self._settings = settings
        self._rubric = settings.rubric
        self._cache: ScoreCache | None = None
        self._limits: LimitClient | None = None
        self._client: RewardClient | None = None
        self._pools: dict[bool, ProcessPool] = {}  # for coroutines (True), and for what blocks
        self._executors: dict[int, Executor] = {}  # by the identity of the term
        self._open = AsyncExitStack()
        self._starting: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Start what stands behind the executors. Raises RewardError where a grader cannot work at all.

        Doing it twice does nothing.
        """
        if self._starting is None:
            self._loop = asyncio.get_running_loop()
            self._starting = asyncio.ensure_future(self._start())
        await asyncio.shield(self._starting)

    async def close(self) -> None:
        """End all that was started, and what is under way. Doing it twice does nothing."""
        loop = self._loop
        if loop is None or loop.is_closed() or loop is asyncio.get_running_loop():
            await self._close()
        else:  # a group in this process is shut down from another thread
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._close(), loop))

    async def _close(self) -> None:
        starting, self._starting = self._starting, None
        if starting is not None:
            starting.cancel()
            await asyncio.wait([starting])
        await self._open.aclose()
        self._executors.clear()

    async def grade(self, samples: list[Sample]) -> AsyncGenerator[Finished, None]:
        """Stream what came of each sample, in lists as they are finished; an empty list says that it goes on.

        Closing the stream ends what is left.
        """
        await self.start()
        if self._settings.is_inline:
            for finished in grade_by_rule(self._rubric, samples, _TURN_S):
                yield finished
                await asyncio.sleep(0)
            return
        todo, finished, is_due = iter(enumerate(samples)), Finished(), asyncio.Event()
        num_left = len(samples)

        async def grade_some() -> None:
            for index, sample in todo:
                finished.append((index, await self._grade(sample)))
                if len(finished) >= min(_HANDFUL, num_left):
                    is_due.set()

        tasks = [asyncio.ensure_future(grade_some()) for _ in samples[: self._settings.most_at_once]]
        try:
            while num_left:
                try:
                    async with asyncio.timeout(_REPORT_S):
                        await is_due.wait()
                    is_due.clear()
                except TimeoutError:
                    _check_none_failed(tasks)
                report, finished[:] = list(finished), []
                num_left -= len(report)
                yield report
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=_STOP_S)

    async def _grade(self, sample: Sample) -> Graded:
        try:
            terms = self._rubric.of(sample.prompt)
            if len(terms) == 1:
                all_graded = [await self._grade_term(terms[0], sample)]
            else:
                all_graded = await asyncio.gather(*(self._grade_term(term, sample) for term in terms))
            score = combined(terms, [graded.score for graded in all_graded])
        except Exception as error:  # ours, not the grader's: nobody must wait for it for ever
            reason = "".join(traceback.format_exception(error)[-3:])
            return Graded(Score.failed("infra_error", f"the reward worker failed: {reason}"))
        return Graded(
            score,
            waited_s=max((graded.waited_s for graded in all_graded), default=0.0),
            ran_s=sum(graded.ran_s for graded in all_graded),
            cache_hits=sum(graded.cache_hits for graded in all_graded),
        )

    async def _grade_term(self, term: Term, sample: Sample) -> Graded:
        executor = self._executors[id(term)]
        if self._cache is None:
            return await executor.grade(sample)
        key = self._cache.key(term.identity, sample)
        kept = self._cache.get(key)
        if kept is not None:
            return Graded(kept, cache_hits=1)
        graded = await executor.grade(sample)
        self._cache.put(key, graded.score)
        return graded

    async def _start(self) -> None:
        settings = self._settings
        try:
            if settings.cache_folder is not None:
                self._cache = ScoreCache(settings.cache_folder, settings.cache_version)
            if settings.limits_at is not None:
                self._limits = await LimitClient.connect(settings.limits_at, settings.secret)
                self._open.callback(self._limits.close)
            if self._rubric.asks:
                self._client = RewardClient(settings.targets)
                self._open.push_async_callback(self._client.close)
            await self._start_pool(False, settings.num_processes, 1)
            await self._start_pool(True, 1, settings.num_coroutines)
            for index, term in enumerate(self._rubric.terms):
                self._executors[id(term)] = self._executor(index, term)
        except BaseException:
            await self._open.aclose()
            raise
        gc.collect()
        gc.freeze()  # what there is now stays: no need to look through it again and again while samples come and go

    async def _start_pool(self, is_async: bool, size: int, capacity: int) -> None:
        """Start the pool for coroutines, or for what blocks, where a term needs it."""
        graders = {i: term.grader for i, term in enumerate(self._rubric.terms) if _pool_of(term) is is_async}
        if not graders:
            return
        limits = Limits(self._settings.memory_bytes, capacity)
        pool = self._pools[is_async] = ProcessPool(GradingWork(graders, is_async), size=size, limits=limits)
        try:
            await pool.start()
        except ProcessError as error:
            raise RewardError(f"answers cannot be graded: {error}") from error
        self._open.push_async_callback(pool.close)

    def _executor(self, index: int, term: Term) -> Executor:
        grader, is_async, timeout_s = term.grader, _pool_of(term), self._settings.timeout_s
        if isinstance(grader, RemoteGrader):
            assert self._client is not None
            grader.prepare()
            if is_async is None:
                return HttpExecutor(grader, self._client, self._limits)
            assert isinstance(grader, Judge)
            return JudgeExecutor(grader, self._client, self._limits, self._pools[is_async], index, timeout_s)
        if is_async is not None:
            assert isinstance(grader, UserFunction | IsolatedGrader)
            limits = self._limits if isinstance(grader, UserFunction) else None  # our own graders ask nobody
            return ProcessExecutor(self._pools[is_async], index, grader, timeout_s, limits)
        grader.prepare()
        assert isinstance(grader, Rule)
        return InlineExecutor(grader)


def _check_none_failed(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Raise RewardError if a task ended without the score of its sample, which would be waited for in vain."""
    for task in filter(asyncio.Task.done, tasks):
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            raise RewardError(f"the reward worker ended grading a sample without a score: {error!r}") from error


def grade_by_rule(rubric: Rubric, samples: Sequence[Sample], turn_s: float) -> Iterator[Finished]:
    """Grade samples one after the other, and yield what is finished every `turn_s`."""
    finished: Finished = []
    start = turn = time.monotonic()
    for index, sample in enumerate(samples):
        score = rubric.grade_by_rule(sample)
        now = time.monotonic()
        finished.append((index, Graded(score, ran_s=now - start)))
        start = now
        if now - turn > turn_s:
            yield finished
            finished, start = [], time.monotonic()
            turn = start
    yield finished


def _pool_of(term: Term) -> bool | None:
    """Return whether a term is graded among coroutines; None if it needs no process."""
    if isinstance(term.grader, UserFunction):
        return term.grader.shape.is_async
    if isinstance(term.grader, Judge):
        return False if term.grader.reads_in_process else None
    return False if isinstance(term.grader, IsolatedGrader) else None
