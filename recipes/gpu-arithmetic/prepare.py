"""Sums of three-digit numbers, and a mixture of experts of 60 million parameters that is right three times in ten.

python recipes/gpu-arithmetic/prepare.py        # runs/gpu-arithmetic/{model, train.jsonl, held-out.jsonl}
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from practicum.demo.arithmetic import Problem, make_model, write_problems
from practicum.demo.run import WRONG_SHARE
from practicum.demo.warmup import warm_up
from practicum.models import resolve_device

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
}
NUM_PROBLEMS, NUM_HELD_OUT = 50_000, 512


def problems(seed: int) -> list[Problem]:
    """No two are the same."""
    chosen = np.random.default_rng(seed).choice(1_000_000, NUM_PROBLEMS, replace=False)
    return [Problem(int(number) // 1000, int(number) % 1000, digits=3) for number in chosen]


def prepare(folder: Path, seed: int, device: torch.device) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    made = problems(seed)
    train, held_out = made[NUM_HELD_OUT:], made[:NUM_HELD_OUT]
    write_problems(folder / "train.jsonl", train)
    write_problems(folder / "held-out.jsonl", held_out)
    warm_up(
        folder / "model",
        train,
        seed=seed,
        until_accuracy=0.3,
        wrong_share=WRONG_SHARE,
        max_steps=6000,
        batch_size=256,
        lr=5e-4,
        model=make_model(seed, **SHAPE).to(device),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/gpu-arithmetic"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    prepare(options.folder, options.seed, resolve_device(options.device))
    print(f"made {options.folder}/model, train.jsonl and held-out.jsonl")


if __name__ == "__main__":
    main()
