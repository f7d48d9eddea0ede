"""Samples made by hand, for tests that need no model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from practicum import Prompt, Sample, SamplingParams, Score
from practicum.types import PromptGroup, RoutedExperts, route_dtype


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


def make_group(
    *rewards: float | None,
    id: str = "1/0",
    text: str = "",
    source: str = "",
    answer: int = 3,
    baseline: float | None = None,
) -> PromptGroup:
    """A finished and graded group, one trajectory for each reward; None is one that could not be graded."""
    scores = [Score(None, status="invalid", reason="?") if reward is None else Score(reward) for reward in rewards]
    return graded_group(*((text, score) for score in scores), id=id, source=source, answer=answer, baseline=baseline)


def graded_group(
    *answers: tuple[str, Score], id: str = "1/0", source: str = "", answer: int = 3, baseline: float | None = None
) -> PromptGroup:
    """A finished group, from the text and the score of each trajectory."""
    prompt = Prompt(f"prompt-{id}", text="?", data_source=source)
    params = SamplingParams(answer, num_answers=len(answers))
    group = PromptGroup(id, prompt, np.array([4, 5], np.int32), params, seed=0, baseline=baseline)
    for trajectory, (text, score) in zip(group.trajectories, answers, strict=True):
        sample = make_sample(answer=answer, text=text, seed=trajectory.number)
        sample.prompt = prompt
        trajectory.add(sample)
        trajectory.score = score
    return group


def with_routes(sample: Sample, num_layers: int, k: int, num_experts: int, seed: int = 0) -> Sample:
    """Sent anywhere; of the last token nothing is known."""
    random = np.random.default_rng([seed, *sample.id.encode()])
    experts = np.argsort(random.random((sample.num_tokens, num_layers, num_experts)))[..., :k]
    experts = np.sort(experts, axis=-1).astype(route_dtype(num_experts))
    known = np.arange(sample.num_tokens) < sample.num_tokens - 1
    return replace(sample, routes=RoutedExperts(experts, np.arange(num_layers, dtype=np.int32), known, num_experts))
