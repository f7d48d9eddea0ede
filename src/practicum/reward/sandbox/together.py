"""Runs inside a box: the answer and one test of it in the same process, as test code is usually run.

What proves success is a word that is only written after the test has run. An answer that looks for it in memory can
find it: see the option `tests` of the code grader. Standard library only.
"""

from __future__ import annotations

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
    exec(compile(request["test"], "test.py", "exec"), namespace)
    for name, function in list(namespace.items()):
        if name.startswith("test_") and isinstance(function, types.FunctionType):
            function()
    os.write(result_fd, request["proof"].encode())
