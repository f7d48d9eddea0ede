from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from practicum import Message, Prompt
from practicum.reward.graders.remote import Endpoint
from practicum.types import Score
from tests.reward.fakes import FakeService, saying, score_by
from tests.samples import make_sample

SAMPLE = replace(
    make_sample(text="4"),
    prompt=Prompt(
        "p", messages=(Message("user", "2+2="),), answer=["4", 4], data_source="sums", metadata={"level": [1]}
    ),
)


def score(reply: Any) -> Score:
    with FakeService(reply) as service:
        return score_by(Endpoint(urls=("http://grader",)), SAMPLE, service.url)


def test_the_service_is_told_everything_about_the_sample() -> None:
    with FakeService(0.5) as service:
        assert score_by(Endpoint(urls=("http://grader/score?v=2",)), SAMPLE, service.url) == Score(0.5)
    assert service.paths == ["/score?v=2"]
    assert service.asked == [
        {
            "prompt": "2+2=",
            "messages": [{"role": "user", "content": "2+2="}],
            "text": "4",
            "ground_truth": ["4", 4],
            "data_source": "sums",
            "metadata": {"level": [1]},
            "finish_reason": "stop",
        }
    ]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (1, Score(1.0)),
        ({"score": 0.5, "parts": {"style": 1}}, Score(0.5, parts={"style": 1.0})),
        ({"score": 0.5, "status": "ok"}, Score(0.5)),
        ({"status": "invalid", "reason": "no answer"}, Score.failed("invalid", "no answer")),
        ({"status": "timeout"}, Score.failed("timeout", "")),
        ({"status": "infra_error", "score": 0.0, "reason": "down"}, Score.failed("infra_error", "down")),
    ],
)
def test_what_the_service_says_is_the_score(reply: Any, expected: Score) -> None:
    assert score(reply) == expected


@pytest.mark.parametrize(
    "reply",
    [
        "0.5",
        None,
        [1],
        {},
        {"value": 1},
        {"score": None},
        {"status": "ok"},
        {"status": "failed"},
        {"status": ["invalid"]},
        {"score": 1, "status": None},
        saying(200, "NaN"),
        saying(200, '{"score": Infinity}'),
    ],
)
def test_anything_else_is_invalid_and_never_a_zero(reply: Any) -> None:
    made = score(reply)
    assert (made.status, made.value) == ("invalid", None)
    assert made.reason


def test_metadata_that_cannot_be_sent_is_invalid() -> None:
    sample = replace(SAMPLE, prompt=replace(SAMPLE.prompt, metadata={"image": b"\x89PNG"}))
    with FakeService(1.0) as service:
        made = score_by(Endpoint(urls=("http://grader",)), sample, service.url)
    assert made.status == "invalid" and "bytes" in made.reason
