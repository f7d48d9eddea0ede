"""Ours in the `reward` benchmark: a reward centre for each case, all on one pool of two workers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bench.contestant import Line
from bench.controller_work import start_ray
from bench.reward_functions import ASYNC, MATH, RULE, SYNC
from bench.reward_items import Item
from bench.reward_work import CONCURRENCY, NUM_PROCESSES, NUM_WORKERS, Job, take_steps
from practicum.config import RewardConfig
from practicum.controller import open_controller
from practicum.controller.loop import run_sync
from practicum.reward import RewardLoopManager, open_reward_centre
from practicum.types import Prompt, PromptGroup, Sample, SamplingParams, Score, Trajectory

FUNCTIONS = Path(__file__).with_name("reward_functions.py")
CONFIGS: dict[str, dict[str, Any]] = {
    RULE: {"grader": "exact"},
    MATH: {"grader": "math", "processes": NUM_WORKERS},
    ASYNC: {"function": f"{FUNCTIONS}:sleep_async", "limits": {"concurrency": CONCURRENCY}},
    SYNC: {"function": f"{FUNCTIONS}:sleep_sync", "processes": NUM_PROCESSES},
}


class OurBatch:
    def __init__(self, manager: RewardLoopManager, groups: Sequence[PromptGroup]) -> None:
        self._manager = manager
        self._groups = groups

    def grade(self) -> Sequence[PromptGroup]:
        run_sync(self._manager.grade(self._groups))
        return self._groups

    def values(self, groups: Sequence[PromptGroup]) -> list[float | None]:
        return [score.value for score in scores_of(groups)]


def groups_of(samples: Sequence[Sample]) -> list[PromptGroup]:
    """Make a group of each answer."""
    params = SamplingParams(max_new_tokens=1, num_answers=1)
    return [
        PromptGroup(str(i), sample.prompt, sample.prompt_ids, params, 0, [Trajectory(f"{i}/0", 0, [sample])])
        for i, sample in enumerate(samples)
    ]


def scores_of(groups: Sequence[PromptGroup]) -> list[Score]:
    scores = [trajectory.score for group in groups for trajectory in group.trajectories]
    return [score for score in scores if score is not None]


def make_sample(item: Item, token_ids: Sequence[int]) -> Sample:
    num = len(token_ids)
    return Sample(
        prompt=Prompt(str(item.prompt), text="?", answer=item.truth),
        prompt_ids=np.ones(32, np.int32),
        token_ids=np.asarray(token_ids, np.int32),
        log_probs=np.full(num, -1.0, np.float32),
        loss_mask=np.ones(num, np.bool_),
        versions=np.zeros(num, np.int32),
        text=item.text,
        finish_reason="stop",
    )


def main() -> None:
    line = Line()
    job = Job.parse(sys.argv[1])
    tokenizer = Tokenizer.from_file(str(Path(job.tokenizer) / "tokenizer.json"))
    start_ray()
    with ExitStack() as stack:
        controller = stack.enter_context(
            open_controller("ray", num_workers=NUM_WORKERS, use_gpu=False, max_colocate_count=len(CONFIGS))
        )

        centres = AsyncExitStack()
        stack.callback(lambda: run_sync(centres.aclose()))
        managers = {
            case: run_sync(centres.enter_async_context(open_reward_centre(RewardConfig(**CONFIGS[case]), controller)))
            for case in job.loads
        }

        def pack(case: str, items: list[Item]) -> OurBatch:
            encoded = tokenizer.encode_batch([item.text for item in items])
            samples = [make_sample(item, own.ids) for item, own in zip(items, encoded, strict=True)]
            return OurBatch(managers[case], groups_of(samples))

        take_steps(line, job, ["practicum", "ray", "math-verify"], pack)


if __name__ == "__main__":
    main()
