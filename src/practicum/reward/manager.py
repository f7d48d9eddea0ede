"""Grading: a manager sends answers to the workers as they come, and fills in their scores.

    groups ─ add ─▶ lists by expected cost ─▶ RewardLoopWorker.grade ─▶ trajectory.score ─ result ─▶ report
                         ▲                           │
                         └─ again: timeouts and infra errors while retries are left; all that a dead worker had

Adding does not wait, so answers are graded while others are still being written. An answer that cannot be graded has a
score without a value, and so has a conversation whose tools or environment failed; too many of those stop the run.

All of it belongs to one event loop; rounds may be open side by side.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import Any

from practicum.controller import WorkerGroup
from practicum.controller.averages import MovingAverages
from practicum.errors import DeadlineError, RewardError, WorkerDied
from practicum.reward.executors import Graded
from practicum.reward.model_manager import RewardModelManager
from practicum.reward.report import GradingReport, Progress
from practicum.reward.rubric import Rubric
from practicum.reward.worker import RewardLoopWorker, grade_by_rule
from practicum.types import Prompt, PromptGroup, Sample, Score, Trajectory

log = logging.getLogger("practicum.reward")

_PROGRESS_S = 1.0
_ANSWER_S = 60.0  # a worker that says nothing for longer hangs
_CLOSE_S = 1.5 * _ANSWER_S  # after the deadline of the worker's own call, since that one says more
_MOST_RESTARTS = 2
_PIECES_PER_WORKER = 8
_WORTH_A_CALL_S = 2e-3  # of grading
_SENDING_S = 4e-5  # that sending a sample and its score takes
_TURN_S = 2e-3  # so long grading may hold up the event loop
_MANY, _HEAD = 512, 128
_UNKNOWN_S_PER_TOKEN = 1e-3  # it may be dear, so all workers get some of it
_LEAST_S = 1e-7  # nothing is free: what were would all go to one worker


@dataclass(slots=True, eq=False)
class _Request:
    """An answer that is to be graded."""

    trajectory: Trajectory
    sample: Sample  # that is sent
    cost: float = 0.0  # as expected before it was sent
    num_attempts: int = 0
    graded: Graded | None = None


class RewardLoopManager:
    """Grades prompt groups on a group of workers.

    A sample with status timeout or infra_error is graded again up to `retries` times; more than `max_failure_share` of
    a round without a score are an error.

    `inline` is the rubric where it takes no more than rules: samples that cost less to grade than to send are then
    graded in this process. `models` are awake while answers are graded to prompts for which `asks_models` is true.
    `on_progress` is called once a second with how far a round is. A round that is left waits up to `close_s` for what
    is under way to end.
    """

    def __init__(
        self,
        workers: WorkerGroup[RewardLoopWorker],
        *,
        retries: int = 0,
        max_failure_share: float = 0.1,
        inline: Rubric | None = None,
        models: RewardModelManager | None = None,
        asks_models: Callable[[Prompt], bool] = lambda prompt: True,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        close_s: float = _CLOSE_S,
    ) -> None:
        self.workers = workers.with_timeout(_ANSWER_S)
        self.retries = retries
        self.max_failure_share = max_failure_share
        self.inline = inline
        self.models = models
        self.asks_models = asks_models
        self.on_progress = on_progress
        self.close_s = close_s
        self._costs = MovingAverages()  # seconds a token, by data source
        self.load = [0.0] * workers.world_size  # expected seconds of what each worker has
        self.num_starts = 0
        self._workers = workers
        self._restarting = asyncio.Lock()

    @property
    def models_sleep(self) -> bool:
        """True if there are models that use the devices of others while they grade."""
        return self.models is not None and self.models.sleeps

    async def grade(self, groups: Sequence[PromptGroup]) -> GradingReport:
        """Fill in the score of every trajectory. Raises RewardError once more have failed than are allowed."""
        async with self.round() as grading:
            grading.add(groups)
            return await grading.result()

    @asynccontextmanager
    async def round(self) -> AsyncIterator[GradingRound]:
        """Open a round for groups that come over time. What is not graded when the block is left is abandoned."""
        async with AsyncExitStack() as awake:
            if self.models is not None and not self.models.sleeps:  # they are looked after from now on
                await awake.enter_async_context(self.models.awake())
            grading = GradingRound(self, awake)
            try:
                yield grading
            finally:
                await grading.close()  # before the models fall asleep, which waits for what they are asked

    async def start(self) -> None:
        """Wait until the workers can grade. Raises the error of one that cannot; without this, the first round does."""
        await self._workers.execute_all_async(RewardLoopWorker.start)

    async def ready(self) -> int:
        """Wait while workers are started again. Return how often they have been."""
        async with self._restarting:
            return self.num_starts

    async def restart(self, num_starts: int) -> None:
        """Start the workers again, unless another round has done so since `num_starts`."""
        await asyncio.shield(self._restart(num_starts))  # never left half-way

    async def _restart(self, num_starts: int) -> None:
        async with self._restarting:
            if num_starts == self.num_starts:
                await asyncio.to_thread(self.workers.restart)
                self.num_starts += 1

    def expected_s(self, sample: Sample) -> float:
        """Return how long it takes to grade, by its length and what others of its source took."""
        return self._costs.get(sample.prompt.data_source, _UNKNOWN_S_PER_TOKEN) * _size(sample)

    def learn_cost(self, sample: Sample, seconds: float) -> None:
        self._costs.add(sample.prompt.data_source, max(seconds, _LEAST_S) / _size(sample))

    def shares(self, requests: Sequence[_Request]) -> dict[int, list[_Request]]:
        """Share requests out among as many workers as it is worth calling, each with its share.

        The dearest go first, each to the worker with the least to do. Answers to one prompt stay side by side, since
        graders remember what they have read of it.
        """
        units = [(sum(request.cost for request in unit), unit) for unit in self._units(requests)]
        units.sort(key=itemgetter(0), reverse=True)
        num_called = max(1, round(sum(cost for cost, _ in units) / _WORTH_A_CALL_S))
        ranks = sorted((load, rank) for rank, load in enumerate(self.load))[:num_called]  # is a heap
        shares: dict[int, list[_Request]] = {rank: [] for _, rank in ranks}
        for cost, unit in units:
            load, rank = ranks[0]
            heapq.heapreplace(ranks, (load + cost, rank))
            shares[rank] += unit
        return shares

    def _units(self, requests: Sequence[_Request]) -> Iterator[Sequence[_Request]]:
        """Cut the answers to each prompt into pieces small enough to share out evenly."""
        most = -(-len(requests) // (_PIECES_PER_WORKER * len(self.load)))
        start = 0
        for end in range(1, len(requests) + 1):
            is_last = end == len(requests) or requests[end].sample.prompt.id != requests[start].sample.prompt.id
            if is_last or end - start == most:
                yield requests[start:end]
                start = end


class GradingRound:
    """Groups that are judged together, though they need not come together."""

    def __init__(self, manager: RewardLoopManager, awake: AsyncExitStack) -> None:
        self._manager = manager
        self._awake = awake
        self._requests: list[_Request] = []
        self._unsent: list[_Request] = []
        self._held: list[_Request] = []  # until the models are awake
        self._is_scheduled = False
        self._is_closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._end: asyncio.Future[None] | None = None  # while somebody waits for the result
        self._error: BaseException | None = None
        self._num_failed = self._num_done = self._num_retried = 0
        self._starts_lost: set[int] = set()  # of the workers; in all but the last they were started again
        self._start = time.monotonic()

    def add(self, groups: Sequence[PromptGroup]) -> None:
        """Take finished groups, without waiting. Grading begins, unless it needs a model that sleeps for now.

        Raises the error that grading has ended with, if it has.
        """
        if self._error is not None:
            raise self._error
        if not self._requests:
            self._start = time.monotonic()
        models_sleep = self._manager.models_sleep
        for group in groups:
            requests = [_Request(trajectory, _sent(trajectory.last)) for trajectory in group.trajectories]
            self._requests += requests
            is_held = models_sleep and self._manager.asks_models(group.prompt)
            for request in requests:
                score = request.trajectory.score
                if request.sample.finish_reason == "error" and score is not None:  # its tools or environment failed
                    self._settle(request, Graded(score))
                else:
                    (self._held if is_held else self._unsent).append(request)
        if self._unsent and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._send_unsent)  # with whatever else comes in this turn of the loop

    async def result(self) -> GradingReport:
        """Wait for all scores. Raises RewardError as soon as more have failed than are allowed."""
        waiting_since = time.monotonic()
        if self._held:
            assert self._manager.models is not None
            await self._awake.enter_async_context(self._manager.models.awake())
            held, self._held = self._held, []
            self._unsent += held
        self._end = asyncio.get_running_loop().create_future()
        self._send_unsent(now=True)
        self._check_end()
        try:
            while not self._end.done():
                await asyncio.wait([self._end], timeout=_PROGRESS_S)
                if not self._end.done():
                    waited_s = time.monotonic() - waiting_since
                    self._manager.on_progress(Progress(self._num_done, len(self._requests), self._num_failed, waited_s))
            self._end.result()
        finally:
            self._end = None
        all_graded = [request.graded for request in self._requests if request.graded is not None]
        num_restarts = min(len(self._starts_lost), _MOST_RESTARTS)
        return GradingReport.of(all_graded, time.monotonic() - self._start, self._num_retried, num_restarts)

    async def close(self) -> None:
        """Stop what is left; what does not end in time is only logged. Does nothing after `result`."""
        self._is_closed = True
        self._unsent.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self._manager.close_s)
            if late:  # not raised: why the round is left matters more
                names = ", ".join(sorted({task.get_name() for task in late}))
                log.warning("grading by %s has not ended %g s after it was cancelled", names, self._manager.close_s)

    def _send_unsent(self, now: bool = False) -> None:
        """Begin with what has come, as soon as it is worth a call or nothing else is under way."""
        self._is_scheduled = False
        for request in self._unsent:
            request.cost = self._manager.expected_s(request.sample)
        if self._manager.inline is not None:
            inline = [request for request in self._unsent if request.cost < _SENDING_S]
            if inline:
                self._spawn(self._grade_inline(inline, self._manager.inline), "the driver")
                self._unsent = [request for request in self._unsent if request.cost >= _SENDING_S]
        if not self._unsent:
            return
        if now or not self._tasks or sum(request.cost for request in self._unsent) >= _WORTH_A_CALL_S:
            requests, self._unsent = self._unsent, []
            self._send(requests)

    def _send(self, requests: Sequence[_Request]) -> None:
        shares = self._manager.shares(requests)
        heads = _HEAD if len(requests) > _MANY else 0  # some go ahead, so that nobody waits until the rest is packed
        for part in (slice(heads), slice(heads, None)):
            for rank, share in shares.items():
                if share[part]:
                    self._spawn(self._grade_on(rank, share[part]), f"reward worker {rank}")

    def _spawn(self, coroutine: Coroutine[Any, Any, None], by: str) -> None:
        if self._is_closed:
            coroutine.close()
            return
        task = asyncio.create_task(coroutine, name=by)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        self._error = self._error or task.exception()
        if self._unsent:
            self._send_unsent()
        self._check_end()

    async def _grade_inline(self, requests: Sequence[_Request], rubric: Rubric) -> None:
        for finished in grade_by_rule(rubric, [request.sample for request in requests], _TURN_S):
            self._take([(requests[index], graded) for index, graded in finished])
            await asyncio.sleep(0)

    async def _grade_on(self, rank: int, requests: Sequence[_Request]) -> None:
        manager, left = self._manager, dict(enumerate(requests))
        load = sum(request.cost for request in requests)
        num_starts = await manager.ready()
        manager.load[rank] += load
        try:
            samples = [request.sample for request in requests]
            async with aclosing(manager.workers.stream(rank, RewardLoopWorker.grade, samples)) as stream:
                async for finished in stream:
                    self._take([(left.pop(index), graded) for index, graded in finished])
            assert not left
        except (WorkerDied, DeadlineError) as death:
            await self._regrade(list(left.values()), num_starts, death.message)
        finally:
            manager.load[rank] -= load

    async def _regrade(self, requests: Sequence[_Request], num_starts: int, why: str) -> None:
        """Grade what a worker has lost with workers that were started again, by us or by another round."""
        if self._is_closed:
            return  # nobody wants it any more, and the workers may be about to end
        self._starts_lost.add(num_starts)
        if len(self._starts_lost) > _MOST_RESTARTS:
            reason = f"the reward workers ended {len(self._starts_lost)} times in this round: {why}"
            for request in requests:
                self._settle(request, Graded(Score.failed("infra_error", reason)))
            return
        await self._manager.restart(num_starts)
        self._send(requests)

    def _take(self, finished: Sequence[tuple[_Request, Graded]]) -> None:
        again: list[_Request] = []
        for request, graded in finished:
            status = graded.score.status
            if graded.cache_hits == 0 and status == "ok":
                self._manager.learn_cost(request.sample, graded.ran_s)
            if status in ("timeout", "infra_error") and request.num_attempts < self._manager.retries:
                request.num_attempts += 1
                again.append(request)
            else:
                self._settle(request, graded)
        if again:
            self._num_retried += len(again)
            self._send(again)
        self._check_end()

    def _settle(self, request: _Request, graded: Graded) -> None:
        assert request.graded is None
        request.graded = graded
        request.trajectory.score = graded.score
        self._num_done += 1
        self._num_failed += graded.score.status != "ok"

    def _check_end(self) -> None:
        if self._end is None or self._end.done():
            return
        if self._num_failed > self._manager.max_failure_share * len(self._requests):
            self._end.set_exception(self._too_many())
        elif self._error is not None:
            self._end.set_exception(self._error)
        elif self._num_done == len(self._requests):
            self._end.set_result(None)

    def _too_many(self) -> RewardError:
        scores = (request.graded.score for request in self._requests if request.graded is not None)
        failed = [score for score in scores if score.status != "ok"]
        kinds = ", ".join(f"{count} {status}" for status, count in Counter(map(attrgetter("status"), failed)).items())
        return RewardError(
            f"{len(failed)} of {len(self._requests)} samples could not be graded ({kinds}), more than "
            f"reward.max_failure_share={self._manager.max_failure_share:g} allows. The first: {failed[0].reason}."
        )


def _size(sample: Sample) -> int:
    """A little of the cost is there for the shortest answer too."""
    return 16 + len(sample.token_ids)


def _sent(sample: Sample) -> Sample:
    """Return the sample as graders see it: experts are of no use to them, and large."""
    return sample if sample.routes is None else replace(sample, routes=None)
