from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from practicum.models import load_model
from practicum.rollout.hf import HFRollout
from practicum.types import PromptGroup, SamplingParams
from practicum.weights import WeightUpdate
from tests.rollout.contract import CLOSE, EngineContract, full_forward, group_of, run, written

CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[HFRollout]:
    engine = HFRollout(str(tiny_model), **CPU, max_batch=5)
    run(engine.resume())
    yield engine
    run(engine.close())


class TestContract(EngineContract):
    pass


def test_shared_weights_follow_the_trainers_without_a_copy(tiny_model: Path, tokenizer: Any) -> None:
    engine = HFRollout(str(tiny_model), **CPU, max_batch=5)
    theirs = load_model(str(tiny_model)).eval()
    run(engine.update_weights(WeightUpdate(1, theirs.named_parameters(), shared=True)))
    run(engine.resume())
    for _ in range(2):
        with torch.no_grad():
            next(iter(theirs.parameters())).mul_(3.0)
        (sample,) = written(engine, [group_of(tokenizer, "1+2=", SamplingParams(8))])
        assert np.abs(sample.log_probs - full_forward(theirs, sample, 1.0)).max() < CLOSE


def test_saved_generation_settings_of_a_model_do_not_bend_the_sampling(
    tiny_model: Path, tokenizer: Any, tmp_path: Path
) -> None:
    from transformers import GenerationConfig

    odd = load_model(str(tiny_model))
    odd.generation_config = GenerationConfig(repetition_penalty=5.0, top_k=1, do_sample=True, eos_token_id=[1, 9])
    odd.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine = HFRollout(str(tmp_path), device=torch.device("cpu"), dtype=torch.float32, max_batch=64)
    run(engine.resume())
    samples = written(engine, [group_of(tokenizer, "1+2=", SamplingParams(20, num_answers=32))])
    assert len({int(s.token_ids[0]) for s in samples}) > 3
    for sample in samples:
        assert np.abs(sample.log_probs - full_forward(odd.eval(), sample, 1.0)).max() < 2e-5
        assert not set(sample.token_ids[:-1].tolist()) & {1, 9}  # its own end tokens are kept


def test_long_answers_are_written_few_at_a_time(engine: HFRollout, tiny_model: Path, tokenizer: Any) -> None:
    """With a limit of tokens batches are smaller, and the answers the same."""
    params = SamplingParams(10, num_answers=5)  # 5 x 17 tokens are more than 64

    def groups() -> list[PromptGroup]:
        return [group_of(tokenizer, text, params, seed=i) for i, text in enumerate(["1+2=", "99+99=1", "7"])]

    narrow = HFRollout(
        str(tiny_model), device=torch.device("cpu"), dtype=torch.float32, max_batch=100, max_batch_tokens=64
    )
    run(narrow.resume())
    widths: list[int] = []
    narrow.model.module.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    samples = written(narrow, groups())
    assert [s.token_ids.tolist() for s in samples] == [s.token_ids.tolist() for s in written(engine, groups())]
    assert max(widths) <= 64


def test_the_batch_lasts_until_its_last_answer_and_the_next_has_other_parameters(
    tiny_model: Path, tokenizer: Any
) -> None:
    engine = HFRollout(str(tiny_model), **CPU, max_batch=3)
    run(engine.resume())
    rows: list[int] = []
    engine.model.module.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    long, short = SamplingParams(4, num_answers=4, ignore_eos=True), SamplingParams(2, ignore_eos=True)
    samples = written(engine, [group_of(tokenizer, "7", long), group_of(tokenizer, "1+2=", short)])
    assert [len(sample.token_ids) for sample in samples] == [4] * 4 + [2]
    assert rows == [3] * 4 + [1] * 4 + [1] * 2
    run(engine.close())
