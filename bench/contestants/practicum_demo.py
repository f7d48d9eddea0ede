"""The demonstration's training in the `rollout` benchmark, with one engine or another: `ENGINE FOLDER BACKEND STEPS`.

Asked for the case `accuracy`, it trains to the end and answers with what it then has on the held-out problems.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from bench.contestant import Line, step

ACCURACY = "accuracy"


def main() -> None:
    line = Line()
    from practicum import Trainer
    from practicum.demo.run import demo_config

    engine, folder = sys.argv[1], Path(sys.argv[2])
    overrides = [
        f"rollout.engine={engine}",
        f"controller.backend={sys.argv[3]}",
        f"trainer.run_dir={folder / engine}",
        # Nothing but training steps until the last.
        f"trainer.steps={sys.argv[4]}",
        "trainer.checkpoint_every=0",
        "validation.every=0",
        "actor.router_replay.mode=disabled",  # not every engine keeps routes, and both are to do the same
    ]
    config = demo_config(folder, overrides)
    answers_per_step = config.data.prompts_per_step * config.rollout.answers_per_prompt
    with closing(cast(Generator[Any], Trainer(config).steps())) as reports:
        line.ready(["practicum", "torch", "transformers", "ray"])
        while True:
            num_steps, case = line.wait_for_case()
            if not num_steps:
                return
            if case == ACCURACY:
                *_, last = reports
                line.answer([step(1.0, last.metrics["validation/accuracy"])])
                continue
            steps = []
            for _ in range(num_steps):
                began = time.perf_counter()
                metrics = next(reports).metrics
                seconds = time.perf_counter() - began
                num_tokens = round(metrics["rollout/answer_tokens"] * answers_per_step)
                steps.append(step(seconds, num_tokens, rollout=metrics["time/rollout_s"]))
            line.answer(steps)


if __name__ == "__main__":
    main()
