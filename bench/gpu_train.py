"""The trainer's part of `python -m bench.gpu`: how fast it learns, and how far it is from the engine."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.harness import Row
from bench.replay_exact import replay_settings
from bench.replay_work import actor_settings
from practicum.controller import LocalWorkerGroup, RayClassWithInitArgs
from practicum.data import plan_micro_batches
from practicum.models import load_config
from practicum.train import ActorWorker, MiniBatch, UpdateStats, totals_of
from practicum.types import Prompt, Sample, Score

MICRO_BATCH_TOKENS = 32_768


def mini_batches(samples: Sequence[Sample], step: int, budget: int) -> list[list[MiniBatch]]:
    """Return the one mini-batch of the one rank, with advantages of both signs."""
    for place, sample in enumerate(samples):
        sample.id, sample.score = f"{step}/{place}/0", Score(1.0)
        sample.advantages = np.full(len(sample.token_ids), (-1.0) ** place, np.float32)
    (plan,) = plan_micro_batches([sample.num_tokens for sample in samples], 1, budget)
    longest = max(len(sample.token_ids) for sample in samples)
    micro_batches = [[samples[i] for i in micro] for micro in plan]
    return [[MiniBatch(micro_batches, totals_of(samples, longest), len(samples))]]


@contextmanager
def learner(model: Path, **changed: Any) -> Any:
    settings = actor_settings(model, threads=8, device="cuda", compute_dtype="bfloat16", **changed)
    group = LocalWorkerGroup(RayClassWithInitArgs(ActorWorker, settings), name="learner")
    try:
        yield group
    finally:
        group.shutdown()
        del group
        gc.collect()
        torch.cuda.empty_cache()


def update(group: Any, samples: Sequence[Sample], step: int, budget: int = MICRO_BATCH_TOKENS) -> UpdateStats:
    (stats,) = group.map(ActorWorker.update, mini_batches(samples, step, budget), step)
    return stats  # type: ignore[no-any-return]


def random_samples(num: int, prompt: int, new: int, words: int = 2000) -> list[Sample]:
    random = np.random.default_rng(0)
    return [
        Sample(
            Prompt(str(i), text="?"),
            random.integers(2, words, prompt).astype(np.int32),
            random.integers(2, words, new).astype(np.int32),
            np.full(new, -7.6, np.float32),
            np.ones(new, np.bool_),
            np.zeros(new, np.int32),
            "",
            "length",
        )
        for i in range(num)
    ]


def train_rows(model: Path, case: str, *, quick: bool, peer: bool) -> list[Row]:
    num, prompt, new = (8, 16, 24) if quick else (256, 128, 256)
    samples = random_samples(num, prompt, new)
    num_tokens = num * (prompt + new)
    rows = []
    with learner(model) as group:
        update(group, samples, 1)
        torch.cuda.reset_peak_memory_stats()
        seconds = []
        for step in range(2, 5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            update(group, samples, step)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        peak = torch.cuda.max_memory_allocated()
    theirs = _plain_rate(model, 32 if not quick else 4, prompt + new) if peer else None
    name = "a plain step" if peer else None
    rows.append(Row(f"train {case}", "tokens/s", num_tokens / statistics.median(seconds), theirs, name))
    rows.append(Row(f"train {case}", "peak GB", peak / 1e9, better="lower"))
    return rows


def _plain_rate(model: Path, num: int, length: int) -> float:
    """Of transformers' model in bfloat16 with AdamW: a forward and a backward pass over all tokens, and an update."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).cuda().train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-6)
    ids = torch.randint(2, 2000, (num, length), device="cuda")
    seconds = []
    for _ in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        plain(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    del plain, optimizer
    gc.collect()
    torch.cuda.empty_cache()
    return num * length / statistics.median(seconds[2:])


def agreement_rows(model: Path, case: str, samples: Sequence[Sample], greedy: Sequence[Sample]) -> list[Row]:
    rows = _greedy_rows(model, case, greedy)
    modes: list[str | None] = [None, "R3"] if case == "moe" else [None]
    for mode in modes:
        label = f"agreement {case}" + ("" if mode is None else f" {mode}")
        own = samples if mode == "R3" else [replace(sample, routes=None) for sample in samples]
        replay = None if mode is None else replay_settings(mode, model.parent)
        with learner(model, replay=replay) as group:
            stats = update(group, own, 1)
        rows += [
            Row(label, "KL(rollout|trainer) a token", stats.rollout_kl / stats.num_tokens, better="lower"),
            Row(label, "largest log-prob difference", stats.rollout_gap, better="lower"),
        ]
        if stats.replay is not None:
            share = sum(stats.replay.differing) / max(1, stats.replay.num_known * len(stats.replay.layers))
            rows.append(Row(label, "share of choices that the trainer would make otherwise", share, better="lower"))
    return rows


def _greedy_rows(model: Path, case: str, samples: Sequence[Sample]) -> list[Row]:
    """How many greedy tokens are those of the largest logit by transformers, after the same tokens; and those of the
    rest whose logits are no further apart than bfloat16's rounding."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).cuda().eval()
    num = same = tied = 0
    with torch.inference_mode():
        for sample in samples:
            ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.token_ids])).long().cuda()
            logits = theirs(input_ids=ids[None], use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1].float()
            chosen = ids[len(sample.prompt_ids) :]
            best = logits.max(-1)
            is_same = best.indices == chosen
            gap = best.values - logits.gather(-1, chosen[:, None])[:, 0]
            num, same = num + len(chosen), same + int(is_same.sum())
            tied += int((~is_same & (gap <= _ROUNDING * best.values.abs())).sum())
    del theirs
    gc.collect()
    torch.cuda.empty_cache()
    assert load_config(str(model)).vocab_size == logits.shape[-1]
    return [
        Row(f"agreement {case}", "share of greedy tokens that are transformers'", same / num),
        Row(f"agreement {case}", "share of the others that are ties within rounding", tied / max(1, num - same)),
    ]


_ROUNDING = 2.0**-6  # of bfloat16 logits that were summed in another order
