"""A contestant's side of the conversation with turns.py. Standard library only: peers run it in their own environments.

    driver ── {"go": 2, "case": "mixed"} ──▶ contestant        starts with {"ready": {...versions}}
    driver ◀── {"steps": [{"seconds": 1.9, "amount": 4096, "parts": {...}}, ...]} ──

The case is for contestants that have several. The end of standard input ends a contestant.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Self


class Line:
    """The line to the harness. Whatever libraries print goes to standard error, so that it cannot garble an answer."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def serve(self, packages: Iterable[str], take_step: Callable[[str], dict[str, Any]]) -> None:
        """Be ready, and take steps of the cases that the harness names until it is over."""
        self.ready(packages)
        while True:
            num_steps, case = self.wait_for_go()
            if not num_steps:
                return
            self.answer([take_step(case) for _ in range(num_steps)])

    def ready(self, packages: Iterable[str] = ()) -> None:
        """Say that the next `go` may come, and with which versions we run."""
        self._send({"ready": {package: version_of(package) for package in packages}})

    def wait_for_go(self) -> tuple[int, str]:
        """Return how many steps to take now, 0 when it is over, and of which case."""
        message = sys.stdin.readline()
        if not message:
            return 0, ""
        go = json.loads(message)
        return int(go["go"]), go.get("case", "")

    def answer(self, steps: list[dict[str, Any]]) -> None:
        self._send({"steps": steps})

    def _send(self, message: dict[str, Any]) -> None:
        self._answers.write(json.dumps(message) + "\n")


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"  # ours may still be on the path


def step(seconds: float, amount: float, *, ended_cpu_s: float = 0.0, **parts: float) -> dict[str, Any]:
    """Describe one step: how long it took, how much it got done, and the seconds of its parts where they are known.
    `ended_cpu_s` is that of processes that ended meanwhile and whose parents do not keep it, such as Ray's workers."""
    return {"seconds": seconds, "amount": amount, "parts": parts, "ended_cpu_s": ended_cpu_s}


class Argument:
    """Base of the dataclasses that tell a contestant all it needs to know, as an argument of its program."""

    def dump(self) -> str:
        return json.dumps(asdict(self))  # type: ignore[call-overload]

    @classmethod
    def parse(cls, text: str) -> Self:
        return cls(**json.loads(text))
