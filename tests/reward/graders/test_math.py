from __future__ import annotations

import pickle
from typing import Any

import pytest

from practicum.reward.graders.math import Math
from tests.samples import make_sample


@pytest.fixture(scope="module")
def grader() -> Math:
    grader = Math()
    grader.prepare()
    return grader


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("42", "42"),
        ("The answer is 42.", 42),
        (r"So $x = \boxed{\frac{2}{4}}$.", r"\frac{1}{2}"),
        (r"\boxed{0.5}", "1/2"),
        (r"\boxed{\dfrac12}", 0.5),
        (r"\boxed{1,000}", 1000),
        (r"\boxed{\$18}", "$18"),
        (r"\boxed{0.0000001}", 1e-7),
        (r"The answer is $2\sqrt{3}$", r"2\sqrt{3}"),
        (r"$\boxed{\sqrt{12}}$", r"$2\sqrt{3}$"),
        (r"\boxed{x = 5}", "5"),
        (r"\boxed{5}", "x=5"),
        (r"\boxed{1+x^2}", "x^2+1"),
        (r"\boxed{(1,2)}", "(1,2)"),
        (r"\boxed{\{2,1\}}", r"\{1,2\}"),
        (r"\boxed{[0,1)}", "[0,1)"),
        (r"\boxed{50\%}", "0.5"),
        (r"\boxed{12\text{ cm}}", "12"),
        (r"\boxed{-7}", r"Hence we get \boxed{-7}."),
        (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"\boxed{24}", "48/2 = <<48/2=24>>24 clips\n#### 24"),
        (r"Not \boxed{1}, but \boxed{2}", "2"),
        (r"Either \boxed{1} or \boxed{2}", r"\{1,2\}"),
        (r"\boxed{7}", [3, "7"]),
        (r"<think>\boxed{41}</think>The answer is \boxed{42}", "42"),
    ],
)
def test_equivalent_answers_are_right(grader: Math, text: str, truth: Any) -> None:
    score = grader.grade(make_sample(text=text, truth=truth))
    assert (score.value, score.parts) == (1.0, {"found": 1.0})


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("41", "42"),
        (r"\boxed{2}", r"2\sqrt{3}"),
        (r"\boxed{(2,1)}", "(1,2)"),
        (r"\boxed{0.3}", r"\frac{1}{3}"),
        (r"\boxed{1}, no, \boxed{2}", "1"),
    ],
)
def test_other_answers_are_wrong(grader: Math, text: str, truth: Any) -> None:
    score = grader.grade(make_sample(text=text, truth=truth))
    assert (score.value, score.parts) == (0.0, {"found": 1.0})


@pytest.mark.parametrize("text", ["", "I do not know.", "<think>42</think>"])
def test_an_answer_without_mathematics_is_wrong(grader: Math, text: str) -> None:
    score = grader.grade(make_sample(text=text, truth="42"))
    assert (score.status, score.value, score.parts) == ("ok", 0.0, {"found": 0.0})


@pytest.mark.parametrize("truth", [r"\frac{", "???"])
def test_a_truth_that_cannot_be_read_is_invalid(grader: Math, truth: str) -> None:
    for _ in range(2):  # also when it was seen before
        score = grader.grade(make_sample(text=r"\boxed{1}", truth=truth))
        assert (score.status, score.value) == ("invalid", None)
        assert "cannot read the ground truth" in score.reason


@pytest.mark.parametrize(
    ("truth", "words"), [(None, "the ground truth is missing"), ({"a": 1}, "math needs"), ([], "missing")]
)
def test_truths_of_a_wrong_type_are_refused(grader: Math, truth: Any, words: str) -> None:
    sample = make_sample(text="1", truth=truth)
    with pytest.raises(ValueError, match=words):
        grader.check(sample.prompt)
    assert grader.grade(sample).status == "invalid"


def test_it_can_be_sent_to_another_process(grader: Math) -> None:
    copy = pickle.loads(pickle.dumps(grader))
    assert copy.grade(make_sample(text=r"\boxed{1/2}", truth="0.5")).value == 1.0


def test_it_does_not_complain_about_the_alarm_it_does_not_use(grader: Math, caplog: pytest.LogCaptureFixture) -> None:
    grader.grade(make_sample(text=r"\boxed{3}", truth="3"))
    assert not caplog.records


def test_it_tells_which_expression_it_read(grader: Math) -> None:
    texts = (r"so \boxed{\frac{1}{2}}", r"first \boxed{3}, no: \boxed{ \frac{1}{2} }", "no idea")
    answers = [grader.grade(make_sample(text=text, truth="7")).answer for text in texts]
    assert answers[0] is not None and answers[0] == answers[1]
    assert answers[2] is None
