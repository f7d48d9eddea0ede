"""Makes the demonstration's files: data, warmed-up model and the config that trains it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from practicum.config import Config
from practicum.demo.arithmetic import all_problems, write_problems
from practicum.demo.warmup import warm_up
from practicum.errors import CheckpointError
from practicum.loop.run_folder import lock_folder

NUM_HELD_OUT = 400
WARM_UP_ACCURACY = 0.3
WRONG_SHARE = 0.4
_MARK = ".made-by-practicum-demo"


def prepare(
    folder: Path, overrides: Sequence[str], on_warm_up_step: Callable[[int, float], None] = lambda step, accuracy: None
) -> Config:
    """Make `folder`/{train.jsonl, held-out.jsonl, model/}, and return the config that trains on them.

    With `resume=auto` a model that is there is kept, since the run to go on with started from it.
    """
    config = demo_config(folder, overrides)
    if config.resume == "never":
        _start_afresh(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).touch()
    seed = config.trainer.seed
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


def _start_afresh(folder: Path) -> None:
    """Remove what an earlier demo left; refuse a folder in which somebody else's files have those names."""
    made = [folder / name for name in ("train.jsonl", "held-out.jsonl", "run", "model", ".model")]
    there = [path for path in made if path.exists()]
    if there and not (folder / _MARK).exists():
        raise CheckpointError(f"{there[0]} was not made by the demo and would be overwritten: use another --folder.")
    if (folder / "run").is_dir():
        lock_folder(folder / "run").close()  # refuses while another demo is using it
    for path in there:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


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
        "actor": {"lr": 5.0e-4, "lr_schedule": "linear", "mini_batches": 4, "router_replay": {"mode": "R3"}},
        "trainer": {
            "steps": 150,
            "threads_per_worker": 1,
            "checkpoint_every": 50,
            "run_dir": str(folder / "run"),
        },
    }
    return Config.from_tree(tree, overrides, source="practicum demo")
