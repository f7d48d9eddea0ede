from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum import Prompt
from practicum.reward.graders.extract import answer_text, boxed, ground_truths, is_number, last_boxed
from tests.samples import make_sample


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"so \boxed{42}", "42"),
        (r"\boxed{\frac{1}{2}} and no more", r"\frac{1}{2}"),
        (r"first \boxed{1}, then \boxed{2}.", "2"),
        (r"\boxed{1} and, cut off, \boxed{2", "1"),
        (r"\boxed{}", ""),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed 7", None),
        ("none", None),
    ],
)
def test_the_last_closed_box(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed


def test_boxes_come_from_the_last_to_the_first() -> None:
    assert list(boxed(r"\boxed{1}, \boxed{2 \boxed{\frac{3}{4}}")) == [r"\frac{3}{4}", "1"]


@given(st.text(alphabet="ab{}\\ "), st.text(alphabet="xy ", max_size=5))
def test_a_box_at_the_end_is_always_found(before: str, inside: str) -> None:
    assert last_boxed(rf"{before}\boxed{{{inside}}}") == inside


@pytest.mark.parametrize(
    ("text", "answer"),
    [("42", "42"), ("<think>1?</think>2", "2"), ("a</think>b</think>c", "c"), ("<think>cut off", "<think>cut off")],
)
def test_thinking_is_not_part_of_the_answer(text: str, answer: str) -> None:
    assert answer_text(make_sample(text=text)) == answer


@pytest.mark.parametrize(
    ("truth", "accepted"),
    [("a", ("a",)), (1, (1,)), (["a", 2.5], ("a", 2.5)), (np.int64(3), (3,)), (Decimal("1.5"), (Decimal("1.5"),))],
)
def test_a_ground_truth_is_one_or_a_list(truth: Any, accepted: tuple[Any, ...]) -> None:
    assert ground_truths(Prompt("p", text="?", answer=truth), "exact") == accepted


@pytest.mark.parametrize("truth", [None, "", []])
def test_a_missing_ground_truth_is_refused(truth: Any) -> None:
    with pytest.raises(ValueError, match="the ground truth is missing"):
        ground_truths(Prompt("p", text="?", answer=truth), "exact")


@pytest.mark.parametrize("truth", [{"a": 1}, True, float("nan"), ["a", None], " ", [[1]]])
def test_another_type_is_refused_by_name(truth: Any) -> None:
    with pytest.raises(ValueError, match=r"exact needs a string, a number or a list of them as ground truth, found"):
        ground_truths(Prompt("p", text="?", answer=truth), "exact")


@pytest.mark.parametrize(
    ("value", "expected"), [(1, True), (1.5, True), (np.float32(1), True), (True, False), ("1", False), (1j, False)]
)
def test_what_a_number_is(value: Any, expected: bool) -> None:
    assert is_number(value) is expected
