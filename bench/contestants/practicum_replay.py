"""Ours in the `replay` benchmark's `cost`, in one mode of router replay: `JOB MODE`."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from bench.contestant import Line, step
from bench.replay_cost import ROLLOUT, Job, open_engine, parts_of
from bench.replay_exact import dealt, replay_settings
from bench.replay_work import actor_settings, to_learn_from, write_samples
from practicum.controller import LocalWorkerGroup, RayClassWithInitArgs, WorkerGroup
from practicum.rollout.native import NativeRollout
from practicum.train import ActorWorker
from practicum.types import Sample


class Side:
    """Engine and learner are made when they are first needed."""

    def __init__(self, job: Job, mode: str) -> None:
        self._job = job
        self._mode = mode
        self._num_steps = 0

    def step(self, case: str) -> dict[str, Any]:
        return self._rollout() if case == ROLLOUT else self._update(parts_of(case))

    def _rollout(self) -> dict[str, Any]:
        job = self._job
        self._num_steps += 1
        lengths = (job.prompt_tokens, job.prompt_tokens)
        began = time.perf_counter()
        samples = write_samples(
            self._engine, job.num_samples, lengths, job.new_tokens, job.vocabulary, seed=1000 * self._num_steps
        )
        seconds = time.perf_counter() - began
        kept = [sample.routes is not None for sample in samples]
        if any(kept) != all(kept) or any(kept) != (self._mode == "R3"):
            raise RuntimeError(f"{sum(kept)} of {len(kept)} samples have routes in mode {self._mode}")
        return step(seconds, sum(len(sample.token_ids) for sample in samples))

    def _update(self, num_parts: int) -> dict[str, Any]:
        self._num_steps += 1
        samples = to_learn_from(self._samples, self._num_steps)
        batches = dealt(samples, 1, num_parts, self._job.micro_batch_tokens)
        began = time.perf_counter()
        (stats,) = self._learner.map(ActorWorker.update, batches, self._num_steps)
        seconds = time.perf_counter() - began
        num_tokens = sum(sample.num_tokens for sample in self._samples)
        if (stats.replay is None) != (self._mode == "disabled"):
            raise RuntimeError(f"replay statistics {stats.replay} in mode {self._mode}")
        if stats.replay is not None and stats.replay.num_rows != num_tokens:
            raise RuntimeError(f"{stats.replay.num_rows} tokens were replayed where {num_tokens} were learnt from")
        return step(seconds, num_tokens)

    def close(self) -> None:
        if "_engine" in self.__dict__:
            self._engine.close()
        if "_learner" in self.__dict__:
            self._learner.shutdown()

    @cached_property
    def _engine(self) -> NativeRollout:
        return open_engine(self._job, keep_routes=self._mode == "R3")

    @cached_property
    def _samples(self) -> list[Sample]:
        samples = self._job.read_samples()
        return samples if self._mode == "R3" else [replace(sample, routes=None) for sample in samples]

    @cached_property
    def _learner(self) -> WorkerGroup[ActorWorker]:
        job = self._job
        replay = None if self._mode == "disabled" else replay_settings(self._mode, Path(job.folder))
        settings = actor_settings(
            Path(job.model), threads=job.threads, device=job.device, compute_dtype=job.dtype, replay=replay
        )
        return LocalWorkerGroup(RayClassWithInitArgs(ActorWorker, settings), name="learner")


def main() -> None:
    line = Line()
    job, mode = Job.read(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(job.threads)
    side = Side(job, mode)
    line.ready(["practicum", "torch", "transformers"])
    try:
        while True:
            num_steps, case = line.wait_for_case()
            if not num_steps:
                return
            line.answer([side.step(case) for _ in range(num_steps)])
    finally:
        side.close()


if __name__ == "__main__":
    main()
