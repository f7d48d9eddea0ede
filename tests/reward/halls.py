"""Grading halls for tests, without workers around them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from practicum import Sample
from practicum.config import RewardConfig
from practicum.reward.client import Target
from practicum.reward.desks import Graded
from practicum.reward.hall import GradingHall, HallSettings
from practicum.reward.rubric import Rubric
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


def hall_settings(config: dict[str, Any], **settings: Any) -> HallSettings:
    return HallSettings(
        Rubric.make(RewardConfig.model_validate(config)),
        **{"timeout_s": 10.0, "num_processes": 2, "memory_bytes": 256 << 20, **settings},
    )


def target(url: str, timeout_s: float = 10.0) -> Target:
    return Target(url, window=64, timeout_s=timeout_s)


def graded_in_hall(config: dict[str, Any], samples: Sequence[Sample], **settings: Any) -> list[Graded]:
    """What a hall of its own makes of the samples, all handed in at once."""
    results: list[Graded] = []

    async def grade() -> None:
        hall = GradingHall(hall_settings(config, **settings))
        await hall.start()
        try:
            results.extend(await asyncio.gather(*(hall.grade(sample) for sample in samples)))
        finally:
            await hall.close()

    run(grade)
    return results
