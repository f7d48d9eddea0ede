"""Prompts in, graded groups out, ahead of the step that learns from them.

    PromptSource ─▶ generate ─▶ grade ─▶ resample ─▶ GroupBuffer ─▶ Trainer
                       │          │
                    DeviceLease: rollout, graders and learners that share devices take them in turn

    step n learns from batch n ─▶ version n is published ─▶ batch n + 1 + staleness may begin

    staleness 1     batch 3  [generate][grade]
                    batch 4            [generate][grade]
                    learners                     [ 3 ]    [ 4 ]

A batch begins once its oldest weights would be `staleness` versions old when it is learnt from, and no earlier. So no
token is ever older, and no more batches are under way. With staleness 0 a batch is made when it is asked for.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from practicum.config import Config
from practicum.data import ShuffledStream
from practicum.loop.advantages import has_signal
from practicum.loop.metrics import Stopwatch
from practicum.reward.manager import RewardLoopManager
from practicum.reward.report import GradingReport
from practicum.rollout.manager import RolloutManager
from practicum.types import Prompt, PromptGroup, SamplingParams, Trajectory

log = logging.getLogger("practicum")
EncodedPrompt = tuple[Prompt, NDArray[np.int32]]
FIRST = -1
"""The priority of the learners and of validation: before all batches."""
_TRAINING, _VALIDATION, _BASELINES = range(3)  # streams of random numbers
_END_S, _REMIND_S = 60.0, 300.0
_AHEAD = "time/ahead/"  # beside the step, not a part of it


@dataclass(slots=True)
class StepBatch:
    """The graded groups of a step."""

    groups: list[PromptGroup]  # to learn from
    drawn: list[PromptGroup]  # as the prompts came: some of them may have been replaced for want of signal
    written: list[PromptGroup]  # all, replaced groups and unused replacements included
    report: GradingReport  # of `drawn`

    @property
    def num_resampled(self) -> int:
        return len({group.id for group in self.groups} - {group.id for group in self.drawn})

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the model wrote for the step."""
        return sum(sample.num_learnt for group in self.written for sample in group.samples)


class PromptSource:
    """The stream of prompts, and which positions of it each step has drawn."""

    def __init__(self, stream: ShuffledStream[EncodedPrompt]) -> None:
        self._stream = stream
        self._drawn: dict[int, list[int]] = {}  # positions in the stream, by step

    def draw(self, num: int, step: int) -> list[EncodedPrompt]:
        """Return the next prompts."""
        positions = self._stream.draw(num)
        self._drawn.setdefault(step, []).extend(positions)
        return self._stream.at(positions)

    def forget(self, step: int) -> None:
        """Drop what is known of all steps up to this one."""
        self._drawn = {own: drawn for own, drawn in self._drawn.items() if own > step}

    def after(self, step: int) -> tuple[int, tuple[int, ...]]:
        """Return where the stream stands once all steps up to `step` are learnt from: its position, and the positions
        before it that are drawn again because a later step had them."""
        ahead = (drawn for own, drawn in self._drawn.items() if own > step)
        again = sorted(itertools.chain(self._stream.again, *ahead))
        position = self._stream.position
        while again and again[-1] == position - 1:
            position = again.pop()
        return position, tuple(again)


