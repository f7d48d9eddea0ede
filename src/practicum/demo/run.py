"""Makes the demonstration's files: data, warmed-up model and the config that trains it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from practicum.config import Config
from practicum.demo.arithmetic import all_problems, write_problems
from practicum.demo.warmup import warm_up

NUM_HELD_OUT = 400
WARM_UP_ACCURACY = 0.3
WRONG_SHARE = 0.4


def start_afresh(folder: Path) -> None:
    """Remove what an earlier demo left, and nothing else."""
    for name in ("run", "model", ".model"):
        shutil.rmtree(folder / name, ignore_errors=True)


def prepare(
    folder: Path, overrides: Sequence[str], on_warm_up_step: Callable[[int, float], None] = lambda step, accuracy: None
) -> Config:
    """Write `folder`/{train.jsonl, held-out.jsonl, model/}, a model that is already there apart; return the config."""
    config = demo_config(folder, overrides)
    seed = config.trainer.seed
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = all_problems(seed, NUM_HELD_OUT)
    write_problems(folder / "train.jsonl", train)
    write_problems(folder / "held-out.jsonl", held_out)
    if not (folder / "model").exists():
        torch.set_num_threads(1)  # the model is too small to gain from more
        unfinished = folder / ".model"
        warm_up(
            unfinished,
            train,
            seed=seed,
            until_accuracy=WARM_UP_ACCURACY,
            wrong_share=WRONG_SHARE,
            on_step=on_warm_up_step,
        )
        unfinished.rename(folder / "model")
    return config


def demo_config(folder: Path, overrides: Sequence[str]) -> Config:
    tree = {
        "model": {"path": str(folder / "model")},
        "data": {
            "train": str(folder / "train.jsonl"),
            "validation": str(folder / "held-out.jsonl"),
            "prompts_per_step": 64,
            "max_prompt_tokens": 16,
        },
        "rollout": {"answers_per_prompt": 8, "max_new_tokens": 6},
        "validation": {"every": 25},
        "reward": {"grader": "exact"},
        "actor": {"lr": 5.0e-4, "lr_schedule": "linear", "mini_batches": 4},
        "trainer": {
            "steps": 150,
            "threads_per_worker": 1,
            "checkpoint_every": 50,
            "run_dir": str(folder / "run"),
        },
    }
    return Config.from_tree(tree, overrides, source="practicum demo")
