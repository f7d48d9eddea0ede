from __future__ import annotations

from pathlib import Path

import pytest

from practicum.controller import LocalWorkerGroup, RayClassWithInitArgs
from practicum.errors import RewardError
from practicum.reward import RewardLoopManager, RewardLoopWorker, check_reward
from tests.samples import make_sample

REWARDS = Path(__file__).parents[1] / "rewards.py"


def manager(*, grader: str | None = None, function: str | None = None, max_failure_share: float) -> RewardLoopManager:
    packed = RayClassWithInitArgs(
        RewardLoopWorker, grader=grader, function=function and f"{REWARDS}:{function}", timeout_s=5.0
    )
    return RewardLoopManager(LocalWorkerGroup(packed, name="graders"), max_failure_share)


def test_scores_come_in_the_order_of_the_samples() -> None:
    samples = [make_sample(text=text, truth="4") for text in ("4", "5", " 4 ", "44")]
    scores = manager(grader="exact", max_failure_share=0.0).grade(samples)
    assert [score.value for score in scores] == [1.0, 0.0, 1.0, 0.0]


def test_failures_within_the_allowed_share_stay_failures() -> None:
    samples = [make_sample(text=str(i)) for i in range(4)]
    scores = manager(function="raises_on_one", max_failure_share=0.25).grade(samples)
    assert [score.status for score in scores] == ["ok", "invalid", "ok", "ok"]


def test_too_many_failures_stop_the_run_with_the_first_reason() -> None:
    samples = [make_sample(text=str(i)) for i in range(4)]
    with pytest.raises(RewardError, match=r"1 of 4 samples could not be graded \(1 invalid\).*no such thing"):
        manager(function="raises_on_one", max_failure_share=0.2).grade(samples)


def test_a_missing_ground_truth_is_invalid_not_wrong() -> None:
    with pytest.raises(RewardError, match="has no ground truth"):
        manager(grader="exact", max_failure_share=0.0).grade([make_sample(text="4")])


def test_an_unknown_grader_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RewardError, match="'exakt' is not known; the graders are: exact"):
        check_reward("exakt", None)
