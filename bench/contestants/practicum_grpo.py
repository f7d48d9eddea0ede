"""Ours in the `grpo` benchmark: the loop as a user would run it, on Ray, with default settings. `demo FOLDER
OVERRIDE...` is the demonstration's training in the `rollout` benchmark; its case `accuracy` trains to the end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from bench.contestant import Line, step
from bench.grpo_work import Job, even_share


def grade(sample: Any) -> float:
    return even_share(sample.token_ids.tolist())


def config_of(job: Job, overrides: Sequence[str] = ()) -> Any:
    from practicum import Config

    tree: dict[str, Any] = {
        "model": {"path": job.model, "dtype": job.dtype},
        "data": {"train": job.prompts, "prompts_per_step": job.prompts_per_step,
                 "max_prompt_tokens": job.max_prompt_tokens},
        "rollout": {"answers_per_prompt": job.answers_per_prompt, "max_new_tokens": job.max_new_tokens},
        "reward": {"function": f"{Path(__file__).resolve()}:grade"},
        "actor": {"lr": job.lr, "max_grad_norm": job.max_grad_norm, "micro_batch_tokens": job.micro_batch_tokens,
                  "router_replay": {"mode": job.replay, "compare_every": 0}},
        "algorithm": {"clip_low": job.clip_low, "clip_high": job.clip_high},
        # More steps than will be taken, so that none of them is the last, which would also write a checkpoint.
        "trainer": {"steps": 1_000_000, "threads_per_worker": job.threads, "run_dir": job.run_dir,
                    "device": job.device},
    }  # fmt: skip
    return Config.from_tree(tree, overrides, source="the benchmark")


def watch_device() -> list[float]:
    """Return a list that grows 20 times a second by the share of time in which no kernel ran on the device, by what its
    driver says. It stays empty where there is no nvidia-ml-py."""
    import torch

    seen: list[float] = []

    def look() -> None:
        while True:
            seen.append(1 - torch.cuda.utilization(0) / 100)
            time.sleep(0.05)

    if find_spec("pynvml") is not None:
        threading.Thread(target=look, daemon=True).start()
    return seen


def main() -> None:
    line = Line()
    from practicum import Trainer
    from practicum.demo.run import demo_config

    what, *rest = sys.argv[1:]
    config = demo_config(Path(rest[0]), rest[1:]) if what == "demo" else config_of(Job.parse(what))
    answers_per_step = config.data.prompts_per_step * config.rollout.answers_per_prompt
    idle = watch_device() if config.trainer.device == "cuda" else []
    with closing(cast(Generator[Any], Trainer(config).steps())) as reports:

        def take_step(case: str) -> dict[str, Any]:
            if case == "accuracy":
                *_, last = reports
                return step(1.0, last.metrics["validation/accuracy"])
            start, seen = time.perf_counter(), len(idle)
            metrics = next(reports).metrics
            seconds = time.perf_counter() - start
            parts = {
                name.removeprefix("time/").removesuffix("_s"): value
                for name, value in metrics.items()
                if name.startswith("time/") and name not in ("time/step_s", "time/tokens_per_s")
            }
            if idle[seen:]:
                parts["device_idle"] = fmean(idle[seen:]) * seconds
            return step(seconds, round(metrics["rollout/answer_tokens"] * answers_per_step), **parts)

        line.serve(["practicum", "torch", "transformers", "ray"], take_step)


if __name__ == "__main__":
    main()
