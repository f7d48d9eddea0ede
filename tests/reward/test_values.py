from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from practicum.reward.values import score_of
from practicum.types import Score


@pytest.mark.parametrize(
    "value", [1, 1.0, True, np.float32(1), np.int64(1), np.array(1.0), torch.tensor(1.0), Decimal(1), Fraction(1)]
)
def test_any_number_is_a_score(value: Any) -> None:
    score = score_of(value)
    assert score == Score(1.0) and type(score.value) is float


@pytest.mark.parametrize(
    ("value", "score"),
    [
        ({"score": 0.5}, Score(0.5)),
        ({"score": 0.5, "acc": True, "pred": "4"}, Score(0.5, parts={"acc": 1.0})),
        ({"score": 1, "parts": {"style": 0.25}, "format": 1}, Score(1.0, parts={"format": 1.0, "style": 0.25})),
        ({"score": 1, "status": "ok", "reason": ""}, Score(1.0)),
        (Score(2.0, parts={"a": 1.0}), Score(2.0, parts={"a": 1.0})),
        (Score.failed("invalid", "no"), Score.failed("invalid", "no")),
    ],
)
def test_mappings_and_scores(value: Any, score: Score) -> None:
    assert score_of(value) == score


def test_numbers_of_other_libraries_do_not_travel_on() -> None:
    score = score_of(Score(np.float32(0.5), parts={"a": torch.tensor(2.0)}))  # type: ignore[arg-type, dict-item]
    assert score == Score(0.5, parts={"a": 2.0})
    assert type(score.value) is float and type(score.parts["a"]) is float


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("0.5", "neither a number nor a Score"),
        (b"1", "neither a number nor a Score"),
        (None, "None is neither"),
        ([1.0], "neither a number nor a Score"),
        (float("nan"), "finite"),
        (float("inf"), "finite"),
        ({"acc": 1.0}, "has no 'score'"),
        ({"score": "1"}, "neither a number nor a Score"),
        ({"score": 1.0, "parts": [1]}, "'parts' must map names to numbers"),
        ({"score": 1.0, "parts": {"style": "good"}}, "part 'style' is 'good', not a number"),
        (Score(1.0, parts={"style": "good"}), "part 'style' is 'good', not a number"),  # type: ignore[dict-item]
        ({"x": "y" * 500}, "yyy ..."),
    ],
)
def test_anything_else_is_refused_with_what_it_was(value: Any, complaint: str) -> None:
    with pytest.raises(ValueError) as caught:
        score_of(value)
    assert complaint in str(caught.value)
    assert len(str(caught.value)) < 200


def test_what_was_read_as_the_result_travels_along() -> None:
    assert score_of({"score": 0.5, "pred": "4"}).answer == score_of({"score": 0.5, "answer": "4"}).answer == "4"
    assert score_of(Score(1.0, answer="4")).answer == "4"
    assert score_of(0.5).answer is None
