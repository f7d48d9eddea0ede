"""TRL in the `grpo` benchmark, in the environment that trl.sh makes: its GRPOTrainer, set to do what ours does."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.contestant import Line, step
from bench.grpo_work import Job, even_share


def grpo_config(job: Job) -> GRPOConfig:
    num_answers = job.prompts_per_step * job.answers_per_prompt
    return GRPOConfig(
        output_dir=job.run_dir, model_init_kwargs={"dtype": job.dtype}, use_cpu=job.device == "cpu",
        bf16=job.dtype == "bfloat16",
        # One update a step, as ours does; all answers in one pass where there is memory for it.
        per_device_train_batch_size=job.pass_answers or num_answers,
        gradient_accumulation_steps=num_answers // (job.pass_answers or num_answers),
        num_iterations=1, num_generations=job.answers_per_prompt, max_completion_length=job.max_new_tokens,
        temperature=1.0,
        # The same loss: a mean over all tokens of the step, clipped alike, without a reference model.
        loss_type="dapo", scale_rewards="group", beta=0.0, epsilon=job.clip_low, epsilon_high=job.clip_high,
        mask_truncated_completions=False,
        learning_rate=job.lr, lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=job.max_grad_norm,
        max_steps=1_000_000,
        # On by default, and slower: only memory would speak for it.
        gradient_checkpointing=False,
        # Nothing that ours does not do, and no logging at all.
        save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True, dataloader_num_workers=0,
        dataloader_pin_memory=False,
    )  # fmt: skip


class InTurns(TrainerCallback):
    """Holds the trainer between two steps until it may go on. Everything from one step's end to the next is timed."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._begin()

    def grade(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.num_tokens += sum(map(len, completion_ids))
        return [even_share(ids) for ids in completion_ids]

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._line.ready(["trl", "torch", "transformers", "accelerate"])
        self._wait(control)
        self._begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds = time.perf_counter() - self._start
        self._steps.append(step(seconds, self.num_tokens, rollout=self.rollout_s, update=seconds - self.rollout_s))
        if len(self._steps) == self._due:
            self._line.answer(self._steps)
            self._wait(control)
        self._begin()

    def _wait(self, control: Any) -> None:
        self._steps: list[dict[str, Any]] = []
        self._due, _ = self._line.wait_for_go()
        control.should_training_stop = self._due == 0

    def _begin(self) -> None:
        self.num_tokens, self.rollout_s, self._start = 0, 0.0, time.perf_counter()


def main() -> None:
    line = Line()
    job = Job.parse(sys.argv[1])
    torch.set_num_threads(job.threads)
    turns = InTurns(line)
    prompts = Dataset.from_list([json.loads(line) for line in Path(job.prompts).read_text().splitlines()])
    trainer = GRPOTrainer(
        model=job.model, reward_funcs=turns.grade, args=grpo_config(job), train_dataset=prompts, callbacks=[turns]
    )
    generate = trainer._generate_and_score_completions

    def timed(inputs: Any) -> Any:
        start = time.perf_counter()
        outputs = generate(inputs)
        turns.rollout_s += time.perf_counter() - start  # rewards included
        return outputs

    trainer._generate_and_score_completions = timed
    trainer.train()


if __name__ == "__main__":
    main()
