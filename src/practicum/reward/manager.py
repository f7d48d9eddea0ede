"""Grading: a manager hands samples to workers as they come and gathers their scores in order.

    samples ─ add ─▶ shared out by expected cost ─▶ RewardLoopWorkers ─ collect ─▶ scores in the order of the samples
                         ▲                                 │
                         └── again: timeouts and infra errors while retries are left; all that a dead worker had

Adding does not wait, so answers are graded while others are still being written. A sample that cannot be graded has a
score without a value. What is left out because of it, and when that stops the run, is the policy's to say.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal

from practicum.controller import GroupFuture, WorkerGroup
from practicum.errors import DeadlineError, RewardError, WorkerDied
from practicum.reward.costs import ExpectedCosts
from practicum.reward.desks import Graded
from practicum.reward.graded import GradedBatch, GradingReport, Progress
from practicum.reward.model_manager import RewardModelManager
from practicum.reward.worker import Handout, RewardLoopWorker, Stack
from practicum.types import Prompt, Sample, Score

_LOOK_EVERY_S = 1.0
_LOOK_OFTEN_S = 0.05  # so long a worker that waits for one round's scores does not hear of another's samples
_ANSWER_S = 60.0  # a worker that takes longer to say how far it is hangs
_MOST_RESTARTS = 2
_PIECES_PER_WORKER = 8
_WORTH_A_CALL_S = 2e-3  # of grading
_MANY, _HEAD = 512, 64


@dataclass(frozen=True, slots=True)
class GradingPolicy:
    """What becomes of samples that could not be graded."""

    retries: int = 0
    """How often one with status timeout or infra_error is graded again."""
    on_failure: Literal["mask", "drop_group"] = "mask"
    """Leave out the sample, or all answers to its prompt."""
    max_failure_share: float = 0.1
    """A larger share of them is an error."""


class GradingCrew:
    """The workers, as rounds that are open side by side share them."""

    def __init__(self, workers: WorkerGroup[RewardLoopWorker], look_every_s: float = _LOOK_EVERY_S) -> None:
        self.workers = workers.with_timeout(look_every_s + _ANSWER_S)
        self.look_every_s = look_every_s
        self.costs = ExpectedCosts()
        self.life = 0
        """Of the workers: how often they have been started again."""
        self.is_over = False
        self._turn = threading.Lock()

    def bring_back(self, life: int) -> bool:
        """Start the workers again, unless another round has done so since `life`."""
        with self._turn:
            self.check()
            is_mine = life == self.life
            if is_mine:
                self.workers.restart()
                self.life += 1
            return is_mine

    def check(self) -> None:
        if self.is_over:
            raise RewardError("grading was broken off.")


class RewardLoopManager:
    def __init__(
        self,
        workers: WorkerGroup[RewardLoopWorker],
        policy: GradingPolicy | None = None,
        *,
        side_by_side: bool = False,
        models: RewardModelManager | None = None,
        asks_models: Callable[[Prompt], bool] = lambda prompt: True,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        """`side_by_side`: rounds are open at the same time, in several threads. `models` are awake while answers are
        graded to prompts for which `asks_models` is true. `on_progress` is told once a second how far a round is.
        """
        self._crew = GradingCrew(workers, _LOOK_OFTEN_S if side_by_side else _LOOK_EVERY_S)
        self._policy = policy or GradingPolicy()
        self._models = models
        self._asks_models = asks_models
        self._on_progress = on_progress
        self._numbers = itertools.count()

    @property
    def models_sleep(self) -> bool:
        """Whether there are models that use the places of others while they grade."""
        return self._models is not None and self._models.sleeps

    def break_off(self) -> None:
        """From any thread: rounds that are open raise a RewardError soon, and no worker is started again."""
        self._crew.is_over = True

    def grade(self, samples: Sequence[Sample], groups: Sequence[int] | None = None) -> GradedBatch:
        """All scores, in the order of the samples. `groups` says which samples answer the same prompt."""
        with self.round() as grading:
            grading.add(samples, wait_s=self._crew.look_every_s)
            return grading.result(groups)

    @contextmanager
    def round(self) -> Iterator[GradingRound]:
        """For samples that come over time. What is not graded when the block is left is abandoned."""
        with ExitStack() as awake:
            grading = GradingRound(next(self._numbers), self._crew, self._policy, on_progress=self._on_progress)
            if self._models is not None:
                grading.held_for(self._models, self._asks_models, awake)
            try:
                yield grading
            finally:
                grading.abandon()  # before the models fall asleep, which waits for what they are asked


class GradingRound:
    """Samples that are judged together, though they need not come together."""

    def __init__(
        self,
        number: int,
        crew: GradingCrew,
        policy: GradingPolicy,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._number = number
        self._crew = crew
        self._life = crew.life
        self._workers = crew.workers
        self._policy = policy
        self._costs = crew.costs
        self._on_progress = on_progress
        self._samples: list[Sample] = []
        self._graded: list[Graded | None] = []
        self._attempts: list[int] = []
        self._held: list[int] = []  # until the models are awake
        self._is_held: Callable[[Prompt], bool] = lambda prompt: False
        self._wake: Callable[[], None] = lambda: None
        self._unheard: list[GroupFuture[Handout]] = []
        self._num_open = [0] * self._workers.world_size  # samples that each worker has
        self._load = [0.0] * self._workers.world_size  # expected seconds of what each worker has
        self._with: list[tuple[int, float]] = []  # which worker has a sample, and what it is expected to cost there
        self._num_failed = self._num_done = self._num_retried = self._num_restarts = 0
        self._start = self._waiting_since = time.monotonic()

    def held_for(self, models: RewardModelManager, asks_models: Callable[[Prompt], bool], awake: ExitStack) -> None:
        """Answers for models that sleep wait for `result`; models that don't are looked after from now on."""
        if models.sleeps:
            self._is_held = asks_models
            self._wake = lambda: awake.enter_context(models.awake())
        else:
            awake.enter_context(models.awake())

    def add(self, samples: Sequence[Sample], wait_s: float = 0.0) -> None:
        """More samples. Grading begins at once, unless it needs a model that sleeps while others use its memory.

        `wait_s` is for whoever is going to ask for the result anyway.
        """
        if not self._samples:
            self._start = time.monotonic()
        places = range(len(self._samples), len(self._samples) + len(samples))
        self._samples += samples
        self._graded += [None] * len(samples)
        self._attempts += [0] * len(samples)
        self._with += [(0, 0.0)] * len(samples)
        held = {place for place in places if self._is_held(self._samples[place].prompt)}
        self._held += sorted(held)
        self._send([place for place in places if place not in held], wait_s)

    def result(self, groups: Sequence[int] | None = None) -> GradedBatch:
        """Wait for all scores. Raises RewardError as soon as more have failed than the policy allows."""
        self._waiting_since = time.monotonic()
        if self._held:
            self._wake()
            held, self._held = self._held, []
            self._send(held, self._crew.look_every_s)
        self._gather()
        graded = [one for one in self._graded if one is not None]
        assert len(graded) == len(self._samples)
        report = GradingReport.of(graded, time.monotonic() - self._start, self._num_retried, self._num_restarts)
        return GradedBatch.of(self._samples, graded, report, groups, self._policy.on_failure)

    def abandon(self) -> None:
        """Stop what is left. Does nothing after `result`."""
        if self._num_done < len(self._samples) - len(self._held):
            try:
                self._workers.execute_all(RewardLoopWorker.abandon, self._number)
            except (WorkerDied, DeadlineError):
                if not self._crew.is_over:
                    self._crew.bring_back(self._life)

    def _send(self, places: Sequence[int], wait_s: float = 0.0) -> None:
        if not places:
            return
        stacks = self._stacks(places)
        try:
            if len(places) > _MANY:  # some go ahead, so that nobody waits until the rest is packed
                self._call({rank: stack.first(_HEAD) for rank, stack in stacks.items()}, 0.0)
                stacks = {rank: stack.rest(_HEAD) for rank, stack in stacks.items()}
            self._call(stacks, wait_s)
        except WorkerDied as death:
            self._bring_back(death.message)

    def _call(self, stacks: Mapping[int, Stack], wait_s: float) -> None:
        for rank, stack in stacks.items():
            if stack.samples:
                self._unheard.append(self._workers.execute_rank_async(rank, RewardLoopWorker.grade, stack, wait_s))

    def _stacks(self, places: Sequence[int]) -> dict[int, Stack]:
        """By worker, for as many as it is worth calling: the dearest answers first, each to the one with the least to
        do.

        Answers to one prompt stay side by side, since graders remember what they have read of it.
        """
        costs = {place: self._costs.expected(self._samples[place]) for place in places}
        units = [(sum(costs[place] for place in unit), unit) for unit in self._units(places)]
        units.sort(key=itemgetter(0), reverse=True)
        num_called = max(1, round(sum(costs.values()) / _WORTH_A_CALL_S))
        ranks = sorted((load, rank) for rank, load in enumerate(self._load))[:num_called]  # is a heap
        shares: dict[int, list[int]] = {rank: [] for _, rank in ranks}
        for cost, unit in units:
            load, rank = ranks[0]
            heapq.heapreplace(ranks, (load + cost, rank))
            shares[rank] += unit
            self._load[rank] += cost
            self._num_open[rank] += len(unit)
            for place in unit:
                self._with[place] = (rank, costs[place])
        return {
            rank: Stack(self._number, share, [self._samples[place] for place in share])
            for rank, share in shares.items()
        }

    def _units(self, places: Sequence[int]) -> Iterator[Sequence[int]]:
        """Answers to one prompt, in pieces small enough to share out evenly."""
        most = -(-len(places) // (_PIECES_PER_WORKER * self._workers.world_size))
        for _, same in itertools.groupby(places, key=lambda place: self._samples[place].prompt.id):
            answers = list(same)
            for start in range(0, len(answers), most):
                yield answers[start : start + most]

    def _gather(self) -> None:
        told_at = time.monotonic()
        while self._num_done < len(self._samples):
            self._crew.check()
            try:
                if self._life != self._crew.life:
                    self._bring_back("another round has started the workers again")
                if not self._unheard:
                    self._unheard = [
                        self._workers.execute_rank_async(
                            rank, RewardLoopWorker.collect, self._number, self._crew.look_every_s
                        )
                        for rank, num in enumerate(self._num_open)
                        if num
                    ]
                self._take(self._unheard.pop(0).result())
            except (WorkerDied, DeadlineError) as death:
                self._bring_back(death.message)
            if time.monotonic() - told_at >= _LOOK_EVERY_S:
                told_at = time.monotonic()
                self._on_progress(self._progress())

    def _take(self, handout: Handout) -> None:
        again: list[int] = []
        for place, graded in handout.graded:
            sample, status = self._samples[place], graded.score.status
            rank, cost = self._with[place]
            self._load[rank] -= cost
            self._num_open[rank] -= 1
            if graded.cache_hits == 0 and status == "ok":
                self._costs.learn(sample, graded.ran_s)
            if status in ("timeout", "infra_error") and self._attempts[place] < self._policy.retries:
                self._attempts[place] += 1
                again.append(place)
            else:
                self._settle(place, graded)
        self._num_retried += len(again)
        self._send(again)

    def _settle(self, place: int, graded: Graded) -> None:
        assert self._graded[place] is None
        self._graded[place] = graded
        self._num_done += 1
        self._num_failed += graded.score.status != "ok"
        if self._num_failed > self._policy.max_failure_share * len(self._samples):
            raise self._too_many()

    def _bring_back(self, why: str) -> None:
        """All that has no score yet is graded anew by a group that was started anew, by us or by another round."""
        self._unheard.clear()
        held = set(self._held)
        left = [place for place, graded in enumerate(self._graded) if graded is None and place not in held]
        self._load, self._num_open = [0.0] * self._workers.world_size, [0] * self._workers.world_size
        if self._num_restarts == _MOST_RESTARTS:
            self.abandon()  # by those that live
            reason = f"the reward workers ended {self._num_restarts + 1} times in this round: {why}"
            for place in left:
                self._settle(place, Graded(Score.failed("infra_error", reason)))
            return
        self._num_restarts += 1
        is_mine = self._crew.bring_back(self._life)
        self._life = self._crew.life
        if not is_mine:
            self.abandon()  # what has been sent to those whom another round has started
        self._send(left)

    def _progress(self) -> Progress:
        waited_s = time.monotonic() - self._waiting_since
        return Progress(self._num_done, len(self._samples), self._num_failed, waited_s)

    def _too_many(self) -> RewardError:
        failed = [one.score for one in self._graded if one is not None and one.score.status != "ok"]
        kinds = ", ".join(f"{count} {status}" for status, count in Counter(score.status for score in failed).items())
        return RewardError(
            f"{len(failed)} of {len(self._samples)} samples could not be graded ({kinds}), more than "
            f"reward.max_failure_share={self._policy.max_failure_share:g} allows. The first: {failed[0].reason}."
        )
