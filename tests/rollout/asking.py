"""Prompt groups for engines behind servers, and their samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from practicum.controller.loop import run_sync
from practicum.rollout.base import BaseRollout
from practicum.types import Prompt, PromptGroup, Sample, SamplingParams

run = run_sync


def ask(
    params: SamplingParams, prompt: Sequence[int] = (5, 6, 7), seed: int = 0, name: str | None = None
) -> PromptGroup:
    name = name or f"p{seed}"
    return PromptGroup(name, Prompt(name, text="x"), np.array(prompt, np.int32), params, seed)


def written(engine: BaseRollout, *groups: PromptGroup) -> list[Sample]:
    return [sample for group in engine.generate_all(groups) for sample in group.samples]


def tokens(samples: Sequence[Sample]) -> list[list[int]]:
    return [sample.token_ids.tolist() for sample in samples]
