from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from practicum.reward.serving.chat import ChatEndpoint
from practicum.reward.serving.generator import Generator
from practicum.reward.serving.texts import BadRequest

CHAT = [{"role": "user", "content": "1+2="}]


@pytest.fixture(scope="module")
def endpoint(tiny_model: Path) -> ChatEndpoint:
    generator = Generator(str(tiny_model), device=torch.device("cpu"), dtype=torch.float32, max_batch_tokens=512)
    return ChatEndpoint("judge", generator)


def answers(endpoint: ChatEndpoint, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
    """Of requests that are computed together, as long as their parameters are the same."""
    asked = [endpoint.read(json.dumps({"messages": CHAT} | body).encode()) for body in bodies]
    results = endpoint.compute([one.jobs[0].payload for one in asked])
    return [endpoint.reply(one, [result]) for one, result in zip(asked, results, strict=True)]  # type: ignore[list-item]


def written(reply: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in reply["choices"]]


def test_the_reply_has_openais_shape(endpoint: ChatEndpoint) -> None:
    (reply,) = answers(endpoint, {"n": 3, "max_tokens": 5, "seed": 1})
    assert reply["object"] == "chat.completion"
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert {choice["message"]["role"] for choice in reply["choices"]} == {"assistant"}
    assert {choice["finish_reason"] for choice in reply["choices"]} <= {"stop", "length"}
    usage = reply["usage"]
    assert usage["prompt_tokens"] == 6  # <user>1+2=<bot>
    assert usage["total_tokens"] == 6 + usage["completion_tokens"]


def test_a_seed_gives_the_same_answers_whatever_else_is_asked(endpoint: ChatEndpoint) -> None:
    mine: dict[str, Any] = {"seed": -7, "max_tokens": 12, "n": 2}
    others = [{**mine, "seed": seed, "messages": [{"role": "user", "content": "9" * seed}]} for seed in range(1, 6)]
    (alone,) = answers(endpoint, mine)
    in_company = answers(endpoint, *others[:2], mine, *others[2:])[2]
    assert written(in_company) == written(alone)
    assert len({tuple(written(reply)) for reply in answers(endpoint, *others)}) > 1


def test_without_a_seed_answers_differ_and_at_temperature_0_they_do_not(endpoint: ChatEndpoint) -> None:
    assert len({tuple(written(answers(endpoint, {"max_tokens": 12})[0])) for _ in range(5)}) > 1
    assert len({tuple(written(answers(endpoint, {"max_tokens": 12, "temperature": 0})[0])) for _ in range(5)}) == 1


def test_answers_end_before_the_first_stop(endpoint: ChatEndpoint) -> None:
    asked = {"seed": 2, "n": 8, "max_completion_tokens": 20}
    (whole,) = answers(endpoint, asked)
    longest = max(written(whole), key=len)
    stop = longest[4]
    (cut,) = answers(endpoint, {**asked, "stop": [stop, "never written"]})
    assert written(cut) == [text.split(stop)[0] for text in written(whole)]
    ended = [choice["finish_reason"] for choice in cut["choices"]]
    assert ended[written(whole).index(longest)] == "stop"
    assert written(answers(endpoint, {**asked, "stop": stop})[0]) == written(cut)


def test_only_requests_with_the_same_parameters_are_computed_together(endpoint: ChatEndpoint) -> None:
    bodies = [{"max_tokens": 5}, {"max_tokens": 5, "seed": 3}, {"max_tokens": 5, "top_p": 0.5}, {"max_tokens": 6}]
    keys = [endpoint.read(json.dumps({"messages": CHAT} | body).encode()).jobs[0].key for body in bodies]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": []}, "messages: "),
        ({"stream": True}, "stream: "),
        ({"n": 0}, "n: "),
        ({"temperature": -1}, "temperature: "),
        ({"top_p": 0}, "top_p: "),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "mean the same: give one of them"),
        ({"logprobs": True}, "logprobs is not supported here"),
        (
            {"max_tokens": 60},
            r"the messages have 6 tokens and the answer up to 60: together 66 tokens; this model takes 64",
        ),
        ({"messages": [{"role": "user", "content": "1" * 70}]}, r"messages have 72 tokens, which leaves none .* 64"),
    ],
)
def test_bad_requests_say_what_is_wrong(endpoint: ChatEndpoint, body: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        answers(endpoint, body)


def test_without_a_length_an_answer_may_take_what_is_left(endpoint: ChatEndpoint) -> None:
    asked = endpoint.read(json.dumps({"messages": CHAT}).encode())
    assert asked.jobs[0].payload.params.max_new_tokens == 64 - 6


def test_it_sleeps_and_writes_the_same_afterwards(endpoint: ChatEndpoint) -> None:
    (before,) = answers(endpoint, {"seed": 5, "max_tokens": 9})
    endpoint.sleep()
    assert not endpoint.weights.is_awake
    endpoint.wake()
    assert written(answers(endpoint, {"seed": 5, "max_tokens": 9})[0]) == written(before)
