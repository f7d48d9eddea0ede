"""Ours in the `rollout` benchmark: the native engine, and what is checked of it alone: that it is right (log-probs,
greedy tokens), and how near it comes to the machine's limit."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.contestant import step
from bench.models import layer_weights
from bench.rollout_work import Answer, Case, Job, Prompts, Writer, take_steps
from bench.work import group_of, native_engine, written
from practicum.demo.arithmetic import make_tokenizer
from practicum.models import load_config, load_model
from practicum.rollout.base import BaseRollout
from practicum.types import Sample, SamplingParams
from tests.models import DENSE, MIXED, save_family
from tests.rollout.replicas import ModelWeights

LOG_PROBS, GREEDY, MATRIX_RATE = "log-probs", "greedy", "matrix rate, "
NUM_COMPARED, NUM_GREEDY = 16, 24  # answers of each case, and tokens
QUICK_COMPARED, QUICK_GREEDY = 2, 8
FAMILIES = (*DENSE, *MIXED)


def samples_of(engine: BaseRollout, case: Case, prompts: Prompts) -> list[Sample]:
    lengths = zip(prompts, case.new_tokens, strict=True)
    groups = [
        group_of(i, ids, SamplingParams(length, num_answers=case.num_answers, ignore_eos=True), seed=i)
        for i, (ids, length) in enumerate(lengths)
    ]
    return written(engine, groups)


def native(engine: BaseRollout) -> Writer:
    def write(case: Case, prompts: Prompts) -> Callable[[], list[Answer]]:
        samples = samples_of(engine, case, prompts)
        return lambda: [(sample.token_ids.tolist(), sample.log_probs.tolist()) for sample in samples]

    return write


def main() -> None:
    engines: dict[str, BaseRollout] = {}
    with ExitStack() as stack:

        def make(job: Job, model: str) -> Writer:
            engines[model] = stack.enter_context(native_engine(job.models[model], max_batch=512))
            return native(engines[model])

        def check_step(job: Job, name: str) -> dict[str, Any]:
            def samples(case: Case) -> list[Sample]:
                return samples_of(engines[case.model], case, case.prompts(0, job.vocabulary))

            if name == GREEDY:
                with tempfile.TemporaryDirectory(prefix="bench-families-") as folder:
                    return step(1.0, len(equal_families(Path(folder), QUICK_GREEDY if job.quick else NUM_GREEDY)))
            if name == LOG_PROBS:
                num = QUICK_COMPARED if job.quick else NUM_COMPARED
                cases = job.cases.values()
                return step(1.0, max(largest_difference(job.models[case.model], samples(case), num) for case in cases))
            # What the answers' forward passes need per second, as a share of what large products of matrices reach just
            # before and just after. The engine has written such answers before.
            case = job.cases[name.removeprefix(MATRIX_RATE)]
            measure = quick_matrix_rate if job.quick else matrix_rate
            before, began = measure(), time.perf_counter()
            samples(case)
            seconds, best = time.perf_counter() - began, max(before, measure())
            return step(1.0, needed_flops(case, load_config(job.models[case.model])) / seconds / best)

        take_steps(["practicum", "torch", "transformers"], make, check_step)


# Is it right?


def largest_difference(folder: str, samples: Sequence[Sample], num_compared: int = NUM_COMPARED) -> float:
    """Return that between the log-probs of samples and those of a full forward pass of transformers' model."""
    samples = samples[:: max(1, len(samples) // num_compared)]
    ids = [np.concatenate([sample.prompt_ids, sample.token_ids]) for sample in samples]
    full = asyncio.run(ModelWeights(Path(folder)).log_probs(ids))
    pairs = zip(full, samples, strict=True)
    return max(float(np.abs(own[-len(s.log_probs) :] - s.log_probs)[s.loss_mask].max()) for own, s in pairs)


def equal_families(folder: Path, num_tokens: int = NUM_GREEDY) -> list[str]:
    """Return the families of which a tiny model writes the same greedy tokens as with `generate`."""
    chance = np.random.default_rng(0)
    prompts = [chance.integers(len(make_tokenizer()), size=length) for length in (3, 11, 17, 6)]
    params, equal = SamplingParams(num_tokens, temperature=0.0, ignore_eos=True), []
    for family in FAMILIES:
        model = load_model(str(save_family(family, folder / family))).eval()
        with native_engine(folder / family, max_batch=len(prompts)) as native:
            samples = written(native, [group_of(i, ids, params, seed=i) for i, ids in enumerate(prompts)])
        if [sample.token_ids.tolist() for sample in samples] == [_greedy(model, ids, num_tokens) for ids in prompts]:
            equal.append(family)
    return equal


@torch.inference_mode()
def _greedy(model: Any, prompt: Any, num_tokens: int) -> list[int]:
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(pad_token_id=0, do_sample=False)  # none that ends it early
    ids = torch.from_numpy(prompt)[None]
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens)[0, len(prompt) :]
    return [int(token) for token in tokens]


# How near is it to the machine's limit?


def matrix_rate() -> float:
    """Return the operations per second of products of large float32 matrices on the cores that torch uses."""
    size, end = 2048, time.perf_counter() + 0.15
    one, other = torch.randn(2, size, size)
    product = torch.empty_like(one)
    best = 0.0
    while best == 0.0 or time.perf_counter() < end:
        began = time.perf_counter()
        torch.mm(one, other, out=product)
        best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best


quick_matrix_rate = cache(matrix_rate)  # once for all cases


def needed_flops(case: Case, config: Any) -> float:
    """Return those of the forward passes that a case needs, if each prompt is read once and nothing is padded."""
    layers = config.num_hidden_layers
    per_token = 2 * layers * layer_weights(config, getattr(config, "num_experts_per_tok", 0))
    per_seen = 4 * layers * config.num_attention_heads * config.head_dim  # queries with one key, weights with one value
    per_logits = 2 * config.hidden_size * config.vocab_size
    total = 0.0
    for prompt, new in zip(case.prompt_lengths, case.new_tokens, strict=True):
        total += prompt * (per_token + per_seen * (prompt + 1) / 2) + per_logits  # each sees itself and all before it
        written = new - 1  # the last token has been through no layer
        total += case.num_answers * written * (per_token + per_logits + per_seen * (prompt + (written + 1) / 2))
    return total


if __name__ == "__main__":
    main()
