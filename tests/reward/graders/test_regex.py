from __future__ import annotations

import pickle
from typing import Any

import pytest

from practicum.reward.graders.base import IsolatedGrader
from practicum.reward.graders.regex import Regex
from tests.samples import make_sample

THINK_ANSWER = r"<think>.*</think>\s*<answer>.*</answer>"
ANSWER = r"<answer>(?P<answer>.*?)</answer>"


def test_it_is_graded_where_it_can_be_killed() -> None:
    assert issubclass(Regex, IsolatedGrader)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>so\nand so</think>\n<answer>42</answer>", 1),
        ("\n<think></think><answer>42</answer>\n", 1),
        ("Well, <think></think><answer>42</answer>", 0),
        ("<think></think><answer>42", 0),
        ("", 0),
    ],
)
def test_the_whole_answer_must_match(text: str, value: float) -> None:
    score = Regex(pattern=THINK_ANSWER, match="full").grade(make_sample(text=text))
    assert (score.status, score.value) == ("ok", value)


@pytest.mark.parametrize(("text", "value"), [("so \\boxed{4} it is", 1), ("BOXED", 0)])
def test_some_part_must_match(text: str, value: float) -> None:
    assert Regex(pattern=r"\\boxed\{.*?\}").grade(make_sample(text=text)).value == value


def test_flags_stand_in_the_pattern() -> None:
    assert Regex(pattern="(?i)yes").grade(make_sample(text="YES")).value == 1.0


@pytest.mark.parametrize(
    ("compare", "text", "truth", "value", "has_format"),
    [
        ("exact", "<answer> Paris </answer>", "Paris", 1, 1),
        ("exact", "<answer>Rome</answer>", "Paris", 0, 1),
        ("exact", "Paris", "Paris", 0, 0),
        ("exact", "<answer>Rome</answer> no, <answer>Paris</answer>", "Paris", 1, 1),
        ("numeric", "<answer>$1,000.00</answer>", 1000, 1, 1),
        ("choice", "<answer>(C) Paris</answer>", 2, 1, 1),
        ("math", r"<answer>\frac{2}{4}</answer>", "0.5", 1, 1),
    ],
)
def test_captured_text_is_compared(compare: Any, text: str, truth: Any, value: float, has_format: float) -> None:
    grader = Regex(pattern=ANSWER, compare=compare)
    grader.prepare()
    score = grader.grade(make_sample(text=text, truth=truth))
    assert (score.value, score.parts) == (value, {"format": has_format})


@pytest.mark.parametrize(
    ("pattern", "text"),
    [(r"#### (\d+)", "#### 42"), (r"(?:so|thus) (?P<other>\w+) (?P<answer>\d+)", "so x 42")],
)
def test_the_named_group_or_else_the_first_is_compared(pattern: str, text: str) -> None:
    assert Regex(pattern=pattern, compare="exact").grade(make_sample(text=text, truth="42")).value == 1.0


def test_a_group_that_took_no_part_is_no_answer() -> None:
    score = Regex(pattern="a(1)|b", compare="exact").grade(make_sample(text="b", truth="42"))
    assert (score.value, score.parts) == (0.0, {"format": 0.0})


def test_what_cannot_be_compared_is_invalid_even_where_the_format_is_wrong() -> None:
    grader = Regex(pattern=ANSWER, compare="numeric")
    for text in ("<answer>42</answer>", "42"):
        score = grader.grade(make_sample(text=text, truth="abc"))
        assert score.status == "invalid" and "numeric needs a number" in score.reason


def test_the_truth_is_checked_only_where_it_is_used() -> None:
    prompt = make_sample().prompt
    Regex(pattern="x").check(prompt)
    with pytest.raises(ValueError, match="the ground truth is missing"):
        Regex(pattern="(x)", compare="exact").check(prompt)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"pattern": "(a"}, "is not a regular expression"), ({"pattern": "a", "compare": "exact"}, "needs a group")],
)
def test_unusable_patterns_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Regex(**options)


def test_it_can_be_sent_to_another_process() -> None:
    grader = Regex(pattern=ANSWER, compare="exact")
    assert pickle.loads(pickle.dumps(grader)) == grader


@pytest.mark.parametrize(("compare", "answer"), [("exact", "$7.50"), ("numeric", "15/2"), (None, None)])
def test_it_tells_what_it_captured(compare: Any, answer: str | None) -> None:
    grader = Regex(pattern=ANSWER, compare=compare)
    assert grader.grade(make_sample(text="<answer> $7.50 </answer>", truth="1")).answer == answer
