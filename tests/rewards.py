"""Reward functions as users write them, good and bad."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time

from practicum import Sample, Score


def share_of_even_digits(sample: Sample) -> float:
    digits = [c for c in sample.text if c.isdigit()]
    return sum(int(c) % 2 == 0 for c in digits) / max(1, len(sample.token_ids))


def length(sample: Sample) -> float:
    return len(sample.text)


def with_parts(sample: Sample) -> Score:
    return Score(1.0, parts={"length": len(sample.token_ids)})


async def patient(sample: Sample) -> float:
    await asyncio.sleep(0.05)
    return float(sample.text)


def in_bulk(samples: list[Sample]) -> list[float]:
    return [float(sample.text) for sample in samples]


def one_too_few(samples: list[Sample]) -> list[float]:
    return [1.0] * (len(samples) - 1)


def raises_on_one(sample: Sample) -> float:
    if sample.text == "1":
        raise KeyError("no such thing")
    return 1.0


def hangs_on_one(sample: Sample) -> float:
    if sample.text == "1":
        time.sleep(60)
    return 1.0


def exits_on_one(sample: Sample) -> float:
    if sample.text == "1":
        sys.exit(3)
    return 1.0


def not_a_number(sample: Sample) -> float:
    return float("nan")


def returns_text(sample: Sample) -> str:
    return "good"


def always_raises(sample: Sample) -> float:
    raise RuntimeError("the grader is on strike")


def takes_two(sample: Sample, truth: str) -> float:
    return 0.0


def takes_none() -> float:
    return 0.0


async def blocks_the_loop(sample: Sample) -> float:
    if sample.text == "1":
        time.sleep(20)
    return 1.0


async def will_not_be_cancelled(sample: Sample) -> float:
    if sample.text == "1":
        for _ in range(20):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1)
    return 1.0


async def exits_async(sample: Sample) -> float:
    if sample.text == "1":
        sys.exit(3)
    return 1.0


async def times_out_itself(sample: Sample) -> float:
    if sample.text == "1":
        raise TimeoutError("the judge did not answer")
    return 1.0


def always_hangs(sample: Sample) -> float:
    time.sleep(60)
    return 1.0
