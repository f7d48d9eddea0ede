"""What several benchmarks give to engines and learners: prompt groups, samples of random tokens, and actors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from practicum.controller import RayClassWithInitArgs, WorkerGroup, open_controller
from practicum.data import plan_micro_batches
from practicum.replay import ReplaySettings
from practicum.rollout.base import BaseRollout
from practicum.rollout.engines import EngineSettings, make_engine
from practicum.train import ActorSettings, ActorWorker, MiniBatch, totals_of
from practicum.types import Prompt, PromptGroup, Sample, SamplingParams
from tests.samples import make_sample

# What engines write


def group_of(number: int, ids: Iterable[int] | NDArray[np.int32], params: SamplingParams, seed: int) -> PromptGroup:
    return PromptGroup(f"1/{number}", Prompt(str(number), text="made up"), np.array(ids, np.int32), params, seed)


def groups_of(
    num: int, prompt_tokens: tuple[int, int], params: SamplingParams, vocabulary: int, seed: int = 0
) -> list[PromptGroup]:
    """Return groups whose prompts have random tokens, between two lengths."""
    random = np.random.default_rng(seed)
    lengths = random.integers(prompt_tokens[0], prompt_tokens[1] + 1, num)
    return [group_of(i, random.integers(2, vocabulary, n), params, seed + i) for i, n in enumerate(lengths)]


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


# What actors learn from


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


def mini_batches(samples: Sequence[Sample], num_ranks: int, num_parts: int, budget: int) -> list[list[MiniBatch]]:
    """Return mini-batches by rank, as the training loop deals them out."""
    ranks: list[list[MiniBatch]] = [[] for _ in range(num_ranks)]
    for part in range(num_parts):
        members = samples[part::num_parts]
        totals = totals_of(members, max_tokens=max(len(sample.token_ids) for sample in members))
        plan = plan_micro_batches([sample.num_tokens for sample in members], num_ranks, budget)
        for rank, micros in enumerate(plan):
            ranks[rank].append(MiniBatch([[members[i] for i in micro] for micro in micros], totals))
    return ranks


def replay_settings(mode: str, folder: Path) -> ReplaySettings | None:
    """Return the settings of a mode; R2 writes its record into the folder."""
    if mode == "disabled":
        return None
    return ReplaySettings("R3") if mode == "R3" else ReplaySettings("R2", record_file=str(folder / "routes.rec"))


@contextmanager
def open_actors(model: Path, num_ranks: int = 1, **settings: Any) -> Iterator[WorkerGroup[ActorWorker]]:
    """Open one rank in this process, several on Ray."""
    fields: dict[str, Any] = {
        "model_path": str(model), "device": "cpu", "compute_dtype": "float32", "threads": 1, "seed": 0, "lr": 1e-6,
        "lr_schedule": "constant", "num_updates": 1_000_000, "num_warmup": 0, "weight_decay": 0.0,
        "max_grad_norm": 1.0, "temperature": 1.0, "gradient_checkpointing": False, "collective_timeout_s": 120.0,
    }  # fmt: skip
    packed = RayClassWithInitArgs(ActorWorker, ActorSettings(**{**fields, **settings}))
    with open_controller(
        "local" if num_ranks == 1 else "ray", num_workers=num_ranks, use_gpu=False, max_colocate_count=1
    ) as controller:
        yield controller.group(packed, name="learner")
