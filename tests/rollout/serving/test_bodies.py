from __future__ import annotations

import json
from typing import Any

import pytest

from practicum.rollout.serving.bodies import ChatBody, CompletionBody, TokenizeBody, parse, turns_of
from practicum.rollout.serving.refusals import BadRequest

USER = {"role": "user", "content": "1+2="}


def completion(**body: Any) -> CompletionBody:
    return parse(CompletionBody, json.dumps(body).encode())


def chat(**body: Any) -> ChatBody:
    return parse(ChatBody, json.dumps({"messages": [USER]} | body).encode())


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("1", ["1"]), (["1", "2"], ["1", "2"]), ([5, 6], [[5, 6]]), ([[5], [6, 7]], [[5], [6, 7]])],
)
def test_a_prompt_comes_in_four_kinds(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


def test_what_is_not_said_is_as_openai_has_it() -> None:
    body = completion(prompt="1", n=None, stop=None, temperature=None, seed=None, logit_bias={}, presence_penalty=0)
    params = body.params(body.length)
    assert (params.max_new_tokens, params.temperature, params.num_answers, params.stop) == (16, 1.0, 1, ())
    assert chat().length is None
    assert chat(max_tokens=5).length == chat(max_completion_tokens=5).length == 5


def test_sampling_parameters_are_the_engines() -> None:
    params = completion(
        prompt="1", n=3, temperature=0.5, top_p=0.9, top_k=-1, stop=["a", ""], stop_token_ids=[7], ignore_eos=True
    ).params(9)
    assert (params.max_new_tokens, params.temperature, params.top_p, params.top_k) == (9, 0.5, 0.9, 0)
    assert (params.num_answers, params.stop, params.stop_token_ids, params.ignore_eos) == (3, ("a",), (7,), True)


def test_any_integer_is_a_seed() -> None:
    assert completion(prompt="1", seed=-7).drawn_seed() == completion(prompt="1", seed=-7).drawn_seed() >= 0
    assert completion(prompt="1").drawn_seed() != completion(prompt="1").drawn_seed()


def test_messages_as_templates_read_them() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = chat(
        messages=[
            {"role": "user", "content": parts},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "3", "tool_call_id": "1"},
        ]
    )
    user, assistant, tool = turns_of(body.messages)
    assert user == {"role": "user", "content": "one\ntwo"}
    assert assistant["content"] == "" and assistant["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert tool == {"role": "tool", "content": "3", "tool_call_id": "1"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "prompt: Field required"),
        ({"prompt": 5}, "prompt: is neither a text"),
        ({"prompt": []}, "prompt: is neither a text"),
        ({"prompt": ["1", 5]}, "prompt: is neither a text"),
        ({"prompt": [True]}, "prompt: is neither a text"),
        ({"prompt": "1", "echo": True}, "echo=true is not supported here"),
        ({"prompt": "1", "suffix": "x"}, "suffix=.* is not supported here"),
        ({"prompt": "1", "best_of": 3}, "best_of=3 is not supported here"),
        ({"prompt": "1", "logit_bias": {"5": 1}}, "logit_bias=.* is not supported here"),
        ({"prompt": "1", "logprobs": 5}, "log-probs are told of the tokens that were written"),
        ({"prompt": "1", "truncate": 5}, "truncate is not supported here"),
        ({"prompt": "1", "n": 0}, "n: "),
        ({"prompt": "1", "max_tokens": 0}, "max_tokens: "),
        ({"prompt": "1", "temperature": -1}, "temperature: "),
        ({"prompt": "1", "top_p": 0}, "top_p: "),
        ({"prompt": "1", "stop": [1]}, "stop"),
    ],
)
def test_completions_that_cannot_be_are_refused_with_the_field(body: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        completion(**body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "user"}]}, "a message needs content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "text only, and part 1 is .* 'image_url'",
        ),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "mean the same: give one of them"),
        ({"tool_choice": "required"}, "tool_choice=.required. is not supported here"),
        ({"response_format": {"type": "json_object"}}, "response_format=.* is not supported here"),
        ({"top_logprobs": 3}, "log-probs are told of the tokens that were written"),
    ],
)
def test_chats_that_cannot_be_are_refused_with_the_field(body: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        chat(**body)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", r"the body is not JSON: "),
        (b"\xff", r"the body is not JSON: "),
        (b"[" * 100_000, r"the body is not JSON: "),
        (b"[]", r"valid dictionary"),
        (b"{}", r"give either prompt or messages"),
    ],
    ids=["cut off", "no text", "too deep", "a list", "incomplete"],
)
def test_what_cannot_be_read_says_why(data: bytes, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        parse(TokenizeBody, data)
