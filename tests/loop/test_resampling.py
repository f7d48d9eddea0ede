from __future__ import annotations

import pytest

from practicum.loop.resampling import Practice, num_renewed
from practicum.reward.desks import Graded
from practicum.reward.graded import GradedBatch, GradingReport
from practicum.types import Score
from tests.samples import make_sample


def practice(rewards: dict[str, list[float | None]]) -> Practice[str]:
    samples = [make_sample(seed=ord(prompt)) for prompt, own in rewards.items() for _ in own]
    scores = [Score(None, status="invalid") if r is None else Score(r) for own in rewards.values() for r in own]
    graded = [Graded(score) for score in scores]
    groups = [i for i, own in enumerate(rewards.values()) for _ in own]
    report = GradingReport.of(graded, 1.0, 0, 0)
    return Practice(list(rewards), samples, GradedBatch.of(samples, graded, report, groups, "mask"))


def test_stale_are_prompts_whose_answers_do_not_differ() -> None:
    found = practice({"a": [1, 1], "b": [0, 1], "c": [0, 0], "d": [None, 1], "e": [None, None]})
    assert found.stale() == [0, 2, 3, 4]


def test_they_give_way_to_others_that_differ_with_all_that_belongs_to_them() -> None:
    before = practice({"a": [1, 1], "b": [0, 1], "c": [0, 0]})
    after = before.renewed(practice({"x": [1, 1], "y": [1, 0]}))
    assert after.prompts == ["y", "b", "c"]
    assert [score.value for score in after.graded.scores] == [1, 0, 0, 1, 0, 0]
    assert [sample.prompt.id for sample in after.samples[:3]] == [f"prompt-{ord(p)}" for p in "yyb"]
    assert num_renewed(before.prompts, after.prompts) == 1
    assert before.prompts == ["a", "b", "c"] and before.stale() == [0, 2]
    assert after.stale() == [2]


def test_more_than_are_needed_are_left_aside() -> None:
    after = practice({"a": [1, 1], "b": [0, 1]}).renewed(practice({"x": [0, 1], "y": [1, 0]}))
    assert after.prompts == ["x", "b"]


def test_answers_must_go_round() -> None:
    whole = practice({"a": [1, 1], "b": [0, 1]})
    with pytest.raises(ValueError, match="do not go round"):
        Practice(["a", "b", "c"], whole.samples, whole.graded)
