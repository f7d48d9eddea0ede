from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from practicum import Message, Prompt
from practicum.controller.host import free_port
from practicum.reward.graders.judge import Judge
from practicum.reward.graders.remote import OWN_MODEL, Endpoint, conversation, question_text
from tests.reward.fakes import Answer, FakeService, hang, hang_up, saying, score_by
from tests.samples import make_sample

SAMPLE = make_sample(text="4", truth="4")


def test_one_url_or_several_that_differ_in_host_only() -> None:
    one = Endpoint.model_validate({"urls": "http://a:9000/score"})
    assert (one.urls, one.path, one.servers) == (("http://a:9000/score",), "/score", ("http://a:9000",))
    several = Endpoint(urls=("http://a:9000/score", "https://b/score"))
    assert several.servers == ("http://a:9000", "https://b")
    assert several.target != one.target


@pytest.mark.parametrize(
    ("url", "path"),
    [("http://a", ""), ("http://a/", ""), ("http://a/x/", "/x/"), ("http://a/x?k=1", "/x?k=1"), ("http://a?k", "/?k")],
)
def test_the_path_is_sent_as_it_was_written(url: str, path: str) -> None:
    assert Endpoint(urls=(url,)).path == path


def test_without_urls_it_is_the_reward_model_that_is_asked() -> None:
    assert (Judge().target, Judge().servers, Judge().path) == (OWN_MODEL, (), "")


@pytest.mark.parametrize(
    ("urls", "complaint"),
    [
        ("localhost:9000", "is not a URL such as http://"),
        ("ftp://a/b", "is not a URL"),
        (["http://a/x", "http://b/y"], "differ in host and port only"),
        (["http://a/x?k=1", "http://b/x?k=2"], "differ in host and port only"),
    ],
)
def test_addresses_that_cannot_work_are_refused(urls: Any, complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        Endpoint.model_validate({"urls": urls})


def test_the_key_comes_from_the_environment_and_is_missed_before_the_first_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grader = Endpoint(urls=("http://grader.example:9000/score",), api_key_env="MY_KEY")
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(ValueError, match=r"MY_KEY \(option api_key_env\) is not set"):
        grader.prepare()
    monkeypatch.setenv("MY_KEY", "secret")
    grader.prepare()
    with FakeService(1.0) as service:
        assert score_by(grader, SAMPLE, service.url).value == 1.0
        assert service.headers[0]["Authorization"] == "Bearer secret"
        assert service.headers[0]["Host"] == "grader.example:9000"
        assert service.paths == ["/score"]


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (saying(400, "bad"), "invalid"),
        (saying(429, "slow down"), "infra_error"),
        (saying(500, "broken"), "infra_error"),
        (saying(200, "{"), "invalid"),
        (hang_up, "infra_error"),
        (hang, "timeout"),
    ],
)
def test_failures_are_scores_with_a_status(reply: Answer, status: str) -> None:
    with FakeService(reply) as service:
        score = score_by(Endpoint(urls=(service.url,)), SAMPLE, service.url, timeout_s=1.0)
    assert (score.status, score.value) == (status, None)
    assert score.reason


def test_nobody_at_the_other_end() -> None:
    score = score_by(Endpoint(urls=("http://a",)), SAMPLE, f"http://127.0.0.1:{free_port()}")
    assert score.status == "infra_error"


def test_a_question_as_text_and_as_messages() -> None:
    plain = Prompt("p", text="2+2=")
    chat = Prompt("p", messages=(Message("user", "2+2="),))
    long = Prompt("p", messages=(Message("system", "Add."), Message("user", "2+2=")))
    samples = [make_sample() for _ in range(3)]
    for sample, prompt in zip(samples, (plain, chat, long), strict=True):
        object.__setattr__(sample, "prompt", prompt)
    assert [question_text(sample) for sample in samples] == ["2+2=", "2+2=", "system: Add.\n\nuser: 2+2="]
    assert conversation(plain) == conversation(chat) == [{"role": "user", "content": "2+2="}]
    assert conversation(long)[0] == {"role": "system", "content": "Add."}
