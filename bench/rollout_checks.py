"""What is asked of the native engine without a peer: that it is right, and how near it comes to the machine's limit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.rollout_work import Case
from practicum import Sample
from practicum.controller.loop import run_sync
from practicum.demo.arithmetic import make_tokenizer
from practicum.rollout.native import NativeRollout
from practicum.types import Prompt, PromptGroup, SamplingParams

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # so that the next token is not a toss-up
}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 8},
    "qwen3_moe": {"head_dim": 16, **_EXPERTS},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": _EXPERTS,
    "deepseek_v3": {**_ROUTED, **_LATENT, "n_group": 2, "topk_group": 1},
    "glm4_moe": {**_ROUTED, "head_dim": 16, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
}
_PROMPT_LENGTHS, NUM_GREEDY = (3, 11, 17, 6), 24
NUM_COMPARED = 16  # answers of each case
_MATRIX_SIZE, _MATRIX_S = 2048, 0.15


# Log-probs


@torch.inference_mode()
def largest_difference(samples: Sequence[tuple[str, Sequence[Sample]]], num_compared: int = NUM_COMPARED) -> float:
    """Between the log-probs of samples and those of a full forward pass of transformers' model in their folder."""
    from transformers import AutoModelForCausalLM

    found, models = [], {}
    for folder, own in samples:
        if folder not in models:
            models[folder] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for sample in own[:: max(1, len(own) // num_compared)]:
            ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.token_ids]).astype(np.int64))
            first = len(sample.prompt_ids)
            logits = models[folder](input_ids=ids[None], use_cache=False).logits[0, first - 1 : -1]
            full = logits.log_softmax(-1).gather(-1, ids[first:, None])[:, 0]
            found.append(float((full - torch.from_numpy(sample.log_probs)).abs().max()))
    return max(found)


# Greedy tokens


def equal_families(folder: Path, num_tokens: int = NUM_GREEDY) -> list[str]:
    """The families of which a tiny model writes the same greedy tokens as with `generate`."""
    return [family for family in FAMILIES if _is_equal(family, folder / family, num_tokens)]


@torch.inference_mode()
def _is_equal(family: str, folder: Path, num_tokens: int) -> bool:
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = make_tokenizer()
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    options = {**SIZES, **FAMILIES[family], **special, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options)).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    chance = np.random.default_rng(0)
    prompts = [chance.integers(len(tokenizer), size=length) for length in _PROMPT_LENGTHS]
    expected = [_greedy(model, prompt, num_tokens) for prompt in prompts]
    native = NativeRollout(str(folder), device=torch.device("cpu"), dtype=torch.float32, max_batch=len(prompts))
    run_sync(native.resume())
    params = SamplingParams(num_tokens, temperature=0.0, ignore_eos=True)
    groups = [
        PromptGroup(str(i), Prompt(str(i), text="-"), ids.astype(np.int32), params, i) for i, ids in enumerate(prompts)
    ]
    return [group.trajectories[0].last.token_ids.tolist() for group in native.generate_all(groups)] == expected


def _greedy(model: Any, prompt: Any, num_tokens: int) -> list[int]:
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(pad_token_id=0, do_sample=False)  # none that ends it early
    ids = torch.from_numpy(prompt)[None]
    written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens)
    tokens: list[int] = written[0, len(prompt) :].tolist()
    return tokens


# The matrix rate


def matrix_share(
    case: Case, folder: str, write: Callable[[], Any], measure: Callable[[], float] | None = None
) -> float:
    """What the answers' forward passes need, per second, as a share of what large products of matrices reach.

    For an engine that has written such answers before. `measure` tells what they reach, just before and just after.
    """
    measure = measure or matrix_rate
    before = measure()
    began = time.perf_counter()
    write()
    seconds = time.perf_counter() - began
    return needed_flops(case, json.loads((Path(folder) / "config.json").read_text())) / seconds / max(before, measure())


def matrix_rate() -> float:
    """Operations per second of products of large float32 matrices on the cores that torch uses; the best of some."""
    one, other = torch.randn(2, _MATRIX_SIZE, _MATRIX_SIZE)
    product = torch.empty_like(one)
    best, end = 0.0, time.perf_counter() + _MATRIX_S
    while best == 0.0 or time.perf_counter() < end:
        began = time.perf_counter()
        torch.mm(one, other, out=product)
        best = max(best, 2 * _MATRIX_SIZE**3 / (time.perf_counter() - began))
    return best


def needed_flops(case: Case, config: dict[str, Any]) -> float:
    """Of the forward passes that a case needs, if each prompt is read once and nothing is padded."""
    hidden, layers, wide = config["hidden_size"], config["num_hidden_layers"], config["head_dim"]
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    attention = hidden * wide * (2 * heads + 2 * key_heads)
    if "num_experts" in config:
        experts = config["num_experts_per_tok"] * 3 * hidden * config["moe_intermediate_size"]
        mlp = experts + hidden * config["num_experts"]
    else:
        mlp = 3 * hidden * config["intermediate_size"]
    per_token = 2 * layers * (attention + mlp)
    per_seen = 4 * layers * heads * wide  # a token's queries with one key, and its weight with one value
    per_logits = 2 * hidden * config["vocab_size"]
    total = 0.0
    for prompt, new in zip(case.prompt_lengths, case.new_tokens, strict=True):
        total += prompt * per_token + per_logits + per_seen * _seen(0, prompt)
        written = new - 1  # the last token has been through no layer
        total += case.num_answers * (written * (per_token + per_logits) + per_seen * _seen(prompt, prompt + written))
    return total


def _seen(first: int, end: int) -> float:
    """How many tokens those from `first` up to `end` attend to, all together: each to itself and all before it."""
    return (end * (end + 1) - first * (first + 1)) / 2
