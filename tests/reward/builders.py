"""Samples, groups and workers for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from practicum import Sample
from practicum.config import RewardConfig
from practicum.reward.client import Target
from practicum.reward.executors import Graded
from practicum.reward.rubric import Rubric
from practicum.reward.worker import RewardLoopWorker, RewardSettings
from practicum.types import PromptGroup, SamplingParams, Score, Trajectory
from tests.reward.fakes import run
from tests.samples import make_sample

REWARDS = Path(__file__).parents[1] / "rewards.py"


def function(name: str) -> str:
    return f"{REWARDS}:{name}"


def samples_of(*texts: str, truth: Any = None, source: str = "", **metadata: Any) -> list[Sample]:
    made = [make_sample(text=text, truth=truth, seed=seed) for seed, text in enumerate(texts)]
    return [
        replace(sample, prompt=replace(sample.prompt, data_source=source, metadata=dict(metadata))) for sample in made
    ]


def groups_of(samples: Sequence[Sample], per_group: int = 1) -> list[PromptGroup]:
    """Groups of so many answers each; the samples of one are to have the same prompt."""
    groups = []
    for start in range(0, len(samples), per_group):
        own = samples[start : start + per_group]
        trajectories = [Trajectory(f"{start}/{n}", n, [sample]) for n, sample in enumerate(own)]
        params = SamplingParams(max_new_tokens=8, num_answers=len(own))
        groups.append(PromptGroup(str(start), own[0].prompt, own[0].prompt_ids, params, 0, trajectories))
    return groups


def groups_for(*texts: str, per_group: int = 1, **kwargs: Any) -> list[PromptGroup]:
    return groups_of(samples_of(*texts, **kwargs), per_group)


def scores_of(groups: Sequence[PromptGroup]) -> list[Score]:
    scores = [trajectory.score for group in groups for trajectory in group.trajectories]
    assert None not in scores
    return scores  # type: ignore[return-value]


def reward_settings(config: dict[str, Any], **settings: Any) -> RewardSettings:
    return RewardSettings(
        Rubric.make(RewardConfig.model_validate(config)),
        **{"timeout_s": 10.0, "num_processes": 2, "memory_bytes": 256 << 20, **settings},
    )


def target(url: str, timeout_s: float = 10.0) -> Target:
    return Target(url, window=64, timeout_s=timeout_s)


async def graded_by(worker: RewardLoopWorker, samples: Sequence[Sample]) -> list[Graded]:
    """Grade all, in their order."""
    graded: dict[int, Graded] = {}
    async for finished in worker.grade(list(samples)):
        assert not graded.keys() & dict(finished).keys()
        graded.update(finished)
    return [graded[index] for index in range(len(samples))]


def graded_by_worker(config: dict[str, Any], samples: Sequence[Sample], **settings: Any) -> list[Graded]:
    """Grade all at once in a worker of their own."""
    results: list[Graded] = []

    async def grade() -> None:
        worker = RewardLoopWorker(reward_settings(config, **settings))
        try:
            await worker.start()
            results.extend(await graded_by(worker, samples))
        finally:
            await worker.close()

    run(grade)
    return results
