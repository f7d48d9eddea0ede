from __future__ import annotations

import json
from typing import Any

import pytest

from practicum.reward.graders.code import RUN, harness_code
from practicum.reward.sandbox import Outcome, Sandbox


def call(source: str, *arguments: Any, fn_name: str = "f") -> Outcome:
    # The harness itself needs no isolation; here it runs code of ours.
    files = {"answer.py": source, "caller": harness_code("caller")}
    request = json.dumps({"fn_name": fn_name, "arguments": arguments}).encode()
    return Sandbox(trusted=True).run(files, ["-c", RUN.format(name="caller")], request)


@pytest.mark.parametrize(
    ("source", "arguments", "expected"),
    [
        ("def f(a, b): return a + b", (1, 2), 3),
        ("def f(a):\n    print('chatter')\n    return a[::-1]", ([1, "x"],), ["x", 1]),
        ("class Solution:\n    def f(self, a): return (a, None)", ({"k": 1},), [{"k": 1}, None]),
        ("def f(a): return {a}", (1,), [1]),
    ],
)
def test_writes_what_the_function_returns(source: str, arguments: tuple[Any, ...], expected: Any) -> None:
    assert call(source, *arguments).stdout == json.dumps(expected).encode()


def test_large_numbers_are_written_in_full() -> None:
    assert len(call("def f(n): return 10 ** n", 5000).stdout) == 5001


def test_a_function_that_is_not_there_fails() -> None:
    outcome = call("def g(): return 1")
    assert not outcome.succeeded and outcome.stdout == b""
