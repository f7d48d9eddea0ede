"""Executors: where one term of the rubric grades a sample.

    inline     rules, which are quick and sure to end, in the reward worker itself
    process    functions, and graders that may hang or crash, in processes that can be killed
    HTTP       models and services, which are asked

An executor never raises for what a sample or a grader does: it returns what came of it, with a status. Where one of the
built-in graders fails on an answer, and can grade another one to the same prompt, the answer gets a zero: a model must
not learn to be left out. Limits that all workers share hold for each request to a process or over HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from practicum.processes import JobFailed, ProcessPool, Work
from practicum.reward.client import AskFailed, RewardClient
from practicum.reward.graders.base import Grader, IsolatedGrader, Rule
from practicum.reward.graders.function import UserFunction
from practicum.reward.graders.judge import Judge
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

log = logging.getLogger(__name__)


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


class GradingWork(Work):
    """The work of grading processes: a job is the index of a grader, and a sample or a list of them. For a judge it is
    what the judge said.

    With `is_async` all graders are coroutine functions of the user, many of which run at a time in one process.
    """

    def __init__(self, graders: Mapping[int, Grader], is_async: bool = False) -> None:
        self._graders: Mapping[int, Any] = graders
        self._is_async = is_async

    def prepare(self) -> None:
        for grader in self._graders.values():
            grader.prepare()

    @property
    def run(self) -> Callable[[Any], Any]:
        return self._run_async if self._is_async else self._run

    def _run(self, job: tuple[int, Any]) -> Any:
        grader = self._graders[job[0]]
        return grader.find(job[1]) if isinstance(grader, Judge) else grader.grade(job[1])

    async def _run_async(self, job: tuple[int, Any]) -> Any:
        return await self._graders[job[0]].grade_async(job[1])


def _permit(limits: LimitClient | None, samples: Sequence[Sample]) -> AbstractAsyncContextManager[Permit | None]:
    return nullcontext() if limits is None else limits.permit(sum(sample.num_tokens for sample in samples))


@dataclass(slots=True, eq=False)
class _SampleList:
    """Samples that are graded together."""

    samples: list[Sample] = field(default_factory=list)
    num_waiting: int = 0
    task: asyncio.Task[list[Graded]] = field(init=False)


class ProcessExecutor:
    """Grades each sample in a process of a pool.

    A function of a list gets the samples that come in one turn of the event loop together, up to `_LONGEST_LIST` of
    them, and the time of one sample for the list. If it fails, or returns another number of scores, each of them is
    graded alone, so that one that cannot be graded does not cost the others their score.
    """

    def __init__(
        self,
        pool: ProcessPool,
        index: int,
        grader: UserFunction | IsolatedGrader,
        timeout_s: float,
        limits: LimitClient | None,
    ) -> None:
        self._pool = pool
        self._index = index
        self._grader = grader
        self._timeout_s = timeout_s
        self._limits = limits
        # As many as there is room for and as many again ask for a permit, so that the next ones already wait for it.
        self._window = asyncio.Semaphore(2 * pool.num_at_once)
        self._takes_list = isinstance(grader, UserFunction) and grader.shape.takes_list
        self._has_complained = False
        self._open_list: _SampleList | None = None  # which takes more samples

    async def grade(self, sample: Sample) -> Graded:
        if not self._takes_list:
            return (await self._run(sample, [sample]))[0]
        mine = self._open_list
        if mine is None or len(mine.samples) == _LONGEST_LIST:
            mine = self._open_list = _SampleList()
            mine.task = asyncio.ensure_future(self._grade_list(mine))  # begins after this turn of the loop
        index = len(mine.samples)
        mine.samples.append(sample)
        mine.num_waiting += 1
        try:
            return (await asyncio.shield(mine.task))[index]
        finally:
            mine.num_waiting -= 1
            if not mine.num_waiting:
                self._close_list(mine)
                mine.task.cancel()

    async def _grade_list(self, mine: _SampleList) -> list[Graded]:
        self._close_list(mine)
        return await self._run(mine.samples, mine.samples)

    def _close_list(self, mine: _SampleList) -> None:
        if self._open_list is mine:
            self._open_list = None

    async def _run(self, job: Sample | list[Sample], samples: list[Sample]) -> list[Graded]:
        asked_at = begun_at = time.monotonic()
        try:
            async with self._window, _permit(self._limits, samples):
                begun_at = time.monotonic()
                result = await self._pool.run((self._index, job), self._timeout_s)
        except JobFailed as failure:
            if len(samples) > 1:
                return await self._each_alone(samples)
            score = Score.failed(_STATUS[failure.kind], failure.reason)
            if await self._is_to_blame(samples[0]):
                score = Score(0.0)
            return [Graded(score, begun_at - asked_at + failure.waited_s, failure.ran_s)]
        except ConnectionError as error:  # of the limits
            return [Graded(Score.failed("infra_error", str(error)))] * len(samples)
        scores = result.value if isinstance(job, list) else [result.value]
        if len(scores) != len(samples):
            what = f"returned {len(scores)} scores for {len(samples)} samples"
            self._complain(what)
            if len(samples) > 1:
                return await self._each_alone(samples)
            scores = [Score.failed("invalid", what)]
        waited_s = begun_at - asked_at + result.waited_s
        return [Graded(score, waited_s, result.ran_s / len(samples)) for score in scores]

    async def _each_alone(self, samples: list[Sample]) -> list[Graded]:
        alone = await asyncio.gather(*(self._run([sample], [sample]) for sample in samples))
        return [graded for (graded,) in alone]

    def _complain(self, what: str) -> None:
        if not self._has_complained:
            assert isinstance(self._grader, UserFunction)
            log.warning(
                "the reward function %s %s: they are graded one by one. Return one score for each sample of the list, "
                "in their order.",
                self._grader.function,
                what,
            )
        self._has_complained = True

    async def _is_to_blame(self, sample: Sample) -> bool:
        """Return whether a grader of ours that failed on this answer can grade another one to the same prompt."""
        if not isinstance(self._grader, IsolatedGrader):
            return False
        try:
            reference = replace(sample, text=self._grader.reference(sample.prompt))
            async with self._window:
                result = await self._pool.run((self._index, reference), self._timeout_s)
        except (JobFailed, ValueError):  # a ground truth that cannot be used
            return False
        return isinstance(result.value, Score) and result.value.status == "ok"


class HttpExecutor:
    """Asks a model or a service, with as many requests at a time as its target's window holds."""

    def __init__(self, grader: RemoteGrader, client: RewardClient, limits: LimitClient | None) -> None:
        target = client.targets[grader.target]
        self._grader = grader
        self._client = client
        self._timeout_s = target.timeout_s
        self._window = asyncio.Semaphore(target.window)
        self._limits = limits

    async def grade(self, sample: Sample) -> Graded:
        start = time.monotonic()
        try:
            async with self._window, _permit(self._limits, [sample]) as permit:
                begun = time.monotonic()
                score = await self._score(sample, self._client if permit is None else self._client.using(permit))
        except ConnectionError as error:  # of the limits
            return Graded(Score.failed("infra_error", str(error)))
        return Graded(score, waited_s=begun - start, ran_s=time.monotonic() - begun)

    async def _score(self, sample: Sample, client: RewardClient) -> Score:
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                return await self._ask(sample, client)
        except AskFailed as failure:
            return Score.failed(failure.status, failure.reason)
        except Exception as error:
            if deadline.expired():
                return Score.failed("timeout", f"no answer within {self._timeout_s:g} s")
            return Score.failed("invalid", f"raised {type(error).__name__}: {error}")

    async def _ask(self, sample: Sample, client: RewardClient) -> Score:
        return await self._grader.grade(sample, client)


class JudgeExecutor(HttpExecutor):
    """Asks a judge, and searches what it said in processes of a pool, each vote for up to `timeout_s`: a pattern of the
    user's may never end, and would hold up the event loop."""

    def __init__(
        self,
        judge: Judge,
        client: RewardClient,
        limits: LimitClient | None,
        pool: ProcessPool,
        index: int,
        timeout_s: float,
    ) -> None:
        super().__init__(judge, client, limits)
        self._judge = judge
        self._pool = pool
        self._index = index
        self._search_s = timeout_s

    async def _ask(self, sample: Sample, client: RewardClient) -> Score:
        said = await self._judge.ask(sample, client)
        if isinstance(said, Score):
            return said
        searches = [self._pool.run((self._index, text), self._search_s) for text in said]
        found: list[str | None] = []
        trouble = ""
        for result in await asyncio.gather(*searches, return_exceptions=True):
            if isinstance(result, JobFailed) and result.kind != "lost":
                found.append(None)
                trouble = f"The pattern {self._judge.pattern!r} {result.reason}. "
            elif isinstance(result, BaseException):
                raise AskFailed("infra_error", f"what the judge said could not be searched: {result}") from result
            else:
                found.append(result.value)
        return self._judge.decide(said, found, trouble)
