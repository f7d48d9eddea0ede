"""verl in the `reward` benchmark: its RewardLoopManager, asked as its trainer asks it (MANAGER LOADS TOKENIZER)."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer
from verl import DataProto
from verl.experimental.reward_loop import RewardLoopManager

from bench import reward_functions
from bench.contestant import Line
from bench.controller_work import NUM_WORKERS, start_ray
from bench.reward_work import Batch, Item, take_steps

# What each manager calls, and whom it speaks for.
MANAGERS = {"naive": ("compute_score", "verl"), "rate_limited": ("compute_score_async", "verl (rate_limited)")}
PROMPT_TOKENS = 32


def config_of(manager: str, tokenizer: str) -> Any:
    """The keys that the reward loop reads, with verl's defaults but for the function and the number of workers."""
    reward = {
        "num_workers": NUM_WORKERS,
        "custom_reward_function": {"path": str(Path(reward_functions.__file__)), "name": MANAGERS[manager][0]},
        "reward_manager": {"source": "register", "name": manager},
        "reward_model": {"enable": False},
        # It holds for each worker alone.
        "max_concurrent": reward_functions.AT_A_TIME[reward_functions.ASYNC] // NUM_WORKERS,
    }
    policy = {"model": {"path": tokenizer, "tokenizer_path": None}}
    return OmegaConf.create({"actor_rollout_ref": policy, "reward": reward})


def data_of(case: str, items: Sequence[Item], ids: Sequence[Sequence[int]]) -> DataProto:
    """As it comes from the rollout: responses padded to the longest one."""
    responses = pad_sequence([torch.tensor(own) for own in ids], batch_first=True)
    prompts = torch.ones(len(items), PROMPT_TOKENS, dtype=torch.long)
    written = torch.arange(responses.shape[1]) < torch.tensor([len(own) for own in ids])[:, None]
    mask = torch.cat([prompts, written.long()], dim=1)
    others = {
        "data_source": [case] * len(items),
        "reward_model": [{"ground_truth": item.truth} for item in items],
        "extra_info": [{} for _ in items],
    }
    return DataProto.from_dict(
        {"prompts": prompts, "responses": responses, "attention_mask": mask},
        {name: np.array(values, dtype=object) for name, values in others.items()},
    )


def main() -> None:
    line = Line()
    name, loads, tokenizer_path = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    start_ray()
    manager = RewardLoopManager(config_of(name, tokenizer_path))

    def pack(case: str, items: list[Item]) -> Batch:
        data = data_of(case, items, tokenizer([item.text for item in items])["input_ids"])
        return lambda: manager.compute_rm_score(data), lambda graded: graded.batch["rm_scores"].sum(dim=-1).tolist()

    take_steps(line, json.loads(loads), ["verl", "ray", "torch", "math-verify"], MANAGERS[name][1], pack)


if __name__ == "__main__":
    main()
