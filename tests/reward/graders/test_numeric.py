from __future__ import annotations

import time
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.reward.graders.numeric import Numeric, last_number
from tests.samples import make_sample


def value(text: str, truth: Any, **options: Any) -> float | None:
    return Numeric(**options).grade(make_sample(text=text, truth=truth)).value


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("42", 42),
        ("The answer is 42.", 42),
        ("**42**", 42),
        ("So it is 42!", 42),
        ("She pays $1,234.50 in total.", 1234.5),
        (r"She pays \$18.", 18),
        ("Temperature: -7 degrees", -7),
        ("\u22127", -7),
        ("x = - 3", -3),
        (r"$x = -\frac{3}{4}$", -0.75),
        ("-$5", -5),
        ("$-5", -5),
        ("5-3 = 2", 2),
        ("between 3-5", 5),
        ("- 7 apples", 7),
        ("The area is 25 cm^2", 25),
        ("The area is 25 m\u00b2", 25),
        ("The density is 5 kg m^{-3}", 5),
        (r"\boxed{12\text{ cm}^2}", 12),
        (r"The angle is $90^\circ$", 90),
        (r"\boxed{42}. That took 3 steps", 42),
        (r"Not \boxed{41} but \boxed{42}", 42),
        (r"\boxed{x = 42}", 42),
        (r"\boxed{\$1{,}000}", 1000),
        (r"\boxed{10\,000}", 10000),
        ("12\u202f345", 12345),
        ("1,234,567", 1234567),
        ("3/4", "3/4"),
        ("0.75", "3/4"),
        ("1 3/4 cups", 1.75),
        (r"1\frac34", 1.75),
        (r"\dfrac{-1}{2}", -0.5),
        (r"\frac{1}{3}", 0.333333),
        ("0.333333", "1/3"),
        ("0.3", 0.1 + 0.2),
        ("3.14159", 3.141592653589793),
        (".5", 0.5),
        ("1.5e-3", 0.0015),
        ("1E6", 1000000),
        (r"2 \times 10^{5}", 200000),
        ("2 \u00d7 10\u2075", 200000),
        ("2*10^-2", 0.02),
        ("2^10", 1024),
        ("50%", 50),
        ("50%", 0.5),
        (r"50\%", "50%"),
        ("0.5", "50%"),
        ("50 percent", 50),
        ("42 km/h", 42),
        ("42km", 42),
        ("a_1 = 3, a_{2} = 5", 5),
        ("\u7b54\u6848\u662f42\u3002", 42),
        (r"\approx5", 5),
        ("<think>maybe 41</think>It is 42", 42),
        ("7", [7, 11]),
        ("11", [7, "11"]),
        ("0", 0),
        ("-0", 0),
    ],
)
def test_right_answers(text: str, truth: Any) -> None:
    score = Numeric().grade(make_sample(text=text, truth=truth))
    assert (score.value, score.parts) == (1.0, {"found": 1.0})


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("42, and then 43", 42),
        ("42", -42),
        ("123456789012345678901", 123456789012345678902),
        ("1.5", 1.6),
        ("50%", 5),
        ("50%", "0.5%"),
        (r"\boxed{41}, perhaps 42", 42),
        ("10^3", 3),
        ("3", 3.01),
        ("0.33", "1/3"),
        ("123456.78", 123456.79),
    ],
)
def test_wrong_answers(text: str, truth: Any) -> None:
    score = Numeric().grade(make_sample(text=text, truth=truth))
    assert (score.value, score.parts) == (0.0, {"found": 1.0})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I do not know",
        "H2O",
        "x_2",
        r"\boxed{x}, so 2",
        r"\boxed{\sqrt{2}}",
        "\u221a2",
        r"\boxed{2\pi}",
        r"2\sqrt{3}".replace("3", "x"),
        r"\frac{1}{0}",
        "1e999999999",
        "2^999999999",
        "2" * 5000,
    ],
)
def test_what_is_no_number_is_wrong(text: str) -> None:
    score = Numeric().grade(make_sample(text=text, truth=2))
    assert (score.value, score.parts) == (0.0, {"found": 0.0})


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("#### 42", True),
        ("Step 1. Step 2.\n#### 42\nThat took 2 steps.", True),
        ("#### 41 no, #### 42", True),
        ("42", False),
        (r"\boxed{42}", False),
        ("#### none", False),
    ],
)
def test_a_marker_says_where_the_number_is(text: str, right: bool) -> None:
    assert value(text, 42, marker="####") == float(right)


