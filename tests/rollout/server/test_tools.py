"""Calls of tools, as OpenAI's own client sees them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.models import load_config
from practicum.rollout.agent.tools import Call, hermes
from practicum.rollout.server import GenerationService
from practicum.rollout.server.tools import CallParser
from tests.rollout.scripted import ScriptedEngine
from tests.rollout.server.fakes import WAIT_S, Served
from tests.rollout.tokenizers import CALLING, HERMES, byte_tokenizer

ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
USER: Any = {"role": "user", "content": "1+2?"}
ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
TWO = '<tool_call>{"name": "now"}</tool_call>'


class TagWriter(ScriptedEngine):
    """Letter by letter, but for tags that are special tokens."""

    def _letters(self, text: str) -> list[int]:
        special = {token.content: id_ for id_, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        parts = re.split(f"({'|'.join(map(re.escape, special))})", text)
        ids: list[int] = []
        for part in parts:
            ids += [special[part]] if part in special else super()._letters(part)
        return ids


@pytest.fixture
def client_of(tiny_model: Path) -> Callable[..., Any]:
    @contextmanager
    def served(says: Callable[[str], str | None], tokenizer: Any = None) -> Iterator[openai.OpenAI]:
        tokenizer = tokenizer or byte_tokenizer(CALLING)
        config = load_config(str(tiny_model))
        config.max_position_embeddings = 4096
        engine = TagWriter(tokenizer, says)
        service = GenerationService("m", engine, model_config=config, tokenizer=tokenizer, dtype=torch.float32)
        with (
            Served(service) as server,
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client,
        ):
            yield client

    return served


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**({"model": "m", "messages": [USER], "tools": [ADD]} | more))


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


def streamed(client: openai.OpenAI, **more: Any) -> tuple[str, list[dict[str, Any]], str, list[Any]]:
    """Put together as clients do: contents, calls by their index, why it ended, and the pieces."""
    content, reason, deltas = "", "", []
    calls: dict[int, dict[str, Any]] = {}
    for part in ask(client, stream=True, **more):
        for choice in part.choices:
            deltas.append(choice.delta)
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                known = calls.setdefault(call.index, {"id": "", "name": "", "arguments": ""})
                known["id"] += call.id or ""
                known["name"] += call.function.name or ""
                known["arguments"] += call.function.arguments or ""
    return content, [calls[index] for index in sorted(calls)], reason, deltas


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"I add.\n{ONE}", "I add.", [("add", {"a": 1, "b": "é"})]),
        (ONE, None, [("add", {"a": 1, "b": "é"})]),
        (f"\n{ONE}\n{TWO}\n", None, [("add", {"a": 1, "b": "é"}), ("now", {})]),
        (f"one {TWO} two", "one  two", [("now", {})]),
        (f"<tool_call>oops</tool_call> {TWO}", "<tool_call>oops</tool_call>", [("now", {})]),
    ],
)
def test_calls_come_apart_from_the_text(client_of: Any, text: str, content: str | None, calls: Any) -> None:
    with client_of(lambda given: text) as client:
        (choice,) = ask(client).choices
        said, pieces, reason, _ = streamed(client)
    assert choice.message.content == content and choice.finish_reason == "tool_calls"
    assert calls_of(choice.message) == calls
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == len(ids) and all(id_.startswith("call_") for id_ in ids)
    assert {call.type for call in choice.message.tool_calls} == {"function"}
    assert (said, reason) == (content or "", "tool_calls")
    assert [(piece["name"], json.loads(piece["arguments"])) for piece in pieces] == calls


@pytest.mark.parametrize(
    "text",
    [
        "1+2=3 \n",
        '<tool_call>{"name": "add"',
        "<tool_call>oops</tool_call>\n",
        '<tool_call>{"name": 3}</tool_call>',
        "a < b, <tool> and </tool_call>",
    ],
)
def test_what_is_no_call_stays_text(client_of: Any, text: str) -> None:
    with client_of(lambda given: text) as client:
        (choice,) = ask(client).choices
        said, pieces, reason, _ = streamed(client)
    assert choice.message.content == said == text
    assert choice.message.tool_calls is None and not pieces
    assert choice.finish_reason == reason == "stop"


def test_a_stream_tells_text_at_once_and_never_half_a_tag(client_of: Any) -> None:
    with client_of(lambda given: f"a < b.\n{ONE}") as client:
        _, _, _, deltas = streamed(client)
    told = [delta.content for delta in deltas if delta.content]
    assert told == ["a", " <", " b", "."]  # as soon as it can be no tag, and no space before one
    assert deltas[0].role == "assistant" and all(delta.role is None for delta in deltas[1:])
    assert [len(delta.tool_calls or []) for delta in deltas].count(1) == 1


def test_an_answer_that_is_cut_off_says_so(client_of: Any) -> None:
    with client_of(lambda given: ONE + "and more") as client:
        length = len(byte_tokenizer(CALLING)(ONE)["input_ids"]) + 8
        (cut,) = ask(client, max_tokens=length).choices
        (half,) = ask(client, max_tokens=5).choices
    assert cut.finish_reason == "length" and len(cut.message.tool_calls) == 1
    assert half.finish_reason == "length" and half.message.content == ONE[:5]


def test_a_conversation_with_a_tool_goes_through_the_template(client_of: Any) -> None:
    given: list[str] = []

    def says(prompt: str) -> str:
        given.append(prompt)
        return "It is 3." if "<tool_response>" in prompt else ONE

    with client_of(says) as client:
        first = ask(client).choices[0].message
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "3"}
        last = ask(client, messages=[USER, first, result]).choices[0]
        dumped = ask(client, messages=[USER, first.model_dump(), result]).choices[0]
        _, (piece,), _, _ = streamed(client)
        function = {"name": piece["name"], "arguments": piece["arguments"]}
        told = {"role": "assistant", "tool_calls": [{"index": 0, "id": piece["id"], "function": function}]}
        collected = ask(client, messages=[USER, told, result]).choices[0]
    assert last.message.content == dumped.message.content == collected.message.content == "It is 3."
    assert last.finish_reason == "stop" and last.message.tool_calls is None
    assert '"name": "add"' in given[0] and "# Tools" in given[0]
    shown = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call><|im_end|>'
    assert shown in given[1] and "<tool_response>\n3\n</tool_response>" in given[1]
    assert given[1] == given[2] == given[4]


def test_none_means_no_tools(client_of: Any) -> None:
    given: list[str] = []

    def says(prompt: str) -> str:
        given.append(prompt)
        return ONE

    with client_of(says) as client:
        (choice,) = ask(client, tool_choice="none").choices
        (auto,) = ask(client, tool_choice="auto").choices
        plain = ask(client, tools=openai.NOT_GIVEN).choices[0]
    assert choice.message.content == plain.message.content == ONE and choice.finish_reason == "stop"
    assert auto.finish_reason == "tool_calls"
    assert "# Tools" not in given[0] and "# Tools" in given[1]


def special_tags() -> Any:
    tokenizer = byte_tokenizer(CALLING)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<tool_call>", "</tool_call>"]})
    return tokenizer


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(CALLING), special_tags()], ids=["as text", "as special tokens"])
def test_without_parallel_calls_the_first_one_ends_the_answer(client_of: Any, tokenizer: Any) -> None:
    with client_of(lambda given: f"a {ONE}{TWO}", tokenizer) as client:
        (one,) = ask(client, parallel_tool_calls=False).choices
        (both,) = ask(client, parallel_tool_calls=True).choices
        said, pieces, _, _ = streamed(client)
        (unread,) = ask(client, tools=openai.NOT_GIVEN).choices
    assert len(one.message.tool_calls) == 1 and len(both.message.tool_calls) == len(pieces) == 2
    assert one.finish_reason == both.finish_reason == "tool_calls"
    assert one.message.content == both.message.content == said == "a"
    assert one.token_ids == both.token_ids[: len(one.token_ids)] and len(one.token_ids) < len(both.token_ids)
    is_special = any(token.content == "<tool_call>" for token in tokenizer.added_tokens_decoder.values())
    assert ("<tool_call>" in unread.message.content) == (not is_special)  # as without tools: nothing is read


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice=.*required.* is not supported here"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice=.* is not supported here"),
        ({"tools": [{"type": "web_search"}]}, "tools: number 0: type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools: number 0: function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "add", "strict": True}}]},
            "tools: number 0: function.strict is not supported here",
        ),
        ({"functions": [{"name": "add"}]}, "functions=.* is not supported here"),
        ({"messages": [{"role": "user", "content": "1", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.id"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(client_of: Any, more: Any, message: str) -> None:
    body = {"model": "m", "messages": [USER], "tools": [ADD]} | more
    with client_of(lambda given: ONE) as client, pytest.raises(openai.BadRequestError, match=message):
        client.post("/chat/completions", body=body, cast_to=object)


def test_a_template_without_a_place_for_calls_is_not_left_to_drop_them(client_of: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    said = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "3"}]
    with (
        client_of(lambda given: ONE, byte_tokenizer(HERMES)) as client,
        pytest.raises(openai.BadRequestError, match="no place for tool_calls"),
    ):
        ask(client, messages=said)


PIECES = st.sampled_from([ONE, TWO, "<tool_call>", "</tool_call>", "<tool", "_call>", "{", " ", "\n", "a", "<", "</"])


@given(st.lists(PIECES, max_size=8).map("".join), st.integers(1, 7))
def test_however_a_text_is_cut_it_says_the_same(text: str, size: int) -> None:
    content, calls = CallParser().add(text, is_last=True)
    parser = CallParser()
    parts = [parser.add(text[at : at + size]) for at in range(0, len(text), size)]
    parts.append(parser.add("", is_last=True))
    assert "".join(part for part, _ in parts) == content
    functions = [call.function for _, some in parts for call in some]
    assert functions == [call.function for call in calls]
    found = [call for call in hermes(text) if isinstance(call, Call)]
    assert [(one.name, json.loads(one.arguments)) for one in functions] == [(c.name, c.arguments) for c in found]
    if not found:
        assert content == text
