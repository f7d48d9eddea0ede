"""What several benchmarks give to engines and learners: prompt groups, samples of random tokens, and actors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from practicum.controller import LocalWorkerGroup, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, WorkerGroup
from practicum.replay import ReplaySettings
from practicum.rollout.base import BaseRollout
from practicum.rollout.engines import EngineSettings, make_engine
from practicum.train import ActorWorker
from practicum.types import Prompt, PromptGroup, Sample, SamplingParams
from tests.samples import make_sample
from tests.train import actors


def group_of(seed: int, ids: Iterable[int] | NDArray[np.int32], params: SamplingParams) -> PromptGroup:
    return PromptGroup(f"1/{seed}", Prompt(str(seed), text="made up"), np.array(ids, np.int32), params, seed)


def groups_of(
    num: int, prompt_tokens: tuple[int, int], params: SamplingParams, vocabulary: int, seed: int = 0
) -> list[PromptGroup]:
    """Return groups whose prompts have random tokens, between two lengths."""
    random = np.random.default_rng(seed)
    lengths = random.integers(prompt_tokens[0], prompt_tokens[1] + 1, num)
    return [group_of(seed + i, random.integers(2, vocabulary, n), params) for i, n in enumerate(lengths)]


@contextmanager
def native_engine(model: Path | str, *, device: str = "cpu", **options: Any) -> Iterator[BaseRollout]:
    """Yield the native engine, awake."""
    engine = make_engine(EngineSettings("native", str(model), device=device, **options))
    try:
        asyncio.run(engine.resume())
        yield engine
    finally:
        asyncio.run(engine.close())


def written(engine: BaseRollout, groups: Sequence[PromptGroup]) -> list[Sample]:
    return [sample for group in engine.generate_all(groups) for sample in group.samples]


def made_samples(lengths: Sequence[tuple[int, int]], vocabulary: int = 16) -> list[Sample]:
    """Return samples of random tokens to learn from, with so many in prompt and answer."""
    random = np.random.default_rng(0)
    samples = [make_sample(*num_tokens) for num_tokens in lengths]
    for sample in samples:
        ids = (random.integers(2, vocabulary, len(own)) for own in (sample.prompt_ids, sample.token_ids))
        sample.prompt_ids, sample.token_ids = (own.astype(np.int32) for own in ids)
    return to_learn_from(samples)


def to_learn_from(samples: Sequence[Sample], step: int = 1) -> list[Sample]:
    """Give samples ids of a step and advantages of both signs."""
    for index, sample in enumerate(samples):
        sample.id = f"{step}/{index}/0"
        sample.advantages = np.full(len(sample.token_ids), 1.0 if index % 2 else -1.0, np.float32)
    return list(samples)


def replay_settings(mode: str, folder: Path) -> ReplaySettings | None:
    """Return the settings of a mode; R2 writes its record into the folder."""
    if mode == "disabled":
        return None
    return ReplaySettings("R3") if mode == "R3" else ReplaySettings("R2", record_file=str(folder / "routes.rec"))


@contextmanager
def open_actors(model: Path, num_ranks: int = 1, **settings: Any) -> Iterator[WorkerGroup[ActorWorker]]:
    """Open one rank in this process, several on Ray."""
    own = actors.settings(model, **{"lr": 1e-6, "lr_schedule": "constant", **settings})
    packed = RayClassWithInitArgs(ActorWorker, own)
    with ExitStack() as stack:
        group: WorkerGroup[ActorWorker]
        if num_ranks == 1:
            group = LocalWorkerGroup(packed, name="actor")
        else:
            group = RayWorkerGroup(stack.enter_context(RayResourcePool([num_ranks])), packed, name="actors")
        stack.callback(group.shutdown)
        yield group
