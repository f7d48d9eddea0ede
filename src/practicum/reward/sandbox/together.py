"""Runs inside a box: the answer and one test of it in the same process, as test code is usually run.

What proves success is a word that is only written after the test has run. An answer that looks for it in memory can
find it: see the option `tests` of the code grader. Standard library only.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import types


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    result_fd = os.dup(1)
    os.dup2(2, 1)  # what the answer prints proves nothing
    module = sys.modules["solution"] = types.ModuleType("solution")  # where dataclasses look for it
    namespace = module.__dict__
    with open("answer.py", encoding="utf-8") as file:
        exec(compile(file.read(), "solution.py", "exec"), namespace)
    asserted: list[None] = []
    namespace["__asserted__"] = asserted
    tree = Count().visit(ast.parse(request["test"]))
    exec(compile(ast.fix_missing_locations(tree), "test.py", "exec"), namespace)
    for name, function in list(namespace.items()):
        if name.startswith("test_") and isinstance(function, types.FunctionType):
            function()
    if asserted or not any(map(must_be_reached, ast.walk(tree))):
        os.write(result_fd, request["proof"].encode())


def must_be_reached(node: ast.AST) -> bool:
    """Return whether it is an assert, other than `assert False` where something should have been raised."""
    return isinstance(node, ast.Assert) and not (isinstance(node.test, ast.Constant) and not node.test.value)


class Count(ast.NodeTransformer):
    """Notes that an assert was reached: a test that asserts nothing proves nothing."""

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        note = ast.parse("__asserted__.append(None)").body[0]
        return [ast.copy_location(note, node), node]
