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

from bench.rollout_work import Answer, Case, Job, Prompts, take_steps


def _no_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [0.0 for _ in completion_ids]


class Trl:
    def __init__(self, folder: str, output_dir: str) -> None:
        config = GRPOConfig(
            output_dir=output_dir, model_init_kwargs={"dtype": "float32"}, use_cpu=True, bf16=False,
            per_device_train_batch_size=8, num_generations=8, temperature=1.0, top_k=0, top_p=1.0, beta=0.0,
            gradient_checkpointing=False, report_to="none", disable_tqdm=True,
        )  # fmt: skip
        prompts = Dataset.from_list([{"prompt": "none"}] * 8)
        self._trainer = GRPOTrainer(model=folder, reward_funcs=_no_reward, args=config, train_dataset=prompts)
        self._trainer.generation_config.eos_token_id = None
        self._trainer.eos_token_ids = [-1]

    def write(self, case: Case, prompts: Prompts) -> tuple[list[list[int]], torch.Tensor]:
        trainer, longest = self._trainer, max(case.new_tokens)
        trainer.generation_config.max_new_tokens = longest
        rows = [prompt for prompt in prompts for _ in range(case.num_answers)]
        completions, _ = trainer._generate_single_turn(rows, None, {}, case.num_answers)
        width = max(case.prompt_lengths)
        lengths = case.lengths()
        # The log-probs are of what the answers have, padded as TRL does: prompts on the left, answers on the right.
        ids = torch.zeros(len(rows), width + longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for index, (prompt, completion) in enumerate(zip(rows, completions, strict=True)):
            first, end = width - len(prompt), width + lengths[index]
            ids[index, first:end] = torch.tensor(prompt + completion[: lengths[index]])
            mask[index, first:end] = 1
        with torch.no_grad():
            log_probs, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, longest)
        return completions, log_probs

    def answers(self, case: Case, written: tuple[list[list[int]], torch.Tensor]) -> list[Answer]:
        completions, log_probs = written
        values = log_probs.tolist()
        return [(completions[i][:length], values[i][:length]) for i, length in enumerate(case.lengths())]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="bench-trl-") as folder:

        def make(job: Job, model: str) -> Trl:
            return Trl(job.models[model], f"{folder}/{model}")

        take_steps(["trl", "torch", "transformers", "accelerate"], make)


if __name__ == "__main__":
    main()
