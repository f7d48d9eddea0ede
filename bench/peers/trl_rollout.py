"""TRL in the `rollout` benchmark: what its GRPOTrainer does between prompts and log-probs, with its own methods.

It generates with transformers' `generate` and then runs prompts and answers through the model once more for the
log-probs. Runs in the environment that trl.sh makes.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from bench.rollout_work import Case, Prompts, Writer, cut, take_steps


def no_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [0.0 for _ in completion_ids]


def make(folder: str, output_dir: str) -> Writer:
    config = GRPOConfig(
        output_dir=output_dir, model_init_kwargs={"dtype": "float32"}, use_cpu=True, bf16=False,
        per_device_train_batch_size=8, num_generations=8, temperature=1.0, top_k=0, top_p=1.0, beta=0.0,
        gradient_checkpointing=False, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    none = Dataset.from_list([{"prompt": "none"}] * 8)
    trainer = GRPOTrainer(model=folder, reward_funcs=no_reward, args=config, train_dataset=none)
    trainer.generation_config.eos_token_id = None
    trainer.eos_token_ids = [-1]

    def write(case: Case, prompts: Prompts) -> Any:
        longest, width, lengths = max(case.new_tokens), max(case.prompt_lengths), case.lengths()
        trainer.generation_config.max_new_tokens = longest
        rows = [prompt for prompt in prompts for _ in range(case.num_answers)]
        completions, _ = trainer._generate_single_turn(rows, None, {}, case.num_answers)
        # The log-probs are of what the answers have, padded as TRL does: prompts on the left, answers on the right.
        ids = torch.zeros(len(rows), width + longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for index, (prompt, completion) in enumerate(zip(rows, completions, strict=True)):
            first, end = width - len(prompt), width + lengths[index]
            ids[index, first:end] = torch.tensor(prompt + completion[: lengths[index]])
            mask[index, first:end] = 1
        with torch.no_grad():
            log_probs, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, longest)
        return lambda: cut(case, completions, log_probs.tolist())

    return write


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="bench-trl-") as output:
        packages = ["trl", "torch", "transformers", "accelerate"]
        take_steps(packages, lambda job, model: make(job.models[model], f"{output}/{model}"))
