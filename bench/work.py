"""Prompt groups to be answered, engines that answer them, and samples to be learnt from, all of random tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from practicum.rollout.base import BaseRollout
from practicum.rollout.engines import EngineSettings, make_engine
from practicum.types import Prompt, PromptGroup, Sample, SamplingParams
from practicum.weights import WeightUpdate

PROMPT_TEXT = "a made-up prompt"


def group_of(number: int, ids: Iterable[int] | NDArray[np.int32], params: SamplingParams, seed: int) -> PromptGroup:
    return PromptGroup(f"1/{number}", Prompt(str(number), text=PROMPT_TEXT), np.array(ids, np.int32), params, seed)


def groups_of(
    num: int, prompt_tokens: tuple[int, int], params: SamplingParams, vocabulary: int, seed: int = 0
) -> list[PromptGroup]:
    """Return groups whose prompts have random tokens, between two lengths."""
    random = np.random.default_rng(seed)
    lengths = random.integers(prompt_tokens[0], prompt_tokens[1] + 1, num)
    return [group_of(i, random.integers(2, vocabulary, n), params, seed + i) for i, n in enumerate(lengths)]


@contextmanager
def native_engine(
    model: Path | str, *, device: str = "cpu", weights: WeightUpdate | None = None, **options: Any
) -> Iterator[BaseRollout]:
    """Yield the native engine, awake, with these weights instead of the model's if they are given."""
    engine = make_engine(EngineSettings("native", str(model), device=device, **options))
    try:
        if weights is not None:
            asyncio.run(engine.update_weights(weights))
        asyncio.run(engine.resume())
        yield engine
    finally:
        asyncio.run(engine.close())


def written(engine: BaseRollout, groups: Sequence[PromptGroup]) -> list[Sample]:
    return [sample for group in engine.generate_all(groups) for sample in group.samples]


def made_samples(lengths: Sequence[tuple[int, int]], vocabulary: int, seed: int = 0) -> list[Sample]:
    """Return samples of random tokens, with so many in prompt and answer."""
    random = np.random.default_rng(seed)
    return [
        Sample(
            prompt=Prompt(str(index), text=PROMPT_TEXT),
            prompt_ids=random.integers(2, vocabulary, prompt).astype(np.int32),
            token_ids=random.integers(2, vocabulary, answer).astype(np.int32),
            log_probs=-random.random(answer).astype(np.float32),
            loss_mask=np.ones(answer, np.bool_),
            versions=np.zeros(answer, np.int32),
            text="",
            finish_reason="length",
            id=f"1/{index}/0",
        )
        for index, (prompt, answer) in enumerate(lengths)
    ]


def to_learn_from(samples: Sequence[Sample], step: int = 1) -> list[Sample]:
    """Give samples ids of a step and advantages of both signs."""
    for index, sample in enumerate(samples):
        sample.id = f"{step}/{index}/0"
        sample.advantages = np.full(len(sample.token_ids), 1.0 if index % 2 else -1.0, np.float32)
    return list(samples)
