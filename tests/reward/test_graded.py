from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from practicum import Sample
from practicum.reward.desks import Graded
from practicum.reward.graded import GradedBatch, GradingReport, Progress
from practicum.types import Score
from tests.samples import make_sample

FAILED = Graded(Score.failed("timeout", "late"))


def report(graded: list[Graded]) -> GradingReport:
    return GradingReport.of(graded, seconds=2.0, num_retried=1, num_restarts=0)


def batch(
    samples: list[Sample], graded: list[Graded], on_failure: str = "mask", groups: list[int] | None = None
) -> GradedBatch:
    return GradedBatch.of(samples, graded, report(graded), groups, on_failure)  # type: ignore[arg-type]


def test_the_value_stands_at_the_last_token_the_model_wrote() -> None:
    sample = make_sample(answer=5)
    masked = replace(sample, loss_mask=np.array([True, True, True, False, False]))
    unwritten = replace(sample, loss_mask=np.zeros(5, np.bool_))
    rewards = batch([sample, masked, unwritten, sample], [Graded(Score(0.5))] * 3 + [FAILED]).token_rewards
    assert [None if row is None else row.tolist() for row in rewards] == [
        [0, 0, 0, 0, 0.5],
        [0, 0, 0.5, 0, 0],
        [0, 0, 0, 0, 0.5],
        None,
    ]
    assert rewards[0] is not None and rewards[0].dtype == np.float32


def test_a_failure_leaves_out_the_sample_or_its_group() -> None:
    samples = [make_sample(seed=seed) for seed in (1, 1, 2, 2)]
    graded = [Graded(Score(1.0)), FAILED, Graded(Score(0.0)), Graded(Score(1.0))]
    assert batch(samples, graded).kept == [True, False, True, True]
    assert batch(samples, graded, "drop_group").kept == [False, False, True, True]
    # The same prompt may be asked twice in a step.
    assert batch(samples, graded, "drop_group", groups=[0, 1, 2, 3]).kept == [True, False, True, True]
    assert batch(samples, graded, "drop_group", groups=[0, 0, 1, 0]).kept == [False, False, True, False]


def test_samples_that_were_graded_in_another_order_come_to_their_places() -> None:
    samples = [make_sample(answer=n) for n in (1, 2, 3)]
    graded = [Graded(Score(1.0)), Graded(Score.failed("invalid", "?")), Graded(Score(3.0))]
    there = batch(samples, graded).in_places([2, 0, 1])
    assert [score.value for score in there.scores] == [None, 3.0, 1.0]
    assert there.kept == [False, True, True]
    assert [None if row is None else len(row) for row in there.token_rewards] == [None, 3, 1]


def test_the_report_counts_what_happened() -> None:
    graded = [Graded(Score(1.0), 0.5, 1.0, cache_hits=1), FAILED, Graded(Score.failed("invalid", "x"), 1.0, 2.0)]
    made = report(graded)
    assert made.failures == {"invalid": 1, "timeout": 1}
    assert (made.waited_s, made.longest_wait_s, made.ran_s) == (0.5, 1.0, 1.0)
    assert made.metrics() == {
        "time/graded_per_s": 1.5,
        "time/grading_wait_s": 0.5,
        "time/grading_longest_wait_s": 1.0,
        "time/grading_each_s": 1.0,
        "reward/failed/invalid": 1.0,
        "reward/failed/timeout": 1.0,
        "time/graded_again": 1.0,
        "time/reward_cache_hits": 1.0,
    }


def test_nothing_graded_is_no_error() -> None:
    empty = GradingReport.of([], 0.0, 0, 0)
    assert (empty.num_samples, empty.waited_s, empty.metrics()["time/graded_per_s"]) == (0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("progress", "sentence"),
    [
        (Progress(1000, 20000, 0, 10.0), "graded 1,000 of 20,000 samples, waiting for 10 s"),
        (Progress(3, 4, 1, 2.0), "graded 3 of 4 samples, 1 failed, waiting for 2 s"),
    ],
)
def test_progress_is_a_sentence(progress: Progress, sentence: str) -> None:
    assert str(progress) == sentence
