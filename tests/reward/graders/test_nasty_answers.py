"""Whatever text a model writes, every grader gives it a value: no answer chooses to be left out of the step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from practicum.config import RewardConfig
from practicum.reward.graders import GRADERS
from practicum.reward.graders.base import Rule
from practicum.reward.graders.remote import OWN_MODEL
from practicum.reward.rubric import Rubric, graded_by_rule
from practicum.reward.sandbox import isolation_problem
from practicum.types import Score
from tests.reward.builders import graded_by_worker, samples_of, target
from tests.reward.fakes import FakeService

LONG = 100_000
PIECES = [
    *["(", "{", "[", "]", "}", "\\", "$", "`", "#", "<", "'", '"', "\x00", "\ud800", "\udfff", "\x1b[31m", "\u202e"],
    *["9", "1,", "1 ", "1,000", "-", "−", ".", "e9", "^", "²", "٣", "１", "½", "%", "1/", "\\times 10^", "\\sqrt{"],  # noqa: RUF001
    *["\\boxed{", "\\boxed{}", "\\frac{1}{", "\\frac", "\\begin{array}", "```", "```json\n", "```python\n", "```\n"],
    *[
        "</think>",
        "<answer>",
        "####",
        "answer is ",
        "A",
        "A or ",
        "(B)",
        "is correct",
        "\n",
        " ",
        "\t",
        "\r",
        "a",
        "=- ",
    ],
    *['{"a":', "null,", "True", "NaN", "{answer}", "{truth}", "%s", "def add(a, b):", "class add:\n ", "x=", "lambda:"],
]
NASTY = [
    *["", "nan", "Infinity", "-Infinity", "1e999999999", "-1e-999999999", "1/0", "\\frac{1}{0}", "0^0", "null", "[]"],
    *['{"a": 1e400}', "1" + "0" * 400, '{"a": 1' + "0" * 5000 + "}", "```json\n1" + "0" * 400 + "\n```"],
    *["10^{10^{10^{10}}}", "\\boxed{9^{9^{9^{9}}}}", "\\boxed{(x+1)^{99999}}", "a" * 60 + "!", "\\boxed{" + "1+" * 300],
    *[
        "```python\nclass add: pass\n```",
        "```python\nasync def add(a, b): return 3\n```",
        "```python\nwhile True: pass",
    ],
    *[piece * (LONG // len(piece)) for piece in PIECES],
    *["[" * 50_000 + "]" * 50_000, '{"a":' * 3000 + "1" + "}" * 3000, "x " * 100_000 + "\\boxed{42}".replace("42", "")],
    *["```" + " " * LONG, "```" + "a" * LONG, "=" + " " * LONG + "-" + " " * LONG, "answer" + " " * LONG],
]
TEXTS = st.one_of(
    st.sampled_from(NASTY),
    st.text(st.characters(exclude_categories=()), max_size=200),  # surrogates and control characters too
    st.lists(st.sampled_from(PIECES), max_size=60).map("".join),
    st.tuples(st.sampled_from(PIECES), st.sampled_from(PIECES), st.integers(1, 5000)).map(
        lambda t: (t[0] + t[1]) * t[2]
    ),
)
SLOW: dict[str, Any] = {"wall_s": 1.0, "cpu_s": 1, "memory_mb": 128, "disk_mb": 4}
URL = "http://grader"
SAYS: dict[str, Any] = {"score": 0.5, "data": [{"probs": [0.5]}], "choices": [{"message": {"content": "Score: 5"}}]}
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "exact": ({"ignore_case": True, "ignore_punctuation": True}, "a truth nobody writes"),
    "numeric": ({"relative_tolerance": 0.01}, "73519.25"),
    "math": ({}, "\\frac{73519}{4}"),
    "choice": ({}, "D"),
    "code": ({"limits": SLOW, "total_s": 1.0, "tolerance": 0.1}, ["assert add(20, 22) == 42"]),
    "regex": ({"pattern": "(a+)+$", "match": "full"}, None),
    "json_schema": (
        {
            "schema": {
                "items": {"$ref": "#"},
                "properties": {"a": {"$ref": "#"}},
                "multipleOf": 0.3,
                "pattern": "(a+)+$",
            }
        },
        None,
    ),
    "classifier": ({"urls": URL}, None),
    "judge": ({"urls": URL, "template": "{question} {answer} {truth}"}, "x"),
    "endpoint": ({"urls": URL}, None),
    "overlong": ({"max_tokens": 4, "margin": 2}, None),
    "repetition": ({"n": 2, "unit": "words"}, None),
}
FEW = settings(
    max_examples=2, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), database=None
)


def scores(name: str, texts: list[str]) -> list[Score]:
    """As a reward worker grades them."""
    options, truth = CASES[name]
    with FakeService(SAYS) as service:
        graded = graded_by_worker(
            {"grader": name, "options": options},
            samples_of(*texts, truth=truth),
            timeout_s=4.0,
            targets={URL: target(service.url), OWN_MODEL: target(service.url)},
        )
    return [one.score for one in graded]


def check(texts: list[str], found: list[Score]) -> None:
    left_out = [(text[:80], score) for text, score in zip(texts, found, strict=True) if score.status != "ok"]
    assert not left_out


def test_every_grader_is_tried() -> None:
    assert CASES.keys() == GRADERS.keys()


@pytest.mark.parametrize("name", [name for name, kind in GRADERS.items() if issubclass(kind, Rule)])
@given(texts=st.lists(TEXTS, min_size=30, max_size=60))
@settings(FEW, max_examples=8)
def test_rules_give_any_text_a_value(name: str, texts: list[str]) -> None:
    options, truth = CASES[name]
    (term,) = Rubric.make(RewardConfig(grader=name, options=options)).default
    check(texts, [graded_by_rule(term.grader, sample) for sample in samples_of(*texts, truth=truth)])


@pytest.mark.parametrize("name", GRADERS)
def test_nasty_answers_get_a_value(name: str) -> None:
    if name == "code" and isolation_problem() is not None:
        pytest.skip("no isolation here")
    # What takes for ever costs its time limit: of those texts a few are enough.
    shown = NASTY if name not in ("math", "code") else NASTY[:25] + [text[:300] for text in NASTY[25::3]]
    found = scores(name, shown)
    check(shown, found)
    if name in ("exact", "numeric", "math", "code"):
        assert {score.value for score in found} == {0.0}


@pytest.mark.parametrize("name", ["regex", "json_schema", "endpoint", "classifier", "judge"])
@given(texts=st.lists(TEXTS, min_size=10, max_size=20))
@FEW
def test_any_text_gets_a_value_in_processes_and_over_http(name: str, texts: list[str]) -> None:
    check(texts, scores(name, texts))
