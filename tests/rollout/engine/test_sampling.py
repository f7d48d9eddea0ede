from __future__ import annotations

import pytest
import torch

from practicum.errors import TrainingError
from practicum.rollout.engine.sampling import draw
from practicum.rollout.engine.sequence import uniforms
from practicum.types import SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")])


def frequencies(params: SamplingParams, num_draws: int = 40_000) -> torch.Tensor:
    tokens, _ = draw(LOGITS.expand(num_draws, -1), torch.from_numpy(uniforms(7, 0, num_draws)), params)
    return torch.bincount(tokens, minlength=len(LOGITS)) / num_draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_with_their_probabilities(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1)
    assert frequencies(SamplingParams(1, temperature)).tolist() == pytest.approx(expected.tolist(), abs=0.01)


def test_top_k_and_top_p_leave_the_likeliest_tokens() -> None:
    kept = LOGITS[:2].softmax(-1).tolist()
    assert frequencies(SamplingParams(1, top_k=2)).tolist() == pytest.approx([*kept, 0, 0, 0], abs=0.01)
    # 0.64 + 0.24 < 0.9: the third token is the one with which the sum passes top_p.
    assert frequencies(SamplingParams(1, top_p=0.9)).tolist() == pytest.approx(
        [*LOGITS[:3].softmax(-1).tolist(), 0, 0], abs=0.01
    )
    assert frequencies(SamplingParams(1, top_p=0.01)).tolist() == [1, 0, 0, 0, 0]


def test_log_probs_are_those_after_temperature_before_filters() -> None:
    tokens, log_probs = draw(LOGITS[None], torch.tensor([0.0]), SamplingParams(1, 0.5, top_p=0.1, top_k=1))
    assert tokens.tolist() == [0]
    assert log_probs[0].item() == pytest.approx((LOGITS / 0.5).log_softmax(-1)[0].item())


def test_temperature_zero_takes_the_largest() -> None:
    tokens, log_probs = draw(LOGITS[None], torch.tensor([0.999]), SamplingParams(1, 0.0))
    assert tokens.tolist() == [0]
    assert log_probs[0].item() == pytest.approx(LOGITS.log_softmax(-1)[0].item())


def test_the_largest_uniform_number_never_picks_an_impossible_token() -> None:
    almost_one = torch.tensor([torch.finfo(torch.float32).eps]).neg() + 1
    tokens, _ = draw(LOGITS[None], almost_one, SamplingParams(1))
    assert tokens.item() <= 3


def test_logits_that_are_no_numbers_are_named() -> None:
    with pytest.raises(TrainingError, match="no longer numbers"):
        draw(torch.tensor([[0.0, float("nan"), 1.0]]), torch.tensor([0.5]), SamplingParams(1))
