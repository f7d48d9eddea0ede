from __future__ import annotations

import pytest

from practicum.reward.graders.exact import exact
from tests.samples import make_sample


@pytest.mark.parametrize(
    ("text", "truth", "value"), [("17", "17", 1), (" 17\n", "17", 1), ("017", "17", 0), ("", "1", 0)]
)
def test_the_stripped_answer_must_be_the_truth(text: str, truth: str, value: float) -> None:
    assert exact(make_sample(text=text, truth=truth)).value == value


def test_a_truth_that_is_no_string_is_compared_as_text() -> None:
    assert exact(make_sample(text="17", truth=17)).value == 1.0  # type: ignore[arg-type]


def test_without_a_truth_there_is_no_score() -> None:
    score = exact(make_sample(text="17"))
    assert (score.status, score.value) == ("invalid", None)
