"""Ours in the `grpo` benchmark: the loop as a user would run it, on Ray, with default settings."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from importlib.util import find_spec
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
            "model": {"path": job.model, "dtype": job.dtype},
            "data": {
                "train": job.prompts,
                "prompts_per_step": job.prompts_per_step,
                "max_prompt_tokens": job.max_prompt_tokens,
            },
            "rollout": {"answers_per_prompt": job.answers_per_prompt, "max_new_tokens": job.max_new_tokens},
            "reward": {"function": f"{Path(__file__).resolve()}:grade"},
            "actor": {
                "lr": job.lr,
                "max_grad_norm": job.max_grad_norm,
                "micro_batch_tokens": job.micro_batch_tokens,
                "router_replay": {"mode": job.replay, "compare_every": 0},
            },
            "algorithm": {"clip_low": job.clip_low, "clip_high": job.clip_high},
            # More steps than will be taken, so that none of them is the last, which would also write a checkpoint.
            "trainer": {
                "steps": 1_000_000,
                "threads_per_worker": job.threads,
                "run_dir": job.run_dir,
                "device": job.device,
            },
        }
    )


@contextmanager
def idle_share() -> Iterator[dict[str, float]]:
    """How much of the time inside the block no kernel ran on the device, by what its driver says. Nothing where
    there is no nvidia-ml-py to ask it by."""
    if find_spec("pynvml") is None:
        yield {}
        return
    import pynvml

    pynvml.nvmlInit()
    device, ended = pynvml.nvmlDeviceGetHandleByIndex(0), threading.Event()
    seen: list[float] = []

    def look() -> None:
        while not ended.wait(0.05):
            seen.append(1 - pynvml.nvmlDeviceGetUtilizationRates(device).gpu / 100)

    thread = threading.Thread(target=look)
    found: dict[str, float] = {}
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
        found["device_idle"] = sum(seen) / max(1, len(seen))


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
                with idle_share() if job.device == "cuda" else nullcontext({}) as idle:
                    metrics = next(reports).metrics
                seconds = time.perf_counter() - start
                parts = {
                    name.removeprefix("time/").removesuffix("_s"): value
                    for name, value in metrics.items()
                    if name.startswith("time/") and name not in ("time/step_s", "time/tokens_per_s")
                }
                parts |= {name: share * seconds for name, share in idle.items()}
                steps.append(step(seconds, round(metrics["rollout/answer_tokens"] * job.answers_per_step), **parts))
            line.answer(steps)


if __name__ == "__main__":
    main()
