"""Reward functions as users write them, good and bad."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import functools
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from practicum import Sample, Score


def share_of_even_digits(sample: Sample) -> float:
    digits = [c for c in sample.text if c.isdigit()]
    return sum(int(c) % 2 == 0 for c in digits) / max(1, len(sample.token_ids))


def length(sample: Sample) -> float:
    return len(sample.text)


def odd_prompts_are_all_right(sample: Sample) -> float:
    return 1.0 if int(str(sample.prompt.answer)) % 2 else share_of_even_digits(sample)


def with_parts(sample: Sample) -> Score:
    return Score(1.0, parts={"length": len(sample.token_ids)})


async def patient(sample: Sample) -> float:
    await asyncio.sleep(0.05)
    return float(sample.text)


num_met = 0


async def meets(sample: Sample) -> float:
    """Ends when as many calls are under way as the answer says."""
    global num_met
    num_met += 1
    while num_met < int(sample.text):
        await asyncio.sleep(0.01)
    return float(num_met)


def in_bulk(samples: list[Sample]) -> list[float]:
    return [float(sample.text) for sample in samples]


def one_too_few(samples: list[Sample]) -> list[float]:
    return [1.0] * (len(samples) - 1)


def one_for_all(samples: list[Sample]) -> list[float]:
    return [1.0]


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
        time.sleep(60)
    return 1.0


async def will_not_be_cancelled(sample: Sample) -> float:
    if sample.text == "1":
        for _ in range(60):
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


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    """As written for verl."""
    assert isinstance(extra_info, dict)
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth, "pred": solution_str}


async def compute_score_async(data_source: str, solution_str: str, ground_truth: Any, **others: Any) -> float:
    return float(solution_str == ground_truth)


def compute_score_of_less(solution_str: str, ground_truth: Any) -> float:
    return float(solution_str == ground_truth)


def compute_score_of_more(solution_str: str, ground_truth: Any, rubric: str) -> float:
    return 0.0


async def in_bulk_async(samples: Sequence[Sample]) -> list[float]:
    await asyncio.sleep(0.01)
    return [float(len(samples))] * len(samples)


def how_many_at_once(samples: list[Sample]) -> list[float]:
    return [float(len(samples))] * len(samples)


def raises_on_one_of_many(samples: list[Sample]) -> list[float]:
    return [raises_on_one(sample) for sample in samples]


def hangs_on_one_of_many(samples: list[Sample]) -> list[float]:
    return [hangs_on_one(sample) for sample in samples]


def one_bad_value(samples: list[Sample]) -> list[Any]:
    return ["good" if sample.text == "1" else 1.0 for sample in samples]


def gives_up(sample: Sample) -> Score:
    return Score.failed("invalid", "no answer found")


def parts_that_are_no_numbers(sample: Sample) -> Score:
    return Score(1.0, parts={"verdict": "good"})  # type: ignore[dict-item]


class Grader:
    """An object that is called like a function."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, sample: Sample) -> float:
        return self.value


class AsyncGrader:
    async def __call__(self, sample: Sample) -> float:
        await asyncio.sleep(0)
        return 4.0


an_object = Grader(3.0)
an_async_object = AsyncGrader()
a_partial = functools.partial(Grader.__call__, an_object)


def misbehaves(sample: Sample) -> float:
    """As the answer says."""
    match sample.text:
        case "hang":
            time.sleep(60)
        case "raise":
            raise KeyError("no such thing")
        case "exit":
            os._exit(3)
        case "segfault":
            ctypes.string_at(0)
        case "allocate":
            hoard = []
            while True:
                hoard.append(bytearray(16 << 20))
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def records_overlap(sample: Sample) -> float:
    """Into the file that the prompt names: how many were at it at a time."""
    with overlap_recorded(sample.prompt.metadata["file"]):
        time.sleep(0.02)
    return 1.0


async def records_overlap_async(sample: Sample) -> float:
    with overlap_recorded(sample.prompt.metadata["file"]):
        await asyncio.sleep(0.02)
    return 1.0


@contextlib.contextmanager
def overlap_recorded(file: str) -> Any:
    note(file, +1)
    try:
        yield
    finally:
        note(file, -1)


def note(file: str, change: int) -> None:
    """One line a change; the file's lock makes their order the true one."""
    with open(file, "a") as lines:
        fcntl.flock(lines, fcntl.LOCK_EX)
        lines.write(f"{change}\n")


def most_at_a_time(file: Path) -> int:
    most = now = 0
    for line in file.read_text().split():
        now += int(line)
        most = max(most, now)
    assert now == 0
    return most


def hangs_the_first_time(sample: Sample) -> float:
    file = Path(sample.prompt.metadata["file"])
    with contextlib.suppress(FileExistsError):
        file.touch(exist_ok=False)
        time.sleep(60)
    return 1.0


def kills_its_worker_the_first_time(sample: Sample) -> float:
    """Not its own process but the reward worker, as a machine that runs out of memory might."""
    if sample.text == "1":
        with contextlib.suppress(FileExistsError):
            Path(sample.prompt.metadata["file"]).touch(exist_ok=False)
            os.kill(worker_pid(), signal.SIGKILL)
            time.sleep(60)
    return float(sample.text)


def worker_pid() -> int:
    import psutil

    server = psutil.Process().parent()
    assert server is not None
    return server.ppid()


def naps(sample: Sample) -> float:
    time.sleep(float(sample.text))
    return 1.0


async def async_naps(sample: Sample) -> float:
    await asyncio.sleep(float(sample.text))
    return 1.0


def counts_calls_and_naps(sample: Sample) -> float:
    note(sample.prompt.metadata["file"], 0)
    time.sleep(float(sample.text))
    return 1.0


def counts_calls(sample: Sample) -> float:
    note(sample.prompt.metadata["file"], 0)
    return float(len(sample.text))
