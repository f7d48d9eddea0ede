from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from practicum.models import load_model, load_tokenizer
from practicum.rollout.hf import HFRollout
from practicum.types import Prompt, RolloutRequest, Sample, SamplingParams
from practicum.weights import WeightUpdate


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> HFRollout:
    engine = HFRollout(str(tiny_model), device=torch.device("cpu"), dtype=torch.float32, max_batch=5)
    engine.resume()
    return engine


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    return load_model(str(tiny_model)).eval()


def request(tokenizer: Any, text: str, params: SamplingParams, seed: int = 0) -> RolloutRequest:
    return RolloutRequest(Prompt(text, text=text), np.array(tokenizer(text)["input_ids"], np.int32), params, seed)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(str(tiny_model))


TEXTS = ["1+2=", "<user>10+20=<bot>", "7", "99+99="]


def full_forward(model: Any, sample: Sample, temperature: float) -> np.ndarray:
    """Log-probs of the answer by one pass over the whole sequence, as the trainer computes them."""
    ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.token_ids]).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(-1, torch.from_numpy(sample.token_ids.astype(np.int64))[:, None])[:, 0].numpy()


def test_greedy_answers_equal_those_of_generate(engine: HFRollout, model: Any, tokenizer: Any) -> None:
    params = SamplingParams(12, temperature=0.0)
    for sample in engine.generate([request(tokenizer, text, params) for text in TEXTS]):
        ids = torch.from_numpy(sample.prompt_ids.astype(np.int64))[None]
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert sample.token_ids.tolist() == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_log_probs_equal_a_full_forward(engine: HFRollout, model: Any, tokenizer: Any, temperature: float) -> None:
    params = SamplingParams(12, temperature, num_answers=2)
    for sample in engine.generate([request(tokenizer, text, params, seed=3) for text in TEXTS]):
        assert np.abs(sample.log_probs - full_forward(model, sample, temperature)).max() < 2e-5


def test_answers_do_not_depend_on_the_rest_of_the_batch(engine: HFRollout, tokenizer: Any) -> None:
    params = SamplingParams(10, num_answers=3)
    requests = [request(tokenizer, text, params, seed=i) for i, text in enumerate(TEXTS)]
    together = engine.generate(requests)
    alone = [sample for one in reversed(requests) for sample in engine.generate([one])][::-1]
    in_order = [alone[i + 2 - 2 * (i % 3)] for i in range(len(alone))]  # each request's answers were reversed too
    assert [s.token_ids.tolist() for s in together] == [s.token_ids.tolist() for s in in_order]


def test_answers_come_in_order_differ_and_obey_their_own_parameters(engine: HFRollout, tokenizer: Any) -> None:
    short, long = SamplingParams(2, num_answers=2), SamplingParams(20, num_answers=3)
    samples = engine.generate([request(tokenizer, "1+2=", short), request(tokenizer, "7", long, seed=1)])
    assert [s.prompt.id for s in samples] == ["1+2="] * 2 + ["7"] * 3
    assert all(len(s.token_ids) <= 2 for s in samples[:2])
    assert len({tuple(s.token_ids.tolist()) for s in samples[2:]}) == 3


def test_an_answer_ends_with_the_end_of_text_token_or_at_its_length(engine: HFRollout, tokenizer: Any) -> None:
    params = SamplingParams(30, num_answers=20)
    samples = engine.generate([request(tokenizer, "1+2=", params)])
    assert {s.finish_reason for s in samples} == {"stop", "length"}
    for sample in samples:
        ends = sample.token_ids == tokenizer.eos_token_id
        assert ends.sum() == (sample.finish_reason == "stop")
        assert ends[:-1].sum() == 0
        assert len(sample.token_ids) == 30 or sample.finish_reason == "stop"
        assert sample.text == tokenizer.decode(sample.token_ids, skip_special_tokens=True)


def test_new_weights_change_the_answers_and_the_version(tiny_model: Path, tokenizer: Any) -> None:
    engine = HFRollout(str(tiny_model), device=torch.device("cpu"), dtype=torch.float32, max_batch=8)
    other = load_model(str(tiny_model))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    engine.resume()
    ask = [request(tokenizer, "1+2=", SamplingParams(8, temperature=0.0))]
    (before,) = engine.generate(ask)
    for shared in (False, True):
        engine.update_weights(WeightUpdate(4, other.named_parameters(), shared=shared))
        (after,) = engine.generate(ask)
        assert set(after.versions.tolist()) == {4}
        assert np.abs(after.log_probs - full_forward(other.eval(), after, 1.0)).max() < 2e-5
        assert not np.array_equal(after.log_probs, before.log_probs)
    with torch.no_grad():  # shared weights follow the trainer's without a copy
        next(iter(other.parameters())).mul_(3.0)
    (moved,) = engine.generate(ask)
    assert np.abs(moved.log_probs - full_forward(other, moved, 1.0)).max() < 2e-5


def test_released_and_resumed_it_writes_the_same(engine: HFRollout, tokenizer: Any) -> None:
    ask = [request(tokenizer, "1+2=", SamplingParams(8), seed=5)]
    (before,) = engine.generate(ask)
    engine.release()
    with pytest.raises(AssertionError, match="resume"):
        engine.generate(ask)
    engine.resume()
    assert engine.generate(ask)[0].token_ids.tolist() == before.token_ids.tolist()


def test_saved_generation_settings_of_a_model_do_not_bend_the_sampling(
    tiny_model: Path, tokenizer: Any, tmp_path: Path
) -> None:
    from transformers import GenerationConfig

    odd = load_model(str(tiny_model))
    odd.generation_config = GenerationConfig(repetition_penalty=5.0, top_k=1, do_sample=True, eos_token_id=[1, 9])
    odd.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine = HFRollout(str(tmp_path), device=torch.device("cpu"), dtype=torch.float32, max_batch=64)
    engine.resume()
    samples = engine.generate([request(tokenizer, "1+2=", SamplingParams(20, num_answers=32))])
    assert len({int(s.token_ids[0]) for s in samples}) > 3
    for sample in samples:
        assert np.abs(sample.log_probs - full_forward(odd.eval(), sample, 1.0)).max() < 2e-5
        assert not set(sample.token_ids[:-1].tolist()) & {1, 9}  # its own end tokens are kept
