"""The reward functions of the `reward` benchmark: both sides load this file and call the same ones.

Their signature is verl's, which ours takes too. verl gets one function for all cases, which goes by the data source as
verl's own default does; ours is given each by its name. Standard library only, and math-verify where it is asked for.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

SLEEP_S = 0.05
RULE, MATH, MATH_IN_THREAD, ASYNC, SYNC, RAISE = "rule", "math", "math in thread", "async", "sync", "raise"


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    """For verl's `naive` manager."""
    return _BY_SOURCE[data_source](solution_str, ground_truth)


async def compute_score_async(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    """For verl's `rate_limited` manager."""
    if data_source == RAISE:
        return misbehave_or_grade(solution_str, ground_truth)
    return await sleep_async(data_source, solution_str, ground_truth, extra_info)


def sleep_sync(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    time.sleep(SLEEP_S)
    return exact(solution_str, ground_truth)


async def sleep_async(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    await asyncio.sleep(SLEEP_S)
    return exact(solution_str, ground_truth)


def hostile(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    return misbehave_or_grade(solution_str, ground_truth)


def exact(answer: str, truth: str) -> float:
    return float(answer.strip() == truth)


def misbehave_or_grade(answer: str, truth: str) -> float:
    """Does what the answer says, if that is one of the ways to go wrong."""
    if answer in MISDEEDS:
        MISDEEDS[answer]()
    return exact(answer, truth)


def _hang() -> None:
    while True:
        time.sleep(3600)


def _raise() -> None:
    raise ValueError("this answer cannot be graded")


def _grow() -> None:
    blocks = []
    while True:
        blocks.append(bytearray(1 << 24))


MISDEEDS: dict[str, Callable[[], Any]] = {
    "hang": _hang,
    "raise": _raise,
    "exit": lambda: os._exit(1),
    "crash": lambda: ctypes.string_at(0),
    "grow": _grow,
}


def math_in_thread(answer: str, truth: str) -> float:
    """math-verify itself. Its time limits are alarm signals, which threads cannot have."""
    from math_verify import parse, verify  # type: ignore[import-untyped]

    expected = parse(rf"\boxed{{{truth}}}", parsing_timeout=None)
    return float(verify(expected, parse(answer, parsing_timeout=None), timeout_seconds=None))


_BY_SOURCE: dict[str, Callable[[str, str], float]] = {
    RULE: exact,
    MATH_IN_THREAD: math_in_thread,
    SYNC: lambda answer, truth: sleep_sync(SYNC, answer, truth, None),
    RAISE: misbehave_or_grade,
}
