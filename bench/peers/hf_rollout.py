"""transformers in the `rollout` benchmark, in our own environment: `generate` in one batch, or continuous batching."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack, closing
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from bench.rollout_work import Answer, Case, Job, Prompts, Writer, take_steps

SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
PATIENCE_S = 300.0


def load(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class Generate:
    """All prompts in one batch, padded on the left. It ends all rows together, so the longest answer counts."""

    def __init__(self, folder: str) -> None:
        self._model = load(folder)
        self._model.generation_config = GenerationConfig(**SAMPLING)  # knows no end-of-text token

    @torch.inference_mode()
    def write(self, case: Case, prompts: Prompts) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(case.prompt_lengths)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        written = self._model.generate(
            ids, attention_mask=mask, max_new_tokens=max(case.new_tokens), num_return_sequences=case.num_answers,
            output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
        tokens = written.sequences[:, width:]
        # Not by `compute_transition_scores`, which normalises and copies the scores of all tokens.
        drawn = [
            scores.gather(1, tokens[:, [at]])[:, 0] - scores.logsumexp(1) for at, scores in enumerate(written.scores)
        ]
        return tokens, torch.stack(drawn, 1)

    def answers(self, case: Case, written: tuple[torch.Tensor, torch.Tensor]) -> list[Answer]:
        tokens, log_probs = (part.tolist() for part in written)
        return [(tokens[i][:length], log_probs[i][:length]) for i, length in enumerate(case.lengths())]


class ContinuousBatching:
    """Its manager, kept for each case. On the CPU its rows attend to each other's keys and mask them: few at a time."""

    def __init__(self, folder: str, cases: Iterable[Case] = ()) -> None:
        """Managers for `cases` are made now, others when they are needed."""
        self._folder = folder
        self._managers: dict[tuple[int, int], Any] = {}
        for case in cases:
            self._manager(case)

    def _manager(self, case: Case) -> Any:
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        shape = (max(case.prompt_lengths) + max(case.new_tokens), case.num_answers)
        if shape not in self._managers:
            num_rows, page = len(case.lengths()), 32
            config = ContinuousBatchingConfig(
                return_logprobs=True,
                page_size=page,
                num_blocks=num_rows * (shape[0] // page + 2),  # else it would take nearly all memory there is
                max_requests_per_batch=32,  # 16 to 32 were the fastest; all at once was a quarter slower
            )
            sampling = GenerationConfig(**SAMPLING, eos_token_id=-1, num_return_sequences=case.num_answers)
            model = load(self._folder)  # of its own: a manager changes the attention of its model
            manager = model.init_continuous_batching(sampling, config)
            manager.warmup()
            manager.start()
            self._managers[shape] = manager
        return self._managers[shape]

    def write(self, case: Case, prompts: Prompts) -> list[list[Any]]:
        manager = self._manager(case)
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
        return list(found.values())

    def close(self) -> None:
        """The threads of the managers would keep the process alive."""
        for manager in self._managers.values():
            manager.stop(block=True, timeout=10)

    def answers(self, case: Case, written: list[list[Any]]) -> list[Answer]:
        return [(result.generated_tokens, result.logprobs) for own in written for result in own]


def main() -> None:
    with ExitStack() as stack:

        def make(job: Job, model: str) -> Writer:
            if sys.argv[2] == "generate":
                return Generate(job.models[model])
            own = [case for case in job.cases.values() if case.model == model]
            return stack.enter_context(closing(ContinuousBatching(job.models[model], own)))

        take_steps(["torch", "transformers"], make)


if __name__ == "__main__":
    main()
