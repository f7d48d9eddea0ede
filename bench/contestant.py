"""A contestant's side of the talk with turns.py. Standard library only: peers run it in environments of their own.

    driver ── {"go": 2} ──▶ contestant        starts with {"ready": {...versions}}
    driver ◀── {"steps": [{"seconds": 1.9, "amount": 4096, "parts": {...}}, ...]} ──

Contestants with several cases are told which: {"go": 2, "case": "mixed"}.

The end of standard input means: go home.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TextIO


class Line:
    """The line to the harness. Whatever libraries print goes to standard error, so that it cannot garble an answer."""

    def __init__(self) -> None:
        self._answers: TextIO = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def ready(self, packages: Iterable[str] = ()) -> None:
        """Say that the next `go` may come, and with which versions we run."""
        self._send({"ready": {package: _version(package) for package in packages}})

    def wait_for_go(self) -> int:
        """How many steps to take now; 0 when it is over."""
        return self.wait_for_case()[0]

    def wait_for_case(self) -> tuple[int, str]:
        """How many steps to take now, and of which case."""
        message = sys.stdin.readline()
        if not message:
            return 0, ""
        told = json.loads(message)
        return int(told["go"]), told.get("case", "")

    def answer(self, steps: list[dict[str, Any]]) -> None:
        self._send({"steps": steps})

    def _send(self, message: dict[str, Any]) -> None:
        self._answers.write(json.dumps(message) + "\n")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "as it stands here"  # not installed, but on the path


def step(seconds: float, amount: float, *, ended_cpu_s: float = 0.0, **parts: float) -> dict[str, Any]:
    """One step: how long it took, how much it got done, and the seconds of its parts where they are known.

    `ended_cpu_s` is for processes that ended during the step without a parent that keeps their CPU time, such as Ray's
    workers. The harness could not tell it from what others on the machine used.
    """
    return {"seconds": seconds, "amount": amount, "parts": parts, "ended_cpu_s": ended_cpu_s}
