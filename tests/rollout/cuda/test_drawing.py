"""Drawing on the device against drawing one way at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from practicum.rollout.sampling import draw as slow_draw
from practicum.rollout.sampling import uniforms

from practicum.types import SamplingParams
from tests.rollout.cuda.kernels import DEVICE, ints, random

from practicum.rollout.cuda.drawing import draw  # isort: skip

WAYS = [
    SamplingParams(50, 1.0),
    SamplingParams(50, 0.7),
    SamplingParams(50, 0.0),
    SamplingParams(50, 1.3, top_k=20),
    SamplingParams(50, 0.9, top_p=0.8),
    SamplingParams(50, 1.0, top_k=50, top_p=0.5),
]
SEEDS = [(2**64 - 5, 0), (7, 1), (3, 2), (1 << 40, 3), (11, 2**33), (5, 0)]


@pytest.mark.parametrize("number", [0, 1, 7, 8, 30])
def test_tokens_are_drawn_as_ever(number: int) -> None:
    """With NumPy's own random numbers: the same tokens as one way at a time."""
    logits, slots, noise = random(6, 9000) * 3, [4, 1, 2, 7, 0, 5], uniforms(SEEDS, 50)

    def by_slot(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        own = torch.zeros(9, dtype=dtype, device=DEVICE)
        own[slots] = torch.tensor(values, device=DEVICE).to(dtype)
        return own

    def signed(values: list[int]) -> list[int]:
        return [value - (1 << 64) if value >= 1 << 63 else value for value in values]

    positions, tokens = by_slot([3 + number - 1] * 6, torch.int32), by_slot([0] * 6, torch.int64)
    out_tokens, out_log_probs = ints([0] * 6), random(6)
    draw(
        logits, ints(slots), 8,
        by_slot([way.temperature for way in WAYS], torch.float32), by_slot([way.top_k for way in WAYS], torch.int32),
        by_slot([way.top_p for way in WAYS], torch.float32),
        by_slot(signed([seed for seed, _ in SEEDS]), torch.int64), by_slot([a for _, a in SEEDS], torch.int64),
        by_slot([3] * 6, torch.int32), positions, tokens, out_tokens, out_log_probs, narrows=True,
    )  # fmt: skip
    for row, way in enumerate(WAYS):
        token, log_prob = slow_draw(logits[row : row + 1].cpu(), noise[row : row + 1, number], way)
        assert out_tokens[row] == tokens[slots[row]] == token.item()
        assert abs(out_log_probs[row].item() - log_prob.item()) < 1e-4
        assert positions[slots[row]] == 3 + number


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize(("words", "broken"), [(100, [7]), (9001, [9000]), (9001, list(range(9001)))])
def test_logits_that_are_no_numbers_are_told(temperature: float, words: int, broken: list[int]) -> None:
    logits = random(1, words)
    logits[0, broken] = float("nan")
    one, zero = torch.ones(2, device=DEVICE), ints([0, 0])
    seeds, out, tokens = torch.zeros(2, dtype=torch.int64, device=DEVICE), random(1), ints([0])
    draw(
        logits, ints([0]), 1, one * temperature, zero, one, seeds, seeds, zero, zero.clone(), seeds.clone(), tokens,
        out, narrows=False,
    )  # fmt: skip
    assert out.isnan().all()
    assert 0 <= tokens.item() < words  # the next step looks it up
