"""Ours in the `grpo` benchmark: the loop as a user would run it, on Ray, with default settings."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bench.contestant import Line, step
from bench.grpo_work import Job, even_share

if TYPE_CHECKING:
    from practicum import Config, Sample


def grade(sample: Sample) -> float:
    return even_share(sample.token_ids.tolist())


def config(job: Job) -> Config:
    from practicum import Config

    return Config.from_tree(
        {
            "model": {"path": job.model},
            "data": {"train": job.prompts, "prompts_per_step": job.prompts_per_step, "max_prompt_tokens": 64},
            "rollout": {"answers_per_prompt": job.answers_per_prompt, "max_new_tokens": job.max_new_tokens},
            "reward": {"function": f"{Path(__file__).resolve()}:grade"},
            "actor": {"lr": job.lr, "max_grad_norm": job.max_grad_norm},
            "algorithm": {"clip_low": job.clip_low, "clip_high": job.clip_high},
            # More steps than will be taken, so that none of them is the last, which would also write a checkpoint.
            "trainer": {"steps": 1_000_000, "threads_per_worker": job.threads, "run_dir": job.run_dir},
        }
    )


def main() -> None:
    line = Line()
    from practicum import Trainer

    job = Job.read(sys.argv[1])
    trainer = Trainer(config(job))
    with closing(cast(Generator[Any], trainer.steps())) as reports:
        line.ready(["practicum", "torch", "transformers", "ray"])
        while num_steps := line.wait_for_go():
            steps = []
            for _ in range(num_steps):
                start = time.perf_counter()
                metrics = next(reports).metrics
                seconds = time.perf_counter() - start
                parts = {
                    name.removeprefix("time/").removesuffix("_s"): value
                    for name, value in metrics.items()
                    if name.startswith("time/") and name not in ("time/step_s", "time/tokens_per_s")
                }
                steps.append(step(seconds, round(metrics["rollout/answer_tokens"] * job.answers_per_step), **parts))
            line.answer(steps)


if __name__ == "__main__":
    main()
