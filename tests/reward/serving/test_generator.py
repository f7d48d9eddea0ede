from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from practicum.reward.serving.generator import Generator
from practicum.rollout.hf import HFRollout
from practicum.types import Message, Prompt, RolloutRequest, SamplingParams

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def generator(tiny_model: Path) -> Generator:
    return Generator(str(tiny_model), device=CPU, dtype=torch.float32, max_batch_tokens=64)


def request(generator: Generator, text: str, params: SamplingParams, seed: int = 0) -> RolloutRequest:
    ids = generator.encoder.chat([Message("user", text)], ready_for_answer=True)
    return RolloutRequest(Prompt(text, text=text), ids, params, seed)


def test_it_writes_what_the_rollout_writes_few_rows_at_a_time(generator: Generator, tiny_model: Path) -> None:
    params = SamplingParams(10, num_answers=5)  # 5 x 17 tokens are more than 64
    requests = [request(generator, text, params, seed=i) for i, text in enumerate(["1+2=", "99+99=", "7"])]
    engine = HFRollout(str(tiny_model), device=CPU, dtype=torch.float32, max_batch=100)
    engine.resume()
    expected = [sample.token_ids.tolist() for sample in engine.generate(requests)]
    answers = generator.answers(requests)
    assert [len(samples) for samples in answers] == [5, 5, 5]  # type: ignore[arg-type]
    assert [sample.token_ids.tolist() for samples in answers for sample in samples] == expected  # type: ignore[union-attr]


def test_asleep_it_has_no_weights_and_awake_it_writes_the_same(generator: Generator) -> None:
    asked = [request(generator, "1+2=", SamplingParams(8), seed=3)]
    before = generator.answers(asked)
    generator.release()
    assert not generator.weights.is_awake
    generator.release()
    with pytest.raises(AssertionError, match="resume"):
        generator.generate(asked)
    generator.resume()
    generator.resume()
    after = generator.answers(asked)
    assert np.array_equal(after[0][0].log_probs, before[0][0].log_probs)  # type: ignore[index]
