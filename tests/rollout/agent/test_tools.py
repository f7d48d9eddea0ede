from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from practicum.config import AgentConfig
from practicum.errors import RolloutError
from practicum.rollout.agent.interaction import InteractionFailed
from practicum.rollout.agent.tools import (
    CALL_FORMATS,
    BadCall,
    Call,
    Tool,
    ToolReply,
    Tools,
    as_text,
    describe_tools,
    hermes,
    plain,
)
from practicum.types import Prompt
from tests.rollout.agents import HERE


def search(
    query: str,
    limit: int = 5,
    kind: Literal["web", "news"] = "web",
    json: list[float] | None = None,
    where: Annotated[str, Field(description="a country")] = "",
) -> str:
    """Look something up.

    Takes a while.

    Args:
        query: what to look for,
            in words
        limit (int): how many
        json: named like a method of pydantic's

    Returns:
        what was found
    """
    return f"{query} {limit} {kind} {json} {where}"


def test_type_hints_and_docstring_become_a_schema() -> None:
    described = Tool(search).description
    assert (described.name, described.description) == ("search", "Look something up.\n\nTakes a while.")
    assert described.schema["function"]["parameters"] == {
        "type": "object",
        "required": ["query"],
        "properties": {
            "query": {"type": "string", "description": "what to look for, in words"},
            "limit": {"type": "integer", "default": 5, "description": "how many"},
            "kind": {"type": "string", "enum": ["web", "news"], "default": "web"},
            "json": {
                "anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "null"}],
                "default": None,
                "description": "named like a method of pydantic's",
            },
            "where": {"type": "string", "default": "", "description": "a country"},
        },
    }


def test_sphinx_docstrings_and_none_at_all() -> None:
    def noted(x: int, y: dict[str, int]) -> None:
        """Notes.

        :param x: the first
        :param int y: the second
        """

    def bare() -> None: ...

    parameters = Tool(noted).description.parameters["properties"]
    assert (parameters["x"]["description"], parameters["y"]["description"]) == ("the first", "the second")
    assert parameters["y"]["additionalProperties"] == {"type": "integer"}
    assert Tool(noted).description.description == "Notes."
    assert Tool(bare).description.parameters == {"type": "object", "properties": {}}


def test_arguments_are_checked_and_made_what_the_function_wants() -> None:
    tool = Tool(search)
    assert tool.call(tool.bind({"query": "a", "limit": "3"})) == "a 3 web None "
    assert tool.call(tool.bind(("a", "3", "news"))) == "a 3 news None "
    for arguments, complaint in [
        ({}, "query: Field required"),
        ({"query": "a", "limit": "many"}, "limit: Input should be a valid integer"),
        ({"query": "a", "kind": "old"}, "kind: Input should be 'web' or 'news'"),
        ({"query": "a", "lmit": 1}, "lmit: Extra inputs are not permitted"),
        (("a",) * 6, "takes 5 arguments (query, limit, kind, json, where), not 6"),
    ]:
        with pytest.raises(ValueError) as caught:
            tool.bind(arguments)  # type: ignore[arg-type]
        assert complaint in str(caught.value)


def no_hint(a) -> None: ...  # type: ignore[no-untyped-def]
def any_number(*a: int) -> None: ...
def by_place(a: int, /) -> None: ...
def no_schema(a: asyncio.Task[None]) -> None: ...


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (no_hint, "no_hint needs a type hint for its parameter 'a'"),
        (any_number, "named parameters only"),
        (by_place, "named parameters only"),
        (no_schema, "cannot become a schema"),
    ],
)
def test_functions_that_cannot_be_tools_are_refused_by_name(function: Callable[..., Any], complaint: str) -> None:
    with pytest.raises(RolloutError, match=complaint):
        Tool(function)


def test_results_as_text() -> None:
    @dataclasses.dataclass
    class Found:
        name: str
        at: Path

    assert as_text("as it is") == "as it is"
    assert as_text({"a": [1, 2.5, None]}) == '{"a":[1,2.5,null]}'
    assert as_text(Found("x", Path("/y"))) == '{"name":"x","at":"/y"}'
    assert as_text(float("nan")) == "NaN"
    assert as_text(object()).startswith('"<object')


