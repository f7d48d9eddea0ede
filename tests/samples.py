"""Samples made by hand, for tests that need no model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from practicum import Prompt, Sample
from practicum.types import RoutedExperts, route_dtype


def make_sample(
    prompt: int = 2,
    answer: int = 3,
    *,
    text: str = "",
    truth: str | None = None,
    seed: int = 0,
    id: str = "",
    advantage: float | None = None,
) -> Sample:
    """`prompt` and `answer` are numbers of tokens; `advantage` is that of every token of the answer."""
    random = np.random.default_rng([seed, prompt, answer])
    return Sample(
        prompt=Prompt(f"prompt-{seed}", text="?", answer=truth),
        prompt_ids=random.integers(4, 16, prompt).astype(np.int32),
        token_ids=random.integers(4, 16, answer).astype(np.int32),
        log_probs=-random.random(answer).astype(np.float32),
        loss_mask=np.ones(answer, np.bool_),
        versions=np.zeros(answer, np.int32),
        text=text,
        finish_reason="stop",
        id=id,
        advantages=None if advantage is None else np.full(answer, advantage, np.float32),
    )


def with_routes(sample: Sample, num_layers: int, k: int, num_experts: int, seed: int = 0) -> Sample:
    """Sent anywhere; of the last token nothing is known."""
    random = np.random.default_rng([seed, *sample.id.encode()])
    experts = np.argsort(random.random((sample.num_tokens, num_layers, num_experts)))[..., :k]
    experts = np.sort(experts, axis=-1).astype(route_dtype(num_experts))
    known = np.arange(sample.num_tokens) < sample.num_tokens - 1
    return replace(sample, routes=RoutedExperts(experts, np.arange(num_layers, dtype=np.int32), known, num_experts))
