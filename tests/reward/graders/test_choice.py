from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.reward.graders.choice import Choice
from tests.samples import make_sample

STATED = [
    "The answer is (C).",
    "the answer is c",
    "Answer: C",
    "Answer:\n\nC",
    "**Answer:** C",
    "Answer: **C**",
    'Answer: "C"',
    "Answer: Option C",
    "Answer: (C) Paris\n",
    "The correct answer is option C because it is the capital.",
    "The correct answer is:\n\n**C) Paris**",
    "The final answer is **(C) Paris**",
    "The best choice is: C)",
    "The answer would be C",
    "Therefore, the answer is $C$.",
    r"Thus the correct choice is $\mathrm{C}$.",
    r"\boxed{C}",
    r"\boxed{c}",
    r"$\boxed{\text{C}}$",
    r"\boxed{\textbf{(C)}\ 12}",
    r"\boxed{\text{(C) }\frac12}",
    r"Final answer: \( \boxed{C} \)",
    "<think>A? The answer is B?</think><answer>C</answer>",
    "<answer>\n(C)\n</answer>",
    "#### C",
    "I would choose C.",
    "So option C is correct.",
    "(C) is the correct answer, A is wrong.",
    "The answer is C, A is wrong.",
    "The answer is C, not A.",
    "The answer is A. Wait, no. The answer is C.",
    "The answer is A good question. I say C",
    "\u7b54\u6848\u662fC\u3002",
    "\u7b54\u6848\uff1aC",
    "\u6545\u9009C",
]
UNSTATED = [
    "C",
    "c",
    "(c)",
    "C.",
    "C) Paris",
    "**C. Paris**",
    "It is C",
    "The answer is not A. So it must be C.",
    "C\n\nExplanation: the others are smaller, and D is no city.",
    "A. Rome\nB. Oslo\nC. Paris\n\nC",
    "<think>maybe the answer is A</think>\n\nC",
]


@pytest.mark.parametrize("text", STATED + UNSTATED)
def test_the_letter_is_found(text: str) -> None:
    score = Choice().grade(make_sample(text=text, truth="C"))
    assert (score.value, score.parts) == (1.0, {"found": 1.0})
    assert Choice().grade(make_sample(text=text, truth="A")).value == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no idea",
        "The answer is a prime number.",
        "The answer is vitamin K",
        "The answer is K",
        "The answer is C or A",
        "The answer is C and A.",
        "The answer is both C and A.",
        r"\boxed{C, A}",
        "It is C or A",
        "A. Rome\nB. Oslo\nC. Paris",
    ],
)
def test_no_choice_or_two_are_wrong(text: str) -> None:
    score = Choice().grade(make_sample(text=text, truth="C"))
    assert (score.status, score.value, score.parts) == ("ok", 0.0, {"found": 0.0})


@pytest.mark.parametrize("truth", ["C", "c", "(C)", "C.", "C)", 2, 2.0, ["A", "C"], [0, 2]])
def test_the_truth_is_a_letter_or_an_index_from_zero(truth: Any) -> None:
    sample = make_sample(text="Answer: C", truth=truth)
    Choice().check(sample.prompt)
    assert Choice().grade(sample).value == 1.0


@pytest.mark.parametrize("truth", ["K", "2", "Paris", 10, -1, 1.5, True])
def test_other_truths_are_refused(truth: Any) -> None:
    sample = make_sample(text="Answer: C", truth=truth)
    with pytest.raises(ValueError, match="choice needs a"):
        Choice().check(sample.prompt)
    assert Choice().grade(sample).status == "invalid"


def test_a_missing_truth_is_named() -> None:
    with pytest.raises(ValueError, match="the ground truth is missing"):
        Choice().check(make_sample(text="C").prompt)


def test_letters_can_be_chosen() -> None:
    assert Choice(letters="ABK").grade(make_sample(text="Answer: K", truth=2)).value == 1.0
    assert Choice(letters="AB").grade(make_sample(text="Answer: C", truth="A")).parts == {"found": 0.0}
    with pytest.raises(ValueError, match="a letter twice"):
        Choice(letters="ABA")


@given(st.text(alphabet="ABab answer is:()\\boxed{}\n,.or", max_size=80))
def test_no_answer_breaks_it(text: str) -> None:
    assert Choice().grade(make_sample(text=text, truth="A")).status == "ok"


@pytest.mark.parametrize("piece", ["answer is ", " ", "\n", "A\n", "A, ", "(", r"\boxed{", "answer is A or "])
def test_long_answers_do_not_stall_it(piece: str) -> None:
    started = time.process_time()
    Choice().grade(make_sample(text="answer is" + piece * 30_000 + "x", truth="A"))
    assert time.process_time() - started < 2


@pytest.mark.parametrize(("text", "answer"), [("Answer: (b)", "B"), ("B", "B"), ("A or B", None)])
def test_it_tells_which_letter_it_read(text: str, answer: str | None) -> None:
    assert Choice().grade(make_sample(text=text, truth="A")).answer == answer
