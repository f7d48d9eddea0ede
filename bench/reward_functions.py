"""The reward functions of the `reward` benchmark: both sides load this file and call the same ones.

Their signature is verl's, which ours takes too. verl gets one function for all cases, which goes by the data source;
ours is given each by its name. Standard library only, and math-verify where it is asked for.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

SLEEP_S = 0.05
RULE, MATH, ASYNC, SYNC, RAISE = "rule", "math", "async", "sync", "raise"
HOSTILE, REPLICAS = "hostile", "replicas"  # of ours alone
AT_A_TIME = {ASYNC: 256, SYNC: 32}  # calls of a function that sleeps


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    """For verl's `naive` manager."""
    return _BY_SOURCE[data_source](data_source, solution_str, ground_truth, extra_info)


async def compute_score_async(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    """For verl's `rate_limited` manager."""
    if data_source == RAISE:
        return hostile(data_source, solution_str, ground_truth, extra_info)
    return await sleep_async(data_source, solution_str, ground_truth, extra_info)


def exact(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    return float(solution_str.strip() == ground_truth)


def sleep_sync(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    time.sleep(SLEEP_S)
    return exact(data_source, solution_str, ground_truth, extra_info)


async def sleep_async(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    await asyncio.sleep(SLEEP_S)
    return exact(data_source, solution_str, ground_truth, extra_info)


def math_in_thread(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    """math-verify itself. Its time limits are alarm signals, which threads cannot have."""
    from math_verify import parse, verify  # type: ignore[import-untyped]

    expected = parse(rf"\boxed{{{ground_truth}}}", parsing_timeout=None)
    return float(verify(expected, parse(solution_str, parsing_timeout=None), timeout_seconds=None))


def hostile(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    """Does what the answer says, if that is one of the ways to go wrong."""
    if solution_str in MISDEEDS:
        MISDEEDS[solution_str]()
    return exact(data_source, solution_str, ground_truth, extra_info)


def _raise() -> None:
    raise ValueError("this answer cannot be graded")


def _grow() -> None:
    blocks = []
    while True:
        blocks.append(bytearray(1 << 24))


MISDEEDS: dict[str, Callable[[], Any]] = {
    "hang": lambda: time.sleep(1e6),
    "raise": _raise,
    "exit": lambda: os._exit(1),
    "crash": lambda: ctypes.string_at(0),
    "grow": _grow,
}
_BY_SOURCE = {RULE: exact, MATH: math_in_thread, SYNC: sleep_sync, RAISE: hostile}
