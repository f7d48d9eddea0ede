from __future__ import annotations

import pytest

from practicum.reward.serving.endpoint import Turn, messages_of
from practicum.reward.serving.texts import BadRequest
from practicum.types import Message
from tests.reward.serving.fakes import FakeBody, FakeEndpoint


def test_a_request_becomes_jobs() -> None:
    asked = FakeEndpoint().read(b'{"numbers": [1, 2], "model": "any", "user": "me"}')
    assert asked.body == FakeBody(numbers=[1, 2], model="any", user="me")
    assert [job.payload for job in asked.jobs] == [1, 2]
    assert messages_of([Turn(role="user", content="1+2=")]) == [Message("user", "1+2=")]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", r"the body is not JSON: "),
        (b"\xff", r"the body is not JSON: "),
        (b"[" * 100_000, r"the body is not JSON: "),
        (b"[]", r"Input should be a valid dictionary"),
        (b"{}", r"numbers: Field required\."),
        (b'{"numbers": [1, "x"]}', r"numbers\.1: Input should be a valid integer"),
        (b'{"numbers": [], "truncate": 5}', r"truncate is not supported here\."),
    ],
    ids=["cut off", "no text", "too deep", "a list", "incomplete", "wrong type", "unknown field"],
)
def test_what_cannot_be_read_says_why(body: bytes, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        FakeEndpoint().read(body)


def test_it_sleeps_and_wakes_with_its_weights() -> None:
    endpoint = FakeEndpoint()
    endpoint.sleep()
    assert not endpoint.weights.is_awake
    endpoint.wake()
    assert endpoint.weights.is_awake
