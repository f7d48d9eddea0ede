"""Ours in the `rollout` benchmark: the native engine, and what is checked of it alone."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.contestant import Line, step
from bench.rollout_checks import (
    NUM_COMPARED,
    NUM_GREEDY,
    equal_families,
    largest_difference,
    matrix_rate,
    matrix_share,
)
from bench.rollout_work import Answer, Case, Job, Prompts, take_steps
from practicum import Sample
from practicum.controller.loop import run_sync
from practicum.rollout.native import NativeRollout
from practicum.types import Prompt, PromptGroup, SamplingParams

LOG_PROBS, GREEDY, MATRIX_RATE = "log-probs", "greedy", "matrix rate, "
QUICK_COMPARED, QUICK_GREEDY = 2, 8


class Native:
    def __init__(self, folder: str) -> None:
        self._engine = NativeRollout(folder, device=torch.device("cpu"), dtype=torch.float32, max_batch=512)
        run_sync(self._engine.resume())

    def write(self, case: Case, prompts: Prompts) -> list[Sample]:
        groups = [
            PromptGroup(
                str(index),
                Prompt(str(index), text="a made-up prompt"),
                np.array(prompt, np.int32),
                SamplingParams(length, num_answers=case.num_answers, ignore_eos=True),
                seed=index,
            )
            for index, (prompt, length) in enumerate(zip(prompts, case.new_tokens, strict=True))
        ]
        return [sample for group in self._engine.generate_all(groups) for sample in group.samples]

    def answers(self, case: Case, written: list[Sample]) -> list[Answer]:
        return [(sample.token_ids.tolist(), sample.log_probs.tolist()) for sample in written]


def main() -> None:
    line = Line()
    job = Job.read(sys.argv[1])
    torch.set_num_threads(job.threads)
    natives = {name: Native(folder) for name, folder in job.models_used().items()}

    measure = cache(matrix_rate) if job.quick else matrix_rate  # a quick look: once for all cases

    def matrix_step(name: str) -> dict[str, Any]:
        case = job.cases[name]
        prompts = case.prompts(0, job.vocabulary)
        share = matrix_share(case, job.models[case.model], lambda: natives[case.model].write(case, prompts), measure)
        return step(1.0, share)

    def log_probs_step() -> dict[str, Any]:
        written = {
            name: natives[case.model].write(case, case.prompts(0, job.vocabulary)) for name, case in job.cases.items()
        }
        samples = [(job.models[job.cases[name].model], own) for name, own in written.items()]
        return step(1.0, largest_difference(samples, QUICK_COMPARED if job.quick else NUM_COMPARED))

    def greedy_step() -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="bench-families-") as folder:
            return step(1.0, len(equal_families(Path(folder), QUICK_GREEDY if job.quick else NUM_GREEDY)))

    others: dict[str, Callable[[], dict[str, Any]]] = {
        MATRIX_RATE + name: partial(matrix_step, name) for name in job.cases
    }
    others |= {LOG_PROBS: log_probs_step, GREEDY: greedy_step}
    take_steps(line, job, ["practicum", "torch", "transformers"], natives, others)


if __name__ == "__main__":
    main()