def replies_to(names: list[str], calls: list[Call | BadCall], timeout_s: float = 0.5) -> list[ToolReply]:
    async def run() -> list[ToolReply]:
        tools = Tools([f"{HERE}:{name}" for name in names], timeout_s, num_processes=2)
        await tools.start()
        try:
            return await asyncio.gather(*map(tools.call, calls))
        finally:
            await tools.close()

    return asyncio.run(run())


def test_every_call_has_a_reply_whatever_the_tool_does() -> None:
    names = ["add", "patient", "hang", "fail", "crash", "refuse", "refuse_later"]
    replies = replies_to(
        names,
        [
            Call("add", {"a": 1, "b": 2}),
            Call("patient", {"seconds": 0.01}),
            Call("patient", {"seconds": 60}),
            Call("hang", {}),
            Call("fail", {"text": "oh"}),
            Call("crash", {}),
            Call("add", {"a": "x"}),
            Call("sub", {}),
            Call(None, {}),
            BadCall("not valid JSON"),
            Call("refuse", {"text": "Atlantis"}),
            Call("refuse_later", {"text": "Atlantis"}),
            Call("refuse", {"text": "\ud800"}),
            Call("refuse", {"text": nested(600)}),
        ],
    )
    assert [reply.status for reply in replies] == [
        *("ok", "ok", "timeout", "timeout", "infra_error", "infra_error", "malformed", "unknown", "unknown"),
        *("malformed", "refused", "refused", "refused", "malformed"),
    ]
    assert [reply.text for reply in replies[:2]] == ["3", "waited"]
    assert all(reply.text.startswith("error: ") for reply in replies[6:])  # which the model reads
    assert all(reply.text.startswith(f"rollout.agent.tools={HERE}:{reply.name}: ") for reply in replies[2:6])
    assert "raised KeyError: 'oh'" in replies[4].text and "raise that for a mistake of the model" in replies[4].text
    assert "there is no tool 'sub'; there are: add, patient, hang, fail, crash" in replies[7].text
    assert replies[10].text == "error: refuse: no such place: Atlantis"
    assert all(reply.text.encode() for reply in replies)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def test_a_tool_that_fails_ends_the_conversation_and_a_mistake_of_the_model_does_not() -> None:
    async def run() -> dict[str, int]:
        tools = Tools([f"{HERE}:refuse", f"{HERE}:fail"], 5.0)
        await tools.start()
        try:
            interaction = tools.interaction()
            call = '<tool_call>{"name": "%s", "arguments": {"text": "x"}}</tool_call>'
            said = await interaction.reply("", call % "refuse" + call % "sub", is_last=False)
            assert said is not None and [message["content"][:6] for message in said] == ["error:"] * 2
            with pytest.raises(InteractionFailed, match="fail raised KeyError: 'x'") as caught:
                await interaction.reply("", call % "refuse" + call % "fail", is_last=False)
            assert caught.value.status == "infra_error"
            return dict(interaction.counts)
        finally:
            await tools.close()

    assert asyncio.run(run()) == {"refused": 2, "unknown": 1, "infra_error": 1}


def test_text_that_no_tokenizer_takes_is_mended() -> None:
    assert as_text("a\ud800b") == "a?b"


def test_a_call_without_a_name_means_the_only_tool() -> None:
    replies = replies_to(["add"], [Call(None, ("1", "2")), Call(None, ())])
    assert replies[0] == ToolReply("add", "3") and replies[1].status == "malformed"


def test_async_tools_run_side_by_side_and_nothing_is_left_behind() -> None:
    replies = replies_to(["meet"], [Call("meet", {"num": 50})] * 50, timeout_s=30.0)
    assert [reply.text for reply in replies] == ["50"] * 50
    assert not any(map(is_alive, {int(reply.text) for reply in replies_to(["pid"], [Call("pid", {})] * 6)}))
    shared = replies_to(["patient_pid"], [Call("patient_pid", {})] * 6)
    assert len({reply.text for reply in shared}) == 1 and not is_alive(int(shared[0].text))


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"


