"""Grading: a manager hands samples to workers and gathers their scores in order.

    samples ─▶ RewardLoopManager ─ scatter ─▶ RewardLoopWorker (rule or function of the user) ─▶ scores

A sample that cannot be graded has a score without a value; the manager counts them and stops the run when they are
too many, with the reasons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from practicum.controller import Worker, WorkerGroup
from practicum.errors import RewardError
from practicum.reward.function import FunctionGrader, load_function
from practicum.reward.graders import GRADERS
from practicum.types import Sample, Score


def check_reward(grader: str | None, function: str | None) -> None:
    """Fail early, and by name, when the configured reward cannot work."""
    if function is not None:
        load_function(function)
    elif grader not in GRADERS:
        raise RewardError(f"reward.grader={grader!r} is not known; the graders are: {', '.join(GRADERS)}.")


class RewardLoopWorker(Worker):
    def __init__(self, *, grader: str | None, function: str | None, timeout_s: float) -> None:
        self._rule = GRADERS[grader] if grader is not None else None
        self._function = FunctionGrader(load_function(function), timeout_s) if function is not None else None

    def grade(self, samples: Sequence[Sample]) -> list[Score]:
        if self._function is not None:
            return self._function.grade(samples)
        assert self._rule is not None
        return [self._rule(sample) for sample in samples]


class RewardLoopManager:
    def __init__(self, workers: WorkerGroup[RewardLoopWorker], max_failure_share: float) -> None:
        self._workers = workers
        self._max_failure_share = max_failure_share

    def grade(self, samples: Sequence[Sample]) -> list[Score]:
        """Scores in the order of the samples."""
        scores = self._workers.scatter(RewardLoopWorker.grade, samples)
        failed = [score for score in scores if score.status != "ok"]
        if len(failed) > self._max_failure_share * len(scores):
            kinds = ", ".join(f"{count} {status}" for status, count in Counter(s.status for s in failed).items())
            raise RewardError(
                f"{len(failed)} of {len(scores)} samples could not be graded ({kinds}), more than "
                f"reward.max_failure_share={self._max_failure_share:g} allows. The first: {failed[0].reason}."
            )
        return scores
