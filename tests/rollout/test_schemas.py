from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from practicum.config import ENGINES
from practicum.demo.arithmetic import make_tokenizer
from practicum.rollout.engine.sequence import Sequence as EngineSequence
from practicum.rollout.schemas import (
    ChatMessage,
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    ImagePart,
    LogProbsRequest,
    Reply,
    Request,
    TextPart,
    TokenizeRequest,
    ToolCall,
    UpdateWeightsRequest,
    Usage,
    describe,
)
from practicum.rollout.server.encoder import Encoder
from practicum.rollout.server.replies import Answer, new_reply
from practicum.types import Message, Prompt, Sample

USER = {"role": "user", "content": "1+2="}
PIXEL = "data:image/png;base64,iVBORw0KGgo="
PICTURE = {"type": "image_url", "image_url": {"url": PIXEL}}
ENCODER = Encoder(make_tokenizer())


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate(fields)


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [USER]} | fields)


# Requests


@pytest.mark.parametrize(
    ("prompt", "inputs"),
    [("1", ["1"]), (["1", "2"], ["1", "2"]), ([5, 6], [[5, 6]]), ([[5], [6, 7]], [[5], [6, 7]])],
)
def test_a_prompt_comes_in_four_kinds(prompt: Any, inputs: Any) -> None:
    assert completion(prompt=prompt).inputs == inputs


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


def sequences(request: GenerationRequest, *ids: Any) -> list[EngineSequence]:
    arrays = [np.array(one, np.int32) for one in ids]
    groups = request.to_groups(request.prompts("native"), arrays, request.params(9))
    return [EngineSequence.of(group, trajectory) for group in groups for trajectory in group.trajectories]


def test_a_request_becomes_a_group_for_each_prompt_and_a_seed_is_the_number_of_an_answer() -> None:
    made = sequences(completion(prompt=["1", "2+"], n=2, seed=40), [5], [6, 7])
    assert [(one.seed, one.number, one.prompt.text) for one in made] == [
        *((0, 40, "1"), (0, 41, "1"), (0, 40, "2+"), (0, 41, "2+"))
    ]
    assert made[0].prompt_ids is made[1].prompt_ids and made[2].prompt_ids.tolist() == [6, 7]
    (one,) = sequences(chat(seed=41), [5])
    assert one.number == 41 and one.prompt.messages == (Message("user", "1+2="),)
    assert sequences(completion(prompt=[5, 6]), [5, 6])[0].prompt.text == "2 tokens"


def test_any_integer_is_a_seed() -> None:
    numbers = [sequences(completion(prompt="1", seed=seed), [5])[0].number for seed in (-7, -7, None, None)]
    assert numbers[0] == numbers[1] >= 0 and numbers[2] != numbers[3]


COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt: Field required"),
    ({"prompt": 5}, "prompt: is neither a text"),
    ({"prompt": []}, "prompt: is neither a text"),
    ({"prompt": ["1", 5]}, "prompt: is neither a text"),
    ({"prompt": [True]}, "prompt: is neither a text"),
    ({"prompt": "1", "echo": True}, "echo=true is not supported here: leave it out, or say false"),
    ({"prompt": "1", "suffix": "x"}, "suffix=.* is not supported here"),
    ({"prompt": "1", "best_of": 3}, "best_of=3 is not supported here"),
    ({"prompt": "1", "logit_bias": {"5": 1}}, "logit_bias=.* is not supported here"),
    ({"prompt": "1", "logprobs": 5}, "log-probs are those of the tokens that were written"),
    ({"prompt": "1", "truncate": 5}, "truncate is not supported here"),
    ({"prompt": "1", "n": 0}, "n: "),
    ({"prompt": "1", "max_tokens": 0}, "max_tokens: "),
    ({"prompt": "1", "temperature": -1}, "temperature: "),
    ({"prompt": "1", "temperature": float("nan")}, "temperature: "),
    ({"prompt": "1", "top_p": 0}, "top_p: "),
    ({"prompt": "1", "stop": [1]}, "stop"),
]
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages: "),
    ({"messages": [{"role": "user"}]}, "messages.0: a message needs content"),
    ({"messages": [{"role": "", "content": "1"}]}, "messages.0.role: "),
    ({"messages": [USER | {"tool_call_id": "c"}]}, "messages.0: a message of role user cannot have a tool_call_id"),
    ({"messages": [USER | {"colour": "red"}]}, "messages.0.colour is not supported here"),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        r"messages.0.content.parts.0: .*'input_audio' .* 'text', 'image_url'",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "ftp://x"}}]}]},
        r"messages.0.content.parts.0.image_url.image_url.url: ",
    ),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "mean the same: give one of them"),
    ({"tool_choice": "required"}, "tool_choice=.required. is not supported here"),
    ({"response_format": {"type": "json_object"}}, "response_format=.* is not supported here"),
    ({"top_logprobs": 3}, "log-probs are those of the tokens that were written"),
]
OTHERS: list[tuple[type[Request], dict[str, Any], str]] = [
    (TokenizeRequest, {}, "give either prompt or messages"),
    (DetokenizeRequest, {"tokens": "1"}, "tokens: "),
    (ClassifyRequest, {"input": "1", "messages": [USER]}, "give either input or messages"),
    (LogProbsRequest, {"token_ids": []}, "token_ids: "),
    (UpdateWeightsRequest, {"path": ""}, "path: "),
    (UpdateWeightsRequest, {"path": "x", "version": 1 << 31}, "version: "),
]


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        *((CompletionRequest, *one) for one in COMPLETIONS),
        *((ChatRequest, {"messages": [USER]} | body, message) for body, message in CHATS),
        *OTHERS,
    ],
)
def test_what_cannot_be_asked_is_refused_with_the_field(kind: type[Request], body: Any, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert re.search(message, describe(caught.value))


# Messages


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
    user, assistant, tool = (message.for_template("native") for message in body.messages)
    assert user == {"role": "user", "content": "one\ntwo"}
    assert assistant["content"] == "" and list(assistant["tool_calls"]) == [
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    ]
    assert tool == {"role": "tool", "content": "3", "tool_call_id": "1"}
    assert body.prompts("native")[0].messages == (
        *(Message("user", "one\ntwo"), Message("assistant", ""), Message("tool", "3")),
    )


def test_text_and_pictures_side_by_side() -> None:
    parts = [{"type": "text", "text": "what is"}, PICTURE]
    message = ChatMessage.model_validate({"role": "user", "content": parts})
    assert message.content is not None and [type(part) for part in message.content] == [TextPart, ImagePart]
    assert ChatMessage.model_validate_json(message.model_dump_json()) == message


@pytest.mark.parametrize("engine", ENGINES)
def test_a_picture_is_refused_by_engine_and_part_before_anything_is_written(engine: str) -> None:
    body = chat(messages=[{"role": "user", "content": [{"type": "text", "text": "what is"}, PICTURE]}])
    for read in (body.prompts, body.messages[0].for_template):
        with pytest.raises(
            ValueError, match=rf"engine {engine} reads text only, and part 2 of the user's message is of"
        ):
            read(f"engine {engine}")


def test_calls_of_tools() -> None:
    call = ToolCall.model_validate({"id": "c1", "function": {"name": "add", "arguments": {"a": 1}}})
    assert call.function.arguments == '{"a": 1}'
    said = ChatMessage(role="assistant", tool_calls=(call,))
    assert ChatMessage.model_validate_json(said.model_dump_json()) == said
    for arguments, complaint in (("{", "not valid JSON"), ("[1]", "must be a JSON object")):
        with pytest.raises(ValidationError, match=complaint):
            ToolCall.model_validate({"id": "c", "function": {"name": "add", "arguments": arguments}})


# Replies


def sample(*token_ids: int, log_probs: Any = None, reason: Any = "stop", version: int = 3) -> Sample:
    num = len(token_ids)
    return Sample(
        Prompt("p", text="?"),
        np.array([7], np.int32),
        np.array(token_ids, np.int32),
        np.array(log_probs or [-1.0] * num, np.float32),
        np.ones(num, np.bool_),
        np.full(num, version, np.int32),
        "",
        reason,
    )


def test_a_completion_with_log_probs() -> None:
    request = completion(prompt=[7], logprobs=0, return_token_ids=True)
    answer = Answer(0, request, ENCODER, np.array([7], np.int32))
    choice = answer.finish(sample(5, 6, 1, log_probs=[-1.0, -2.0, -0.5]))
    made = new_reply(request, "m").with_choices([choice], usage=Usage.of(1, 3), weight_version=choice.weight_version)
    reply = json.loads(made)
    assert (reply["object"], reply["model"], reply["weight_version"]) == ("text_completion", "m", 3)
    assert reply["usage"] == {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
    assert reply["choices"] == [
        {
            "index": 0,
            "text": "12",
            "finish_reason": "stop",
            "token_ids": [5, 6, 1],
            "weight_version": 3,
            "prompt_token_ids": [7],
            "logprobs": {
                "tokens": ["1", "2", "<end>"],
                "token_logprobs": [-1.0, -2.0, -0.5],
                "top_logprobs": None,
                "text_offset": [0, 1, 2],
            },
        }
    ]
    assert Reply.model_validate(reply).choices[0] == choice


def test_chunks_of_a_completion_count_on() -> None:
    request = completion(prompt=[7], logprobs=0, n=2, stream=True)
    answers = [Answer(n, request, ENCODER, np.array([7], np.int32)) for n in range(2)]
    head = new_reply(request, "m")
    parts = [json.loads(head.with_choices([answers[n].add([5], [-1.0])])) for n in (0, 1, 0)]
    assert [part["choices"][0]["logprobs"]["text_offset"] for part in parts] == [[0], [0], [1]]
    assert len({part["id"] for part in parts}) == 1
    assert "weight_version" not in parts[0]["choices"][0] and parts[0]["choices"][0]["finish_reason"] is None
    rest = answers[0].finish(sample(5, 5, 6))
    assert (rest.text, rest.token_ids, rest.finish_reason) == ("2", [6], "stop")


def test_a_chat_says_once_who_speaks() -> None:
    request = chat(n=2, stream=True)
    answers = [Answer(n, request, ENCODER, np.array([7], np.int32)) for n in range(2)]
    parts = [answers[n].add([5], [-1.0]).model_dump(exclude_unset=True) for n in (0, 1, 0)]
    assert [part["delta"] for part in parts] == [
        {"role": "assistant", "content": "1"},
        {"role": "assistant", "content": "1"},
        {"content": "1"},
    ]
    asked = chat(logprobs=True)
    answer = Answer(0, asked, ENCODER, np.array([7], np.int32))
    choice = answer.finish(sample(5, reason="length"))
    assert choice.message is not None and choice.message.content == "1" and choice.logprobs is not None
    assert choice.logprobs["content"] == [{"token": "1", "logprob": -1.0, "bytes": [49], "top_logprobs": []}]
    whole = Reply.model_validate_json(new_reply(asked, "m").with_choices([choice], usage=Usage.of(1, 1)))
    assert whole.choices == [choice] and "text" not in choice.model_dump(exclude_unset=True)
    assert (whole.object, new_reply(request, "m").object) == ("chat.completion", "chat.completion.chunk")
