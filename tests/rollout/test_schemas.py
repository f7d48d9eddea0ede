from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from practicum.rollout.engines import ENGINES
from practicum.rollout.schemas import (
    ImagePart,
    RolloutCall,
    RolloutReply,
    Sampling,
    TextPart,
    ToolCall,
    ToolResult,
    WireMessage,
)
from practicum.types import Message, Prompt, RolloutRequest, RoutedExperts, Sample, SamplingParams

PIXEL = "data:image/png;base64,iVBORw0KGgo="


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Conversations: some tokens are not the model's."""
    mask = draw(st.lists(st.booleans(), min_size=1, max_size=20))
    num, num_prompt = len(mask), draw(st.integers(1, 5))
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    learnt = np.array(mask)
    kind = draw(st.sampled_from([None, np.uint8, np.uint16]))
    routes = None
    if kind is not None:
        experts = random.integers(0, 200, (num_prompt + num, 2, 3)).astype(kind)
        known = random.random(num_prompt + num) < 0.5
        routes = RoutedExperts(experts, np.array([1, 3], np.int32), known, 200 if kind is np.uint8 else 300)
    return Sample(
        Prompt("p", text="?", metadata={"level": 1}),
        random.integers(0, 2**31 - 1, num_prompt).astype(np.int32),
        random.integers(0, 2**31 - 1, num).astype(np.int32),
        np.where(learnt, -random.random(num), np.nan).astype(np.float32),
        learnt,
        np.where(learnt, 3, -1).astype(np.int32),
        draw(st.text()),
        draw(st.sampled_from(["stop", "length", "abort"])),
        routes,
    )


@given(samples())
def test_a_sample_comes_back_from_the_wire_as_it_was(sample: Sample) -> None:
    text = RolloutReply.of(sample, 2).model_dump_json()
    assert "NaN" not in text
    reply = RolloutReply.model_validate_json(text)
    back = reply.to_sample(sample.prompt)
    assert reply.answer_number == 2
    assert (back.text, back.finish_reason) == (sample.text, sample.finish_reason)
    for name in ("prompt_ids", "token_ids", "log_probs", "loss_mask", "versions"):
        before, after = getattr(sample, name), getattr(back, name)
        assert before.dtype == after.dtype
        assert np.array_equal(before, after, equal_nan=name == "log_probs")
    assert (sample.routes is None) == (back.routes is None)
    if sample.routes is not None and back.routes is not None:
        assert np.array_equal(sample.routes.experts, back.routes.experts)
        assert sample.routes.experts.dtype == back.routes.experts.dtype
        assert np.array_equal(sample.routes.known, back.routes.known)
        assert back.routes.layers.tolist() == [1, 3]


def test_a_request_travels_by_its_token_ids() -> None:
    params = SamplingParams(5, 0.7, 0.9, 3, 2, ("x",), (9,), True)
    prompt = Prompt("p", messages=(Message("user", "hi"),), answer=[1], data_source="s", metadata={"a": {"b": 1}})
    request = RolloutRequest(prompt, np.array([4, 5], np.int32), params, 2**64 - 1, 3, session="talk")
    call = RolloutCall.model_validate_json(RolloutCall.of(request).model_dump_json())
    back = call.to_request(lambda prompt: pytest.fail("nobody tokenises"), "native")
    assert back.prompt_ids.tolist() == [4, 5] and back.prompt_ids.dtype == np.int32
    assert (back.params, back.seed, back.first_answer, back.session) == (params, 2**64 - 1, 3, "talk")
    assert (back.prompt.answer, back.prompt.data_source, back.prompt.metadata) == ([1], "s", {"a": {"b": 1}})


def test_messages_and_text_are_tokenised_where_they_arrive() -> None:
    seen: list[Prompt] = []

    def encode(prompt: Prompt) -> Any:
        seen.append(prompt)
        return np.array([1], np.int32)

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    fields = {"id": "p", "sampling": {"max_new_tokens": 2}}
    RolloutCall.model_validate({**fields, "messages": [{"role": "user", "content": parts}]}).to_request(encode, "hf")
    RolloutCall.model_validate({**fields, "text": "plain"}).to_request(encode, "hf")
    assert seen[0].messages == (Message("user", "ab"),) and seen[1].text == "plain"


def test_text_and_pictures_side_by_side() -> None:
    fields = [{"type": "text", "text": "what is"}, {"type": "image_url", "image_url": {"url": PIXEL}}]
    message = WireMessage.model_validate({"role": "user", "content": fields})
    assert message.content is not None and [type(part) for part in message.content] == [TextPart, ImagePart]
    assert WireMessage.model_validate_json(message.model_dump_json()) == message


@pytest.mark.parametrize("engine", ENGINES)
def test_a_picture_is_refused_by_engine_and_part_before_anything_is_written(engine: str) -> None:
    fields = [{"type": "text", "text": "what is"}, {"type": "image_url", "image_url": {"url": PIXEL}}]
    call = {"id": "p7", "messages": [{"role": "user", "content": fields}], "sampling": {"max_new_tokens": 1}}
    refusal = (
        rf"request p7: rollout.engine={engine} reads text only: part 2 of the user's message is an image \(image_url"
    )
    with pytest.raises(ValueError, match=refusal):
        RolloutCall.model_validate(call).to_request(lambda prompt: pytest.fail("nobody tokenises"), engine)


def test_calls_and_results() -> None:
    call = ToolCall.model_validate({"id": "c1", "function": {"name": "add", "arguments": {"a": 1}}})
    assert call.function.arguments == '{"a": 1}'
    said = WireMessage(role="assistant", tool_calls=(call,))
    assert WireMessage.model_validate_json(said.model_dump_json()) == said
    result = ToolResult(tool_call_id="c1", content="3").to_message()
    assert (result.role, result.content, result.tool_call_id) == ("tool", "3", "c1")
    assert result.to_message("hf") == Message("tool", "3")
    assert WireMessage.of(Message("user", "x")).to_message("hf") == Message("user", "x")


@pytest.mark.parametrize(
    ("kind", "fields", "complaint"),
    [
        (RolloutCall, {"id": "p", "sampling": {"max_new_tokens": 1}}, "exactly one of messages, text and prompt_ids"),
        (RolloutCall, {"id": "p", "text": "a", "prompt_ids": [1], "sampling": {"max_new_tokens": 1}}, "exactly one"),
        (RolloutCall, {"id": "p", "text": "a", "sampling": {"max_new_tokens": 1}, "sed": 1}, "sed"),
        (Sampling, {"max_new_tokens": 0}, "max_new_tokens"),
        (Sampling, {"max_new_tokens": 1, "stop": [""]}, "stop"),
        (WireMessage, {"role": "user"}, "needs content"),
        (WireMessage, {"role": "robot", "content": "x"}, "role"),
        (WireMessage, {"role": "user", "content": "x", "tool_call_id": "c"}, "only tools answer calls"),
        (WireMessage, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "ftp://x"}}]}, "url"),
        (ToolCall, {"id": "c", "function": {"name": "add", "arguments": "{"}}, "not valid JSON"),
        (ToolCall, {"id": "c", "function": {"name": "add", "arguments": "[1]"}}, "must be a JSON object"),
        (
            RolloutReply,
            {"id": "p", "prompt_ids": [1], "token_ids": [1, 2], "log_probs": [0.0], "loss_mask": [True, True]}
            | {"versions": [0, 0], "text": "", "finish_reason": "stop"},
            "log_probs has 1 entries for 2 tokens",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(kind: Any, fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(fields)
    assert complaint in str(caught.value)
