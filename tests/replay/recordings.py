"""Recordings made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from practicum.replay.format import RecordingHeader
from practicum.replay.records import RecordedSample
from practicum.replay.store import RouteWriter
from practicum.types import Message, Prompt, RoutedExperts, Sample, Score, route_dtype

HEADER = RecordingHeader("qwen3_moe-1f2e3d4c", (1, 2, 5), 8, 2, "tokenizer-77", made={"transformers": "5.22"})


def make_record(
    id: str,
    step: int = 0,
    place: int = 0,
    *,
    prompt: int = 3,
    answer: int = 5,
    header: RecordingHeader = HEADER,
    seed: int = 0,
    spread: float = 1.0,
) -> RecordedSample:
    """`prompt` and `answer` are numbers of tokens; experts with high numbers are rarer the smaller `spread` is."""
    random = np.random.default_rng([seed, step, place, prompt, answer, *id.encode()])
    log_probs = -random.random(answer).astype(np.float32)
    log_probs[::4] = np.nan
    sample = Sample(
        prompt=Prompt(
            f"prompt-{place}", messages=(Message("user", f"What is {place}?"),), answer=place, data_source="sums"
        ),
        prompt_ids=random.integers(0, 150_000, prompt).astype(np.int32),
        token_ids=random.integers(0, 150_000, answer).astype(np.int32),
        log_probs=log_probs,
        loss_mask=random.random(answer) < 0.8,
        versions=random.integers(-1, 3, answer).astype(np.int32),
        text=f"the answer of {id} \ud800 é",
        finish_reason="stop" if answer else "abort",
        id=id,
        score=Score(0.1, {"length": float(answer)}) if place % 3 else Score.failed("timeout", "took 11 s"),
        advantages=np.full(answer, random.normal(), np.float32),
    )
    return RecordedSample(step, place, sample, make_routes(prompt + answer, header, random, spread))


def make_routes(num_tokens: int, header: RecordingHeader, random: Any, spread: float = 1.0) -> RoutedExperts:
    scores = random.random((num_tokens, len(header.layers), header.num_experts))
    scores *= np.exp(np.arange(header.num_experts) * (1 - spread))
    experts = np.sort(np.argsort(scores, axis=-1)[..., : header.k], axis=-1).astype(route_dtype(header.num_experts))
    known = np.arange(num_tokens) < num_tokens - 1
    experts[~known] = 0  # no combination, and it means nothing
    return RoutedExperts(experts, np.array(header.layers, np.int32), known, header.num_experts)


def make_batch(step: int, num: int, **options: Any) -> list[RecordedSample]:
    return [make_record(f"{step}-{place}", step, place, **options) for place in range(num)]


def write(
    path: Path, records: Sequence[RecordedSample], header: RecordingHeader = HEADER, chunk_tokens: int = 40
) -> Path:
    with RouteWriter(path, header, chunk_tokens) as writer:
        writer.append(records)
    return path


def same(one: RecordedSample, other: RecordedSample) -> bool:
    """To the last bit, also of NaN."""
    arrays = ("prompt_ids", "token_ids", "log_probs", "loss_mask", "versions", "advantages")
    pairs = [(getattr(one.sample, name), getattr(other.sample, name)) for name in arrays]
    words = [
        (
            r.id,
            r.step,
            r.place,
            r.score,
            r.sample.prompt,
            r.sample.text,
            r.sample.finish_reason,
        )
        for r in (one, other)
    ]
    return (
        words[0] == words[1]
        and all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in pairs)
        and same_routes(one.routes, other.routes)
    )


def same_routes(one: RoutedExperts, other: RoutedExperts) -> bool:
    return (
        np.array_equal(one.known, other.known)
        and np.array_equal(one.layers, other.layers)
        and one.num_experts == other.num_experts
        and one.experts.dtype == other.experts.dtype
        and np.array_equal(one.experts[one.known], other.experts[other.known])
    )
