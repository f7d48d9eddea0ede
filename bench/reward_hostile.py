"""Ours among answers that hang, raise, exit, crash or allocate without end: a step opens a centre and ends it.

The statuses of all samples, the seconds, what they may be by arithmetic, and what is left of our processes.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import psutil

from bench.contestant import Line, step
from bench.reward_functions import MISDEEDS
from bench.reward_items import Item, hostile_items
from bench.reward_ours import FUNCTIONS, groups_of, make_sample, scores_of
from bench.reward_work import NUM_WORKERS
from practicum.config import RewardConfig
from practicum.controller import open_controller
from practicum.controller.loop import run_sync
from practicum.reward import open_reward_centre
from practicum.types import Score

TIMEOUT_S = 2.0
NUM_PROCESSES = 8
GONE_WITHIN_S = 20.0
MARK = "BENCH_REWARD_MARK"
CONFIG = {
    "function": f"{FUNCTIONS}:hostile",
    "timeout_s": TIMEOUT_S,
    "memory_mb": 256,
    "processes": NUM_PROCESSES,
    "max_failure_share": 0.5,
}
HANG, OTHERS = "hang", tuple(kind for kind in MISDEEDS if kind != "hang")


def allowed_s(num_hanging: int, rest_s: float) -> float:
    """However the samples are shared out: all hanging ones at one worker, and one of them begun last.

    `rest_s` is what the batch takes without them.
    """
    return num_hanging * TIMEOUT_S / (NUM_PROCESSES / NUM_WORKERS) + TIMEOUT_S + rest_s


def wrong_ones(items: Sequence[Item], scores: Sequence[Score]) -> list[tuple[Item, Score]]:
    """Samples without the status and the value that they deserve."""
    wanted = {HANG: "timeout", **dict.fromkeys(OTHERS, "invalid")}
    pairs = zip(items, scores, strict=True)
    return [(i, s) for i, s in pairs if (s.status, s.value) != (wanted.get(i.text, "ok"), i.value)]


def kinds_of(wrong: Sequence[tuple[Item, Score]]) -> Counter[str]:
    """For the result file: what was taken for what."""
    return Counter(f"{item.text if item.value is None else 'fine'} taken for {score.status}" for item, score in wrong)


def num_left(mark: str) -> int:
    """Processes that carry our mark in their environment, apart from this one, once they have had time to end."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return len(left)


def _marked(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        # Those of other users cannot be ours.
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process.pid)
    return found


def take_step(num_samples: int) -> dict[str, float]:
    mark = os.environ[MARK] = uuid.uuid4().hex
    items = hostile_items(num_samples)
    groups = groups_of([make_sample(item, [1]) for item in items])

    async def grade() -> tuple[float, float]:
        async with open_reward_centre(RewardConfig(**CONFIG), controller) as manager:  # type: ignore[arg-type]
            rest = [make_sample(item, [1]) for item in hostile_items(num_samples) if item.text != HANG]
            rest_s = (await manager.grade(groups_of(rest))).seconds
            took_s = (await manager.grade(groups)).seconds
            marked.extend(_marked(mark))
            return rest_s, took_s

    marked: list[int] = []
    with open_controller("ray", num_workers=NUM_WORKERS, use_gpu=False, max_colocate_count=1) as controller:
        rest_s, took_s = run_sync(grade())
    # Else no process that is left would be seen either.
    if len(marked) < NUM_PROCESSES:
        raise RuntimeError(f"only {len(marked)} processes carry the mark that all of ours inherit")
    wrong = wrong_ones(items, scores_of(groups))
    num_hanging = sum(item.text == HANG for item in items)
    return {
        "took_s": took_s,
        "allowed_s": allowed_s(num_hanging, rest_s),
        "wrong": len(wrong),
        "wrong_raise": sum(item.value is not None or item.text == "raise" for item, _ in wrong),
        "left": num_left(mark),
        **kinds_of(wrong),
    }


def main() -> None:
    line = Line()
    num_samples = int(json.loads(sys.argv[1]))
    line.ready(["practicum", "ray"])
    while num_steps := line.wait_for_go():
        steps = []
        for _ in range(num_steps):
            parts = take_step(num_samples)
            steps.append(step(parts["took_s"], num_samples, **parts))
        line.answer(steps)


if __name__ == "__main__":
    main()
