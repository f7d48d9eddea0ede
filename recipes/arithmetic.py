"""The demonstration's sums for recipes: a tiny mixture of experts, warmed up until it is right three times in ten.

python recipes/arithmetic.py        # runs/arithmetic/{model, train.jsonl, held-out.jsonl}
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from practicum.demo.arithmetic import all_problems, write_problems
from practicum.demo.run import NUM_HELD_OUT, WARM_UP_ACCURACY, WRONG_SHARE
from practicum.demo.warmup import warm_up


def prepare(folder: Path, seed: int, until_accuracy: float = WARM_UP_ACCURACY) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = all_problems(seed, NUM_HELD_OUT)
    write_problems(folder / "train.jsonl", train)
    write_problems(folder / "held-out.jsonl", held_out)
    warm_up(folder / "model", train, seed=seed, until_accuracy=until_accuracy, wrong_share=WRONG_SHARE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/arithmetic"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the model is too small to gain from more
    prepare(options.folder, options.seed)
    print(f"made {options.folder}/model, train.jsonl and held-out.jsonl")


if __name__ == "__main__":
    main()