def test_case_of_the_marker_does_not_matter() -> None:
    assert value("The Answer Is 42 (see page 3)", 42, marker="answer is") == 1.0


@pytest.mark.parametrize(
    ("text", "options", "right"),
    [
        ("1001", {}, False),
        ("1001", {"relative_tolerance": 0.01}, True),
        ("1011", {"relative_tolerance": 0.01}, False),
        ("1000.00001", {}, True),
        ("1000.01", {}, False),
        ("1000.00001", {"relative_tolerance": 0}, False),
        ("1002", {"absolute_tolerance": 2}, True),
        ("1002.1", {"absolute_tolerance": 2}, False),
    ],
)
def test_tolerance(text: str, options: dict[str, float], right: bool) -> None:
    assert value(text, 1000, **options) == float(right)


@pytest.mark.parametrize(
    ("truth", "number"),
    [
        ("Natalia sold 48/2 = <<48/2=24>>24 clips.\n#### 24", "24"),
        ("5 apples", "5"),
        ("$1,200", "1200"),
        (r"We get $x^2 = 9$, so \boxed{-3}", "-3"),
        (0.1, "0.1"),
    ],
)
def test_how_ground_truths_are_read(truth: Any, number: str) -> None:
    assert value(number, truth, relative_tolerance=0) == 1.0


@pytest.mark.parametrize(
    ("truth", "words"),
    [
        (None, "the ground truth is missing"),
        ("abc", "numeric needs a number as ground truth, found 'abc'"),
        ("3 or 4", "holds 2 numbers: write #### before the right one"),
        (True, "found True"),
        ({"value": 3}, "found {'value': 3}"),
        ([1, "x"], "found 'x'"),
    ],
)
def test_ground_truths_that_cannot_be_used(truth: Any, words: str) -> None:
    sample = make_sample(text="3", truth=truth)
    with pytest.raises(ValueError) as caught:
        Numeric().check(sample.prompt)
    assert words in str(caught.value)
    score = Numeric().grade(sample)
    assert score.status == "invalid" and words in score.reason


@given(
    st.integers(-(10**30), 10**30), st.sampled_from(["{}", "{:,}", "The answer is {}.", r"\boxed{{{}}}", "${:,}$ km"])
)
def test_whole_numbers_are_read_exactly(number: int, form: str) -> None:
    found = last_number(form.format(number))
    assert found is not None and found.value == number


@given(st.decimals(-(10**9), 10**9, places=4))
def test_decimals_are_read_exactly(number: Any) -> None:
    found = last_number(f"It costs {number:,f}")
    assert found is not None and found.value == Fraction(number)


@given(
    st.integers(-999, 999),
    st.integers(1, 999),
    st.sampled_from(["{}/{}", r"\frac{{{}}}{{{}}}", r"$\dfrac{{{}}}{{{}}}$"]),
)
def test_fractions_are_read_exactly(top: int, bottom: int, form: str) -> None:
    found = last_number("We get " + form.format(top, bottom))
    assert found is not None and found.value == Fraction(top, bottom)


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e100, max_value=1e100))
def test_a_float_is_found_in_its_own_text(number: float) -> None:
    assert value(f"= {number!r}", number) == 1.0


@given(st.text(alphabet="0123456789.,-+/ eE^{}\\frac$%x=()_\u2212\u00b2", max_size=60))
def test_no_answer_breaks_it(text: str) -> None:
    assert Numeric().grade(make_sample(text=text, truth=1)).status == "ok"


@pytest.mark.parametrize("piece", ["1,234", "1 ", "9", r"\boxed{", "= - ", "1,111,", "1/", "{", " ", "-", r"\frac{1"])
def test_long_answers_do_not_stall_it(piece: str) -> None:
    started = time.process_time()
    Numeric().grade(make_sample(text="= " + piece * 30_000, truth=1))
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("text", "answer"),
    [("1,234.50", "2469/2"), ("7.0", "7"), (r"\boxed{40%}", "40%"), ("0.5", "1/2"), ("none", None)],
)
def test_it_tells_which_number_it_read(text: str, answer: str | None) -> None:
    assert Numeric().grade(make_sample(text=text, truth="3")).answer == answer
