"""Desks: where a sample is graded by one term, each kind of grader in its own way, and what can stand in front of them.

    Cached ─▶ RuleDesk | ProcessDesk | ListDesk | RemoteDesk ─▶ the limits of all workers together, where they count

A desk never raises for what a sample or a grader does: it returns what came of it, with a status.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from practicum.processes import JobFailed, ProcessPool, Work
from practicum.reward.cache import ScoreCache
from practicum.reward.client import AskFailed, RewardClient
from practicum.reward.graders.base import IsolatedGrader
from practicum.reward.graders.function import UserFunction
from practicum.reward.graders.remote import RemoteGrader
from practicum.reward.limits import LimitClient, Permit
from practicum.reward.rubric import Term, graded_by_rule
from practicum.types import Prompt, Sample, Score, ScoreStatus

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


class Desk(Protocol):
    async def grade(self, sample: Sample) -> Graded: ...


class RuleDesk:
    def __init__(self, term: Term) -> None:
        self._term = term

    async def grade(self, sample: Sample) -> Graded:
        start = time.monotonic()
        return Graded(graded_by_rule(self._term, sample), ran_s=time.monotonic() - start)


Slip = tuple[Any, ...]
"""A sample on its way to a process: bytes travel several times faster than small arrays."""


def slip_of(sample: Sample) -> Slip:
    prompt, prompt_ids, token_ids, log_probs, loss_mask, versions, text, finish_reason, _ = sample.__reduce__()[1]
    return (
        prompt.__reduce__()[1],
        np.asarray(prompt_ids, np.int32).tobytes(),
        np.asarray(token_ids, np.int32).tobytes(),
        np.asarray(log_probs, np.float32).tobytes(),
        np.asarray(loss_mask, np.bool_).tobytes(),
        np.asarray(versions, np.int32).tobytes(),
        text,
        finish_reason,
    )


def sample_of(slip: Slip) -> Sample:
    """Its arrays are read-only."""
    prompt, prompt_ids, token_ids, log_probs, loss_mask, versions, text, finish_reason = slip
    return Sample(
        Prompt(*prompt),
        np.frombuffer(prompt_ids, np.int32),
        np.frombuffer(token_ids, np.int32),
        np.frombuffer(log_probs, np.float32),
        np.frombuffer(loss_mask, np.bool_),
        np.frombuffer(versions, np.int32),
        text,
        finish_reason,
    )


class IsolatedWork(Work):
    """What grading processes do: a job is the index of a grader, and the slip of a sample or a list of them."""

    def __init__(self, graders: Mapping[int, IsolatedGrader | UserFunction]) -> None:
        self._graders = graders

    def prepare(self) -> None:
        for grader in self._graders.values():
            grader.prepare()

    @property
    def run(self) -> Callable[[Any], Any]:
        return self._run

    def _run(self, job: tuple[int, Slip | list[Slip]]) -> Score | list[Score]:
        index, given = job
        grader = self._graders[index]
        if isinstance(given, tuple):
            return grader.grade(sample_of(given))
        assert isinstance(grader, UserFunction)
        return grader.grade_list([sample_of(slip) for slip in given])


class AsyncWork(IsolatedWork):
    """The same with functions that are coroutines, many at a time in one process."""

    @property
    def run(self) -> Callable[[Any], Any]:
        return self._run_async

    async def _run_async(self, job: tuple[int, Slip | list[Slip]]) -> Score | list[Score]:
        index, given = job
        grader = self._graders[index]
        assert isinstance(grader, UserFunction)
        if isinstance(given, tuple):
            return await grader.grade_async(sample_of(given))
        return await grader.grade_list_async([sample_of(slip) for slip in given])


def _failed(failure: JobFailed) -> Graded:
    return Graded(Score.failed(_STATUS[failure.kind], failure.reason), failure.waited_s, failure.ran_s)


class ProcessDesk:
    """One sample, one job."""

    def __init__(self, pool: ProcessPool, index: int, timeout_s: float, limits: LimitClient | None) -> None:
        self._pool = pool
        self._index = index
        self._timeout_s = timeout_s
        self._limits = limits

    async def grade(self, sample: Sample) -> Graded:
        permit = None if self._limits is None else self._limits.permit(sample.num_tokens)
        try:
            result = await self._pool.run((self._index, slip_of(sample)), self._timeout_s, permit)
        except JobFailed as failure:
            return _failed(failure)
        except ConnectionError as error:
            return Graded(Score.failed("infra_error", str(error)))
        return Graded(result.value, result.waited_s, result.ran_s)


class ListDesk:
    """Samples that come together are graded together: a function of a list sees up to `_LONGEST_LIST` of them at once.

    The list has the time of one sample. If it fails, each of its samples is graded by itself, so that one that cannot
    be graded does not cost the others their score.
    """

    def __init__(self, pool: ProcessPool, index: int, timeout_s: float, limits: LimitClient | None) -> None:
        self._pool = pool
        self._index = index
        self._timeout_s = timeout_s
        self._limits = limits
        self._gathered: list[tuple[Sample, asyncio.Future[Graded]]] = []
        self._under_way: set[asyncio.Task[None]] = set()

    async def grade(self, sample: Sample) -> Graded:
        loop = asyncio.get_running_loop()
        graded: asyncio.Future[Graded] = loop.create_future()
        if not self._gathered:
            loop.call_soon(self._begin)
        self._gathered.append((sample, graded))
        return await graded

    def _begin(self) -> None:
        gathered, self._gathered = self._gathered, []
        for start in range(0, len(gathered), _LONGEST_LIST):
            self._begin_list(gathered[start : start + _LONGEST_LIST])

    def _begin_list(self, gathered: list[tuple[Sample, asyncio.Future[Graded]]]) -> None:
        task = asyncio.get_running_loop().create_task(self._grade_list(gathered))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

        def give_up_if_alone(future: asyncio.Future[Graded]) -> None:
            if all(future.cancelled() for _, future in gathered):
                task.cancel()

        for _, future in gathered:
            future.add_done_callback(give_up_if_alone)

    async def _grade_list(self, gathered: list[tuple[Sample, asyncio.Future[Graded]]]) -> None:
        try:
            all_graded = await self._together([sample for sample, _ in gathered])
        except Exception as error:  # ours: nobody must wait for it for ever
            failed = Graded(Score.failed("infra_error", f"the reward worker failed: {type(error).__name__}: {error}"))
            all_graded = [failed] * len(gathered)
        for (_, future), graded in zip(gathered, all_graded, strict=True):
            if not future.done():
                future.set_result(graded)

    async def _together(self, samples: list[Sample]) -> list[Graded]:
        slips = [slip_of(sample) for sample in samples]
        permit = None
        if self._limits is not None:
            permit = self._limits.permit(sum(sample.num_tokens for sample in samples))
        try:
            result = await self._pool.run((self._index, slips), self._timeout_s, permit)
        except JobFailed as failure:
            if len(samples) > 1:
                alone = await asyncio.gather(*(self._together([sample]) for sample in samples))
                return [graded for (graded,) in alone]
            return [_failed(failure)]
        except ConnectionError as error:
            return [Graded(Score.failed("infra_error", str(error)))] * len(samples)
        return [Graded(score, result.waited_s, result.ran_s / len(samples)) for score in result.value]


class RemoteDesk:
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


class Cached:
    """Looks a score up before a desk is asked for it, and keeps it after."""

    def __init__(self, desk: Desk, cache: ScoreCache, identity: str) -> None:
        self._desk = desk
        self._cache = cache
        self._identity = identity

    async def grade(self, sample: Sample) -> Graded:
        key = self._cache.key(self._identity, sample)
        kept = self._cache.get(key)
        if kept is not None:
            return Graded(kept, cache_hits=1)
        graded = await self._desk.grade(sample)
        self._cache.put(key, graded.score)
        return graded
