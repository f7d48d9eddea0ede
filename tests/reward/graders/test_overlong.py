from __future__ import annotations

import pytest

from practicum.reward.graders.penalties import Overlong
from tests.samples import make_sample


@pytest.mark.parametrize(
    ("length", "value"), [(1, 0.0), (60, 0.0), (61, -0.025), (80, -0.5), (99, -0.975), (100, -1.0), (150, -1.0)]
)
def test_the_penalty_grows_over_the_margin(length: int, value: float) -> None:
    assert Overlong(max_tokens=100, margin=40).grade(make_sample(answer=length)).value == pytest.approx(value)


@pytest.mark.parametrize(("length", "value"), [(100, 0.0), (101, -1.0)])
def test_without_a_margin_it_comes_at_once(length: int, value: float) -> None:
    assert Overlong(max_tokens=100, margin=0).grade(make_sample(answer=length)).value == value


def test_the_margin_may_be_everything() -> None:
    assert Overlong(max_tokens=100, margin=100).grade(make_sample(answer=25)).value == -0.25


def test_a_margin_beyond_the_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="margin=101 must not be larger than max_tokens=100"):
        Overlong(max_tokens=100, margin=101)


def test_no_ground_truth_is_needed() -> None:
    Overlong(max_tokens=100, margin=10).check(make_sample().prompt)
