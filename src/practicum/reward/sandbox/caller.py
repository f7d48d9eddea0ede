"""Runs inside a box: calls one function of the answer with JSON arguments and writes the JSON of what it returns.

The expected value is not here; it is compared outside. Standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import types


def main() -> None:
    sys.set_int_max_str_digits(0)
    request = json.loads(sys.stdin.buffer.read())
    result_fd = os.dup(1)
    os.dup2(2, 1)  # what the answer prints is not its result
    module = sys.modules["solution"] = types.ModuleType("solution")  # where dataclasses look for it
    namespace = module.__dict__
    with open("answer.py", encoding="utf-8") as file:
        exec(compile(file.read(), "solution.py", "exec"), namespace)
    name = request["fn_name"]
    function = namespace[name] if name in namespace else getattr(namespace["Solution"](), name)
    result = json.dumps(function(*request["arguments"]), default=list).encode()
    while result:
        result = result[os.write(result_fd, result) :]
