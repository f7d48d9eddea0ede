"""transformers in the `rollout` benchmark, in our own environment: `generate` in one batch, or continuous batching."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from bench.rollout_work import Case, Job, Prompts, Writer, cut, take_steps

SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
PATIENCE_S = 300.0


def load(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def generate(folder: str) -> Writer:
    """Write all prompts in one batch, padded on the left. It ends all rows together, so the longest answer counts."""
    model = load(folder)
    model.generation_config = GenerationConfig(**SAMPLING)  # knows no end-of-text token

    @torch.inference_mode()
    def write(case: Case, prompts: Prompts) -> Any:
        width = max(case.prompt_lengths)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        written = model.generate(
            ids, attention_mask=mask, max_new_tokens=max(case.new_tokens), num_return_sequences=case.num_answers,
            output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
        tokens = written.sequences[:, width:]
        # Not by `compute_transition_scores`, which normalises and copies the scores of all tokens.
        drawn = [
            scores.gather(1, tokens[:, [at]])[:, 0] - scores.logsumexp(1) for at, scores in enumerate(written.scores)
        ]
        log_probs = torch.stack(drawn, 1)
        return lambda: cut(case, tokens.tolist(), log_probs.tolist())

    return write


def continuous_batching(folder: str, stack: ExitStack) -> Writer:
    """Write with its manager, kept for each shape of cases and made in the warm-up; `stack` ends its threads.

    On the CPU its rows attend to each other's keys and mask them: few at a time.
    """

    @cache
    def manager_of(num_rows: int, num_tokens: int, num_answers: int) -> Any:
        page = 32
        config = ContinuousBatchingConfig(
            return_logprobs=True,
            page_size=page,
            num_blocks=num_rows * (num_tokens // page + 2),  # else it would take nearly all memory there is
            max_requests_per_batch=32,  # 16 to 32 were the fastest; all at once was a quarter slower
        )
        sampling = GenerationConfig(**SAMPLING, eos_token_id=-1, num_return_sequences=num_answers)
        manager = load(folder).init_continuous_batching(sampling, config)  # which changes the attention of its model
        manager.warmup()
        manager.start()
        stack.callback(manager.stop, block=True, timeout=10)
        return manager

    def write(case: Case, prompts: Prompts) -> Any:
        num_tokens = max(case.prompt_lengths) + max(case.new_tokens)
        manager = manager_of(len(case.lengths()), num_tokens, case.num_answers)
        requests = [
            manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
            for prompt, length in zip(prompts, case.new_tokens, strict=True)
        ]
        found: dict[str, list[Any]] = {request: [] for request in requests}
        deadline = time.monotonic() + PATIENCE_S
        while any(len(own) < case.num_answers for own in found.values()):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                found[result.request_id.split("__child#")[0]].append(result)
            elif time.monotonic() > deadline or not manager.is_running():
                raise RuntimeError("continuous batching has stopped, or takes too long")
        return lambda: [(result.generated_tokens, result.logprobs) for own in found.values() for result in own]

    return write


def main() -> None:
    with ExitStack() as stack:

        def make(job: Job, model: str) -> Writer:
            folder = job.models[model]
            return generate(folder) if sys.argv[2] == "generate" else continuous_batching(folder, stack)

        take_steps(["torch", "transformers"], make)


if __name__ == "__main__":
    main()
