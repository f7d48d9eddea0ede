"""The work all sides of the `reward` benchmark do, and how each of them times it.

    take_steps(pack) ──▶ per step and case:  new samples in the side's own form   not timed
                                             graded a few times                   median seconds, CPU seconds of all
                                             each score compared with the one that the answer deserves

Samples are new in every step: SymPy remembers much of what it was asked, and the same answers would cost less and less.

All sides import this in environments of their own; it needs NumPy and psutil.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import psutil

from bench.contestant import Line, step
from bench.controller_work import RAY_SETTINGS
from bench.reward_functions import ASYNC, MATH, MATH_IN_THREAD, RAISE, RULE, SYNC
from bench.reward_items import Item, hostile_items, math_items, rule_items

NUM_WORKERS = 2
CONCURRENCY = 256
NUM_PROCESSES = 32
SECONDS, CPU, LOST = "seconds", "cpu_s", "lost"

# For everyone alike. What a worker started ends with it, as when our controller starts Ray.
SETTINGS = {
    **RAY_SETTINGS,
    "RAY_process_group_cleanup_enabled": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}

MAKERS: Mapping[str, Callable[[int, int], list[Item]]] = {
    RULE: rule_items,
    MATH: math_items,
    MATH_IN_THREAD: math_items,
    ASYNC: rule_items,
    SYNC: rule_items,
    RAISE: lambda num, seed: hostile_items(num, ["raise"], seed),
}


@dataclass(frozen=True, slots=True)
class Load:
    """How much of one case a step does."""

    num_samples: int
    num_calls: int = 1


@dataclass(frozen=True, slots=True)
class Job:
    """What a side is given to do. `tokenizer` is a folder; `manager` is for sides that have several."""

    tokenizer: str
    loads: Mapping[str, Load]
    manager: str = ""

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Job:
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "loads": {case: Load(**load) for case, load in fields["loads"].items()}})


class Batch(Protocol):
    """Samples of one case in a side's own form."""

    def grade(self) -> Any:
        """What is timed."""

    def values(self, graded: Any) -> Sequence[float | None]:
        """The scores in the order of the samples, from what `grade` returned; None for a stated failure."""


def take_steps(line: Line, job: Job, packages: Iterable[str], pack: Callable[[str, list[Item]], Batch]) -> None:
    """A contestant's whole life, once its workers are up."""
    line.ready(packages)
    seed = 0
    while num_steps := line.wait_for_go():
        steps = []
        for _ in range(num_steps):
            began, parts = time.perf_counter(), {}
            for case, load in job.loads.items():
                items = MAKERS[case](load.num_samples, seed)
                batch = pack(case, items)
                measured = {LOST: num_lost(items, batch)} if case == RAISE else timed(items, batch, load.num_calls)
                parts.update({part_of(case, what): value for what, value in measured.items()})
            steps.append(step(time.perf_counter() - began, 1, **parts))
            seed += 1
        line.answer(steps)


def part_of(case: str, what: str) -> str:
    return f"{case}: {what}"


def timed(items: Sequence[Item], batch: Batch, num_calls: int) -> dict[str, float]:
    """Median seconds and mean CPU seconds of a call. Scores that an answer does not deserve are an error."""
    seconds = []
    graded = None
    cpu_before = cpu_s()
    for _ in range(num_calls):
        began = time.perf_counter()
        graded = batch.grade()
        seconds.append(time.perf_counter() - began)
    used_s = cpu_s() - cpu_before
    wrong = [item for item, value in zip(items, batch.values(graded), strict=True) if value != item.value]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(items)} scores are wrong; the first is that of {wrong[0]}")
    return {SECONDS: statistics.median(seconds), CPU: used_s / num_calls}


def num_lost(items: Sequence[Item], batch: Batch) -> int:
    """Samples that end with neither the score they deserve nor a stated failure: all, if grading them raises."""
    try:
        values = batch.values(batch.grade())
    except Exception as error:
        print(f"grading a batch with answers that raise failed: {type(error).__name__}")
        return len(items)
    return sum(value != item.value for item, value in zip(items, values, strict=True))


def cpu_s() -> float:
    """CPU seconds of this process and all below it so far, Ray's included; children that ended count with parents."""
    total = 0.0
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])
    return total