def trajectories_of(groups: Sequence[PromptGroup]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


class PriorityLock:
    """A lock that goes to the lowest priority of those who wait."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._is_held = False

    @asynccontextmanager
    async def held(self, priority: int) -> AsyncIterator[None]:
        if self._is_held:
            granted = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (priority, next(self._numbers), granted))
            try:
                await granted  # whoever holds the lock has deadlines of its own
            except asyncio.CancelledError:
                if granted.done() and not granted.cancelled():
                    self._release()
                raise
        self._is_held = True
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        while self._waiting:
            _, _, granted = heapq.heappop(self._waiting)
            if not granted.done():
                granted.set_result(None)
                return
        self._is_held = False


class DeviceLease:
    """Says who may use the learners' devices: the learners, or rollout and reward models that share them and sleep
    otherwise. The learners go first: what is written after they have learnt is newer."""

    def __init__(self, config: Config, *, models_sleep: bool) -> None:
        self._devices = PriorityLock()
        self._rollout_shares = config.rollout.placement != "standalone"
        self._models_share = models_sleep
        self._is_timed = config.trainer.staleness > 0

    @asynccontextmanager
    async def learning(self, watch: Stopwatch) -> AsyncIterator[None]:
        async with self._held(FIRST, watch, shares=True):
            yield

    @asynccontextmanager
    async def generating(self, priority: int, watch: Stopwatch) -> AsyncIterator[None]:
        async with self._held(priority, watch, shares=self._rollout_shares):
            yield

    @asynccontextmanager
    async def grading(self, priority: int, watch: Stopwatch) -> AsyncIterator[None]:
        """Hold the devices while scores of models that sleep are waited for."""
        async with self._held(priority, watch, shares=self._models_share):
            yield

    @asynccontextmanager
    async def _held(self, priority: int, watch: Stopwatch, *, shares: bool) -> AsyncIterator[None]:
        if not shares:
            yield
            return
        asked = time.monotonic()
        async with self._devices.held(priority):
            if self._is_timed:
                watch.add("lease", time.monotonic() - asked)
            yield


class Pipeline:
    """Makes the batch of a step: generate, grade, resample."""

    def __init__(
        self,
        config: Config,
        prompts: PromptSource,
        rollout: RolloutManager,
        reward: RewardLoopManager,
        lease: DeviceLease,
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._rollout = rollout
        self._reward = reward
        self._lease = lease
        self._num_generating = 0
        self._idle_since = time.monotonic()

    async def batch(self, step: int, watch: Stopwatch) -> StepBatch:
        """Make the batch of a step. Its prompts come after those of the batches that began before."""
        config = self._config
        self._prompts.forget(step - 1 - config.trainer.staleness)
        groups = drawn = written = self._draw(config.data.prompts_per_step, step)
        report = await self._answer(drawn, step, watch)
        for attempt in range(1, config.algorithm.resampling_rounds + 1):
            without = [group for group in groups if not has_signal(group, config.reward.on_failure)]
            if not without:
                break
            others = self._draw(len(without), step, attempt=attempt, first=len(written))
            await self._answer(others, step, watch)
            written = written + others
            useful = [group for group in others if has_signal(group, config.reward.on_failure)]
            replaced = {group.id for group in without[: len(useful)]}
            groups = [group for group in groups if group.id not in replaced] + useful
        if config.algorithm.advantage == "remax":
            await self._add_baselines(groups, step, watch)
        return StepBatch(groups, drawn, written, report)

    async def validation(self, prompts: Sequence[EncodedPrompt], params: SamplingParams) -> list[PromptGroup]:
        """Answer and grade held-out prompts, before any batch that waits."""
        seeds = self._seeds(_VALIDATION, 0, len(prompts))
        groups = [
            PromptGroup(f"validation/{index}", prompt, ids, params, seed)
            for index, ((prompt, ids), seed) in enumerate(zip(prompts, seeds, strict=True))
        ]
        await self._answer(groups, FIRST, Stopwatch())
        return groups

    async def _answer(self, groups: Sequence[PromptGroup], priority: int, watch: Stopwatch) -> GradingReport:
        """Generate answers and grade them as they are finished."""
        async with AsyncExitStack() as stack, self._reward.round() as grading:
            async with (
                self._lease.generating(priority, watch),
                self._generating(watch),
                aclosing(self._rollout.generate(groups, priority=priority)) as finished,
            ):
                async for some in finished:
                    grading.add(some)
            # Released after the round, when models sleep again.
            await stack.enter_async_context(self._lease.grading(priority, watch))
            with watch.phase("reward"):
                return await grading.result()

    @asynccontextmanager
    async def _generating(self, watch: Stopwatch) -> AsyncIterator[None]:
        """Time the block, and how long nobody generated before it."""
        if not self._num_generating and self._config.trainer.staleness:
            watch.add("idle", time.monotonic() - self._idle_since)
        self._num_generating += 1
        try:
            with watch.phase("rollout"):
                yield
        finally:
            self._num_generating -= 1
            self._idle_since = time.monotonic()

    async def _add_baselines(self, groups: Sequence[PromptGroup], step: int, watch: Stopwatch) -> None:
        """Give each group the reward of a greedy answer; None where that could not be graded."""
        params = replace(self._config.rollout.sampling, temperature=0.0, num_answers=1)
        seeds = self._seeds(_BASELINES, step, len(groups))
        greedy = [
            PromptGroup(f"{group.id}/greedy", group.prompt, group.prompt_ids, params, seed)
            for group, seed in zip(groups, seeds, strict=True)
        ]
        await self._answer(greedy, step, watch)
        for group, baseline in zip(groups, greedy, strict=True):
            score = baseline.trajectories[0].score
            group.baseline = None if score is None else score.value

    def _draw(self, num: int, step: int, *, attempt: int = 0, first: int = 0) -> list[PromptGroup]:
        params = self._config.rollout.sampling
        seeds = self._seeds(_TRAINING, step, num, *([attempt] if attempt else []))
        prompts = zip(self._prompts.draw(num, step), seeds, strict=True)
        return [
            PromptGroup(f"{step}/{first + i}", prompt, ids, params, seed)
            for i, ((prompt, ids), seed) in enumerate(prompts)
        ]

    def _seeds(self, stream: int, step: int, num: int, *more: int) -> list[int]:
        entropy = [self._config.trainer.seed, stream, step, *more]
        return [int(seed) for seed in np.random.SeedSequence(entropy).generate_state(num, np.uint64)]


@dataclass(slots=True)
class _Ahead:
    task: asyncio.Task[StepBatch]
    watch: Stopwatch


class GroupBuffer:
    """Holds the batches of the steps to come: begins each as soon as the staleness allows it, and no more of them."""

    def __init__(
        self, make: Callable[[int, Stopwatch], Coroutine[Any, Any, StepBatch]], *, staleness: int, last: int
    ) -> None:
        self._make = make
        self._staleness = staleness
        self._last = last
        self._batches: dict[int, _Ahead] = {}
        self._next = last + 1

    def begin_at(self, step: int) -> None:
        """Say which step comes first: the weights of the one before it are published."""
        self._next = step
        self.published(step - 1)

    def published(self, version: int) -> None:
        """Begin all batches that are young enough now that rollout has these weights."""
        while self._staleness and self._next <= min(self._last, version + 1 + self._staleness):
            watch = Stopwatch()
            task = asyncio.create_task(self._make(self._next, watch), name=f"batch {self._next}")
            self._batches[self._next] = _Ahead(task, watch)
            self._next += 1

    async def take(self, step: int, watch: Stopwatch) -> StepBatch:
        """Return the batch of a step; raise what went wrong with it."""
        if not self._staleness:
            return await self._make(step, watch)
        ahead = self._batches[step]
        num_ready = sum(other.task.done() for other in self._batches.values())
        with watch.phase("waiting"):
            while not ahead.task.done():  # what it waits for has deadlines of its own
                await asyncio.wait([ahead.task], timeout=_REMIND_S)
                if not ahead.task.done():
                    done = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in ahead.watch.seconds.items())
                    log.warning("step %d still waits for its batch; done so far: %s", step, done or "nothing")
        del self._batches[step]
        batch = ahead.task.result()
        watch.besides |= {f"{_AHEAD}{name}_s": seconds for name, seconds in ahead.watch.seconds.items()}
        watch.besides |= {f"{_AHEAD}ready": float(num_ready)}
        return batch

    async def close(self) -> None:
        """Cancel what is under way."""
        self._last = 0
        tasks = [ahead.task for ahead in self._batches.values()]
        for step, ahead in self._batches.items():
            if ahead.task.done() and not ahead.task.cancelled() and (error := ahead.task.exception()) is not None:
                log.warning("the batch of step %d had failed: %s", step, error)  # often the cause of what else failed
            ahead.task.cancel()
        if tasks:
            ended, late = await asyncio.wait(tasks, timeout=_END_S)
            for task in ended:
                if not task.cancelled():
                    task.exception()  # told above, or of no interest any more
            for task in late:
                log.warning("%s did not end within %g s", task.get_name(), _END_S)
