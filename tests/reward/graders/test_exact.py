from __future__ import annotations

from typing import Any

import pytest

from practicum.reward.graders.exact import Exact
from tests.samples import make_sample


@pytest.mark.parametrize(
    ("text", "truth", "value"),
    [
        ("17", "17", 1),
        (" 17\n", "17", 1),
        ("17", " 17 ", 1),
        ("017", "17", 0),
        ("", "1", 0),
        ("paris", "Paris", 0),
        ("Paris.", "Paris", 0),
        ("17", 17, 1),
        ("17", 17.0, 1),
        ("17.0", 17.0, 1),
        ("17.5", 17.5, 1),
        ("NYC", ["New York", "NYC"], 1),
        ("LA", ["New York", "NYC"], 0),
        ("<think>Paris?</think>\n\nRome", "Rome", 1),
    ],
)
def test_the_stripped_answer_must_be_the_truth(text: str, truth: Any, value: float) -> None:
    assert Exact().grade(make_sample(text=text, truth=truth)).value == value


@pytest.mark.parametrize(
    ("text", "truth", "value"),
    [("PARIS", "Paris", 1), ("Straße", "STRASSE", 1), ("Paris!", "Paris", 0)],
)
def test_case_can_be_ignored(text: str, truth: str, value: float) -> None:
    assert Exact(ignore_case=True).grade(make_sample(text=text, truth=truth)).value == value


@pytest.mark.parametrize(
    ("text", "truth", "value"),
    [("Paris,  France.", "Paris France", 1), ("«Paris»", "Paris", 1), ("$42", "42", 1), ("paris", "Paris", 0)],
)
def test_punctuation_can_be_ignored(text: str, truth: str, value: float) -> None:
    assert Exact(ignore_punctuation=True).grade(make_sample(text=text, truth=truth)).value == value


def test_a_truth_of_nothing_but_punctuation_does_not_accept_an_empty_answer() -> None:
    grader = Exact(ignore_punctuation=True)
    sample = make_sample(text="", truth="?!")
    with pytest.raises(ValueError, match="nothing is left of the ground truth"):
        grader.check(sample.prompt)
    assert grader.grade(sample).status == "invalid"


def test_without_a_truth_there_is_no_score() -> None:
    sample = make_sample(text="17")
    with pytest.raises(ValueError, match="the ground truth is missing"):
        Exact().check(sample.prompt)
    score = Exact().grade(sample)
    assert (score.status, score.value, score.reason) == ("invalid", None, "the ground truth is missing")


def test_it_tells_what_it_compared_where_that_is_not_the_text() -> None:
    assert Exact(ignore_case=True).grade(make_sample(text=" PARIS ", truth="Rome")).answer == "paris"
    assert Exact().grade(make_sample(text="PARIS", truth="Rome")).answer is None
