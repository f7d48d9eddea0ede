"""Executors: where one term of the rubric grades a sample.

    inline     rules, which are quick and sure to end, in the reward worker itself
    process    functions, and graders that may hang or crash, in processes that can be killed
    HTTP       models and services, which are asked

An executor never raises for what a sample or a grader does: it returns what came of it, with a status. Limits that all
workers share hold for each request to a process or over HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from practicum.processes import JobFailed, ProcessPool, Work
from practicum.reward.client import AskFailed, RewardClient
from practicum.reward.graders.base import IsolatedGrader, Rule
from practicum.reward.graders.function import UserFunction
from practicum.reward.graders.remote import RemoteGrader
from practicum.reward.limits import LimitClient, Permit
from practicum.reward.rubric import graded_by_rule
from practicum.types import Sample, Score, ScoreStatus

_STATUS: dict[str, ScoreStatus] = {
    "raised": "invalid",
    "crashed": "invalid",
    "timeout": "timeout",
    "lost": "infra_error",
}
_LONGEST_LIST = 32


@dataclass(frozen=True, slots=True)
class Graded:
    """A score and what it took."""

    score: Score
    waited_s: float = 0.0  # for a process or for the limits
    ran_s: float = 0.0
    cache_hits: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        # As plain tuples, which pickle several times faster than the objects.
        return _graded, (self.score.__reduce__()[1], self.waited_s, self.ran_s, self.cache_hits)


def _graded(score: tuple[Any, ...], waited_s: float, ran_s: float, cache_hits: int) -> Graded:
    return Graded(Score(*score), waited_s, ran_s, cache_hits)


class Executor(Protocol):
    async def grade(self, sample: Sample) -> Graded: ...


class InlineExecutor:
    def __init__(self, grader: Rule) -> None:
        self._grader = grader

    async def grade(self, sample: Sample) -> Graded:
        start = time.monotonic()
        score = graded_by_rule(self._grader, sample)
        return Graded(score, ran_s=time.monotonic() - start)


class IsolatedWork(Work):
    """The work of grading processes: a job is the index of a grader, and a sample or a list of them."""

    def __init__(self, graders: Mapping[int, IsolatedGrader | UserFunction]) -> None:
        self._graders = graders

    def prepare(self) -> None:
        for grader in self._graders.values():
            grader.prepare()

    @property
    def run(self) -> Callable[[Any], Any]:
        return self._run

    def _run(self, job: tuple[int, Sample | list[Sample]]) -> Score | list[Score]:
        index, given = job
        grader = self._graders[index]
        if isinstance(given, Sample):
            return grader.grade(given)
        assert isinstance(grader, UserFunction)
        return grader.grade_list(given)


class AsyncWork(IsolatedWork):
    """The same with functions that are coroutines, many at a time in one process."""

    @property
    def run(self) -> Callable[[Any], Any]:
        return self._run_async

    async def _run_async(self, job: tuple[int, Sample | list[Sample]]) -> Score | list[Score]:
        index, given = job
        grader = self._graders[index]
        assert isinstance(grader, UserFunction)
        if isinstance(given, Sample):
            return await grader.grade_async(given)
        return await grader.grade_list_async(given)


class ProcessExecutor:
    """Grades each sample in a process of a pool.

    A function of a list gets the samples that come in one turn of the event loop together, up to `_LONGEST_LIST` of
    them, and the time of one sample for the list. If it fails, each of them is graded alone, so that one that cannot be
    graded does not cost the others their score.
    """

    def __init__(
        self, pool: ProcessPool, index: int, timeout_s: float, limits: LimitClient | None, *, takes_list: bool = False
    ) -> None:
        self._pool = pool
        self._index = index
        self._timeout_s = timeout_s
        self._limits = limits
        # As many as there is room for and as many again ask for a permit, so that the next ones already wait for it.
        self._window = asyncio.Semaphore(2 * pool.num_at_once)
        self._takes_list = takes_list
        self._gathered: list[tuple[Sample, asyncio.Future[Graded]]] = []
        self._under_way: set[asyncio.Task[None]] = set()

    async def grade(self, sample: Sample) -> Graded:
        if not self._takes_list:
            return (await self._run(sample, [sample]))[0]
        loop = asyncio.get_running_loop()
        graded: asyncio.Future[Graded] = loop.create_future()
        if not self._gathered:
            loop.call_soon(self._grade_gathered)
        self._gathered.append((sample, graded))
        return await graded

    async def _run(self, job: Sample | list[Sample], samples: list[Sample]) -> list[Graded]:
        asked_at = begun_at = time.monotonic()
        try:
            if self._limits is None:
                result = await self._pool.run((self._index, job), self._timeout_s)
            else:
                async with self._window, self._limits.permit(sum(sample.num_tokens for sample in samples)):
                    begun_at = time.monotonic()
                    result = await self._pool.run((self._index, job), self._timeout_s)
        except JobFailed as failure:
            if len(samples) > 1:
                alone = await asyncio.gather(*(self._run([sample], [sample]) for sample in samples))
                return [graded for (graded,) in alone]
            score = Score.failed(_STATUS[failure.kind], failure.reason)
            return [Graded(score, begun_at - asked_at + failure.waited_s, failure.ran_s)]
        except ConnectionError as error:  # of the limits
            return [Graded(Score.failed("infra_error", str(error)))] * len(samples)
        scores = result.value if isinstance(job, list) else [result.value]
        waited_s = begun_at - asked_at + result.waited_s
        return [Graded(score, waited_s, result.ran_s / len(samples)) for score in scores]

    def _grade_gathered(self) -> None:
        gathered, self._gathered = self._gathered, []
        for start in range(0, len(gathered), _LONGEST_LIST):
            self._begin(gathered[start : start + _LONGEST_LIST])

    def _begin(self, gathered: list[tuple[Sample, asyncio.Future[Graded]]]) -> None:
        task = asyncio.get_running_loop().create_task(self._grade_list(gathered))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

        def cancel_if_unwanted(future: asyncio.Future[Graded]) -> None:
            if all(future.cancelled() for _, future in gathered):
                task.cancel()

        for _, future in gathered:
            future.add_done_callback(cancel_if_unwanted)

    async def _grade_list(self, gathered: list[tuple[Sample, asyncio.Future[Graded]]]) -> None:
        samples = [sample for sample, _ in gathered]
        try:
            all_graded = await self._run(samples, samples)
        except Exception as error:  # ours: nobody must wait for it for ever
            failed = Graded(Score.failed("infra_error", f"the reward worker failed: {type(error).__name__}: {error}"))
            all_graded = [failed] * len(samples)
        for (_, future), graded in zip(gathered, all_graded, strict=True):
            if not future.done():
                future.set_result(graded)


class HttpExecutor:
    """Asks a model or a service, with up to `window` requests at a time."""

    def __init__(
        self, grader: RemoteGrader, client: RewardClient, timeout_s: float, window: int, limits: LimitClient | None
    ) -> None:
        self._grader = grader
        self._client = client
        self._timeout_s = timeout_s
        self._window = asyncio.Semaphore(window)
        self._limits = limits

    async def grade(self, sample: Sample) -> Graded:
        start = time.monotonic()
        try:
            async with self._window, self._permit(sample) as permit:
                begun = time.monotonic()
                score = await self._score(sample, self._client if permit is None else self._client.using(permit))
        except ConnectionError as error:  # of the limits
            return Graded(Score.failed("infra_error", str(error)))
        return Graded(score, waited_s=begun - start, ran_s=time.monotonic() - begun)

    def _permit(self, sample: Sample) -> AbstractAsyncContextManager[Permit | None]:
        return nullcontext() if self._limits is None else self._limits.permit(sample.num_tokens)

    async def _score(self, sample: Sample, client: RewardClient) -> Score:
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                return await self._grader.grade(sample, client)
        except AskFailed as failure:
            return Score.failed(failure.status, failure.reason)
        except Exception as error:
            if deadline.expired():
                return Score.failed("timeout", f"no answer within {self._timeout_s:g} s")
            return Score.failed("invalid", f"raised {type(error).__name__}: {error}")
