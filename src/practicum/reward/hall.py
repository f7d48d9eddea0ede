"""The grading hall of one reward worker: a desk for each term of the rubric, and all that stands behind the desks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from practicum.errors import ProcessError, RewardError
from practicum.processes import ProcessPool
from practicum.processes.work import Limits
from practicum.reward.cache import ScoreCache
from practicum.reward.client import RewardClient, Target
from practicum.reward.desks import (
    AsyncWork,
    Cached,
    Desk,
    Graded,
    IsolatedWork,
    ListDesk,
    ProcessDesk,
    RemoteDesk,
    RuleDesk,
)
from practicum.reward.graders.base import IsolatedGrader
from practicum.reward.graders.function import UserFunction
from practicum.reward.graders.remote import RemoteGrader
from practicum.reward.limits import LimitClient
from practicum.reward.rubric import Rubric, Term, combined
from practicum.types import Sample

_WAITING = 64


@dataclass(frozen=True, slots=True)
class HallSettings:
    """Of one worker."""

    rubric: Rubric
    timeout_s: float
    num_processes: int = 1
    memory_bytes: int = 2048 << 20
    num_coroutines: int = 128
    """Calls of an async function at a time."""
    targets: Mapping[str, Target] = field(default_factory=dict)
    """Who is asked over HTTP, by the names that graders have for them."""
    limits_at: tuple[str, int] | None = None
    cache_folder: str | None = None
    cache_version: str = ""


class GradingHall:
    """Belongs to the event loop it is started in."""

    def __init__(self, settings: HallSettings) -> None:
        self._settings = settings
        self._rubric = settings.rubric
        self._desks: dict[int, Desk] = {}  # by the identity of the term
        self._open = AsyncExitStack()

    async def start(self) -> None:
        """Raises RewardError where a grader cannot work at all."""
        try:
            await self._furnish()
        except BaseException:
            await self.close()
            raise

    async def grade(self, sample: Sample) -> Graded:
        terms = self._rubric.of(sample.prompt)
        if len(terms) == 1:
            all_graded = [await self._desks[id(terms[0])].grade(sample)]
        else:
            all_graded = await asyncio.gather(*(self._desks[id(term)].grade(sample) for term in terms))
        return Graded(
            combined(terms, [graded.score for graded in all_graded]),
            waited_s=max((graded.waited_s for graded in all_graded), default=0.0),
            ran_s=sum(graded.ran_s for graded in all_graded),
            cache_hits=sum(graded.cache_hits for graded in all_graded),
        )

    @property
    def most_at_once(self) -> int:
        """Samples that are of use here at a time: those under way, and some that wait behind them."""
        settings = self._settings
        windows = [target.window for target in settings.targets.values()]
        return max(settings.num_processes, settings.num_coroutines, *windows) + _WAITING

    @property
    def takes_lists(self) -> bool:
        """Whether some grader is to see the samples of a stack together."""
        graders = [term.grader for term in self._rubric.terms]
        return any(isinstance(grader, UserFunction) and grader.shape.takes_list for grader in graders)

    async def close(self) -> None:
        await self._open.aclose()

    async def _furnish(self) -> None:
        settings, terms = self._settings, self._rubric.terms
        limits = None
        if settings.limits_at is not None:
            limits = await LimitClient.connect(settings.limits_at)
            self._open.callback(limits.close)
        client = None
        if self._rubric.asks:
            client = RewardClient(settings.targets)
            self._open.push_async_callback(client.close)
        cache = ScoreCache(settings.cache_folder, settings.cache_version) if settings.cache_folder else None
        pools = await self._pools(terms)
        for index, term in enumerate(terms):
            desk = self._desk(index, term, pools, client, limits)
            self._desks[id(term)] = desk if cache is None else Cached(desk, cache, term.identity)

    async def _pools(self, terms: list[Term]) -> dict[bool, ProcessPool]:
        """One for coroutines (True) and one for what blocks (False), where a term needs it."""
        settings, pools = self._settings, {}
        for is_async, work, size, capacity in (
            (False, IsolatedWork, settings.num_processes, 1),
            (True, AsyncWork, 1, settings.num_coroutines),
        ):
            graders = {i: term.grader for i, term in enumerate(terms) if _pool_of(term) is is_async}
            if graders:
                pool = ProcessPool(work(graders), size=size, limits=Limits(settings.memory_bytes, capacity))  # type: ignore[arg-type]
                try:
                    await pool.start()
                except ProcessError as error:
                    raise RewardError(f"answers cannot be graded: {error}") from error
                self._open.push_async_callback(pool.close)
                pools[is_async] = pool
        return pools

    def _desk(
        self,
        index: int,
        term: Term,
        pools: Mapping[bool, ProcessPool],
        client: RewardClient | None,
        limits: LimitClient | None,
    ) -> Desk:
        grader, timeout_s = term.grader, self._settings.timeout_s
        is_async = _pool_of(term)
        if is_async is None:
            grader.prepare()
            if isinstance(grader, RemoteGrader):
                assert client is not None
                target = self._settings.targets[grader.target]
                return RemoteDesk(grader, client, target.timeout_s, target.window, limits)
            return RuleDesk(term)
        if not isinstance(grader, UserFunction):
            return ProcessDesk(pools[is_async], index, timeout_s, None)  # our own graders ask nobody
        kind = ListDesk if grader.shape.takes_list else ProcessDesk
        return kind(pools[is_async], index, timeout_s, limits)


def _pool_of(term: Term) -> bool | None:
    """Whether a term is graded among coroutines; None if it needs no process."""
    if isinstance(term.grader, UserFunction):
        return term.grader.shape.is_async
    return False if isinstance(term.grader, IsolatedGrader) else None