@pytest.mark.parametrize(
    ("call_format", "call"),
    [("plain", "[1, 2]"), ("hermes", '<tool_call>{"name":"add","arguments":{"a":3}}</tool_call>')],
)
def test_tools_answer_calls_and_nothing_else(call_format: str, call: str) -> None:
    async def run() -> tuple[list[Any], Any, dict[str, int]]:
        tools = Tools((f"{HERE}:add",), 5.0, call_format)
        await tools.start()
        try:
            interaction = tools.interaction()
            found: list[Any] = [await interaction.begin(Prompt("p", text="?"))]
            for text, is_last in ((call, False), ("three", False), (call, True)):
                found.append(await interaction.reply(text, f"{text}<end>", is_last=is_last))
            return found, interaction.outcome, dict(interaction.counts)
        finally:
            await tools.close()

    found, outcome, counts = asyncio.run(run())
    assert found == [None, [{"role": "tool", "name": "add", "content": "3"}], None, []]
    assert outcome is None
    assert counts == {"ok": 1}  # after the last turn nothing is called: nobody would read the result


def test_tools_and_an_environment_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="set tools or environment, not both"):
        AgentConfig(tools=("a.py:f",), environment="a.py:E")


def test_tools_that_cannot_start_leave_no_process_behind() -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(RolloutError, match=r"^rollout.agent.tools: the tools cannot be used: .*does not exist"):
        describe_tools(["nowhere.py:f"])
    assert not [one for one in psutil.Process(os.getpid()).children(recursive=True) if one not in before]


def test_tools_are_described_without_importing_their_file_here(tmp_path: Path) -> None:
    (tmp_path / "marked.py").write_text("import sys; sys.modules['was_here'] = sys\ndef f(a: int): 'Fff.'")
    (described,) = describe_tools([f"{tmp_path}/marked.py:f"])
    assert (described.name, described.description, described.is_async) == ("f", "Fff.", False)
    assert "was_here" not in sys.modules


@pytest.mark.parametrize(
    ("specs", "complaint"),
    [
        (["nowhere.py:f"], "file nowhere.py does not exist"),
        ([f"{HERE}:add", f"{HERE}:add"], "two tools are called 'add'"),
        (["builtins:max"], "does not say what it takes"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(specs: list[str], complaint: str) -> None:
    with pytest.raises(RolloutError, match=complaint):
        describe_tools(specs)


def test_the_processes_of_tools_need_no_torch(tmp_path: Path) -> None:
    (tmp_path / "heavy.py").write_text("import sys\ndef heavy() -> bool: return 'torch' in sys.modules")

    async def run() -> ToolReply:
        tools = Tools([f"{tmp_path}/heavy.py:heavy"], 5.0, num_processes=1)
        await tools.start()
        try:
            return await tools.call(Call("heavy", {}))
        finally:
            await tools.close()

    assert asyncio.run(run()).text == "false"


def test_hermes_calls_are_found_among_other_words() -> None:
    text = (
        'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call> and '
        '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>'
    )
    assert hermes(text) == [Call("add", {"a": 1, "b": [2]}), Call("now", {}), Call("f", {"x": 1})]
    assert hermes("no call, though [1] looks like one") == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call>{oops}</tool_call>", "not valid JSON"),
        ("<tool_call>[1]</tool_call>", 'an object with "name"'),
        ('<tool_call>{"name": 3}</tool_call>', 'an object with "name"'),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', '"arguments" is not an object'),
        ('<tool_call>{"name": "f", "arguments": "{"}</tool_call>', "arguments are not valid JSON"),
        ('<tool_call>{"name": "f"}', "not closed"),
        ('<tool_call>{"name": "f", "arguments": {"\\ud800": 1}}</tool_call>', "not valid JSON"),
        (
            '<tool_call>{"name": "f", "arguments": "{\\"x\\": \\"\\\\ud800\\"}"}</tool_call>',
            "arguments are not valid JSON",
        ),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
    ],
)
def test_what_is_no_call_says_why(text: str, reason: str) -> None:
    (found,) = hermes(text)
    assert isinstance(found, BadCall) and reason in found.reason


def test_plain_calls() -> None:
    assert plain("[12*34]") == [Call(None, ("12*34",))]
    assert plain("so [add: 1, 2] and [ now: ][]") == [Call("add", ("1", "2")), Call("now", ()), Call(None, ())]
    assert plain("[12 no end") == plain("nothing") == []


@given(st.text(alphabet='<tool_call>/{}":[]name, \n', max_size=80))
def test_no_text_is_too_odd(text: str) -> None:
    for parse in CALL_FORMATS.values():
        assert all(isinstance(found, Call | BadCall) for found in parse(text))
