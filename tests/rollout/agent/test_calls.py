from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.rollout.agent.calls import CALL_FORMATS, BadCall, Call, hermes, plain


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
