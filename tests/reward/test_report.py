from __future__ import annotations

import pytest

from practicum.reward.executors import Graded
from practicum.reward.report import GradingReport, Progress
from practicum.types import Score

FAILED = Graded(Score.failed("timeout", "late"))


def test_the_report_counts_what_happened() -> None:
    graded = [Graded(Score(1.0), 0.5, 1.0, cache_hits=1), FAILED, Graded(Score.failed("invalid", "x"), 1.0, 2.0)]
    made = GradingReport.of(graded, seconds=2.0, num_retried=1, num_restarts=0)
    assert made.failures == {"invalid": 1, "timeout": 1}
    assert str(made) == "2 of 3 samples could not be graded (1 invalid, 1 timeout). The first: late"
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
