from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from practicum.errors import RolloutError
from practicum.models import eos_ids, load_model
from practicum.rollout.engine.loop import LocalRollout
from practicum.rollout.hf import HFRollout
from practicum.types import Prompt, PromptGroup, SamplingParams
from practicum.weights import WeightUpdate
from tests.rollout.contract import run, written

IDS = np.array([5, 14, 6, 15], np.int32)


@pytest.fixture
def engine(tiny_model: Path) -> LocalRollout:
    return HFRollout(str(tiny_model), device=torch.device("cpu"), dtype=torch.float32, max_batch=4)


def other_model(path: Path, factor: float) -> Any:
    model = load_model(str(path)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(factor)
    return model


def num_weights(engine: LocalRollout) -> int:
    return sum(parameter.numel() for parameter in engine.model.module.parameters())


def expected(model: Any) -> np.ndarray:
    ids = torch.from_numpy(IDS.astype(np.int64))
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1].log_softmax(-1)
    return logits.gather(-1, ids[1:, None])[:, 0].numpy()


def test_a_token_it_does_not_know_is_refused_before_anything_is_written(engine: LocalRollout) -> None:
    run(engine.resume())
    foreign = PromptGroup("q", Prompt("q", text="?"), np.array([5, 99], np.int32), SamplingParams(2), seed=0)
    with pytest.raises(RolloutError, match=r"prompt q has token 99, but model .* knows 18 tokens"):
        written(engine, [foreign])


def test_released_it_has_no_weights_and_resumed_the_same(engine: LocalRollout) -> None:
    run(engine.resume())
    (before,) = run(engine.log_probs([IDS]))
    for _ in range(2):
        run(engine.release())
        run(engine.release())
        assert num_weights(engine) == 0
        with pytest.raises(AssertionError, match="resume"):
            run(engine.log_probs([IDS]))
        run(engine.resume())
        assert np.array_equal(run(engine.log_probs([IDS]))[0], before)


def test_weights_that_came_by_an_update_outlast_a_release(engine: LocalRollout, tiny_model: Path) -> None:
    run(engine.resume())
    for version, factor in ((1, 1.5), (2, 0.5)):
        other = other_model(tiny_model, factor)
        run(engine.update_weights(WeightUpdate(version, other.named_parameters(), shared=False)))
        run(engine.release())
        assert num_weights(engine) == 0
        run(engine.resume())
        assert np.abs(run(engine.log_probs([IDS]))[0] - expected(other)).max() < 2e-5


def test_a_released_engine_may_be_given_weights(engine: LocalRollout, tiny_model: Path) -> None:
    run(engine.resume())
    run(engine.release())
    other = other_model(tiny_model, 1.5)
    run(engine.update_weights(WeightUpdate(1, other.named_parameters(), shared=False)))
    run(engine.resume())
    assert np.abs(run(engine.log_probs([IDS]))[0] - expected(other)).max() < 2e-5


def test_weights_of_the_trainer_are_not_given_back(engine: LocalRollout, tiny_model: Path) -> None:
    run(engine.resume())
    run(engine.release())
    other = other_model(tiny_model, 1.5)
    run(engine.update_weights(WeightUpdate(1, other.named_parameters(), shared=True)))
    run(engine.resume())
    run(engine.release())
    assert all(parameter.numel() for parameter in other.parameters())
    run(engine.resume())
    assert np.abs(run(engine.log_probs([IDS]))[0] - expected(other)).max() < 2e-5


def test_what_is_too_long_is_refused(engine: LocalRollout) -> None:
    with pytest.raises(ValueError, match="room for 64"):
        engine.check(PromptGroup("p", Prompt("p", text="1"), IDS, SamplingParams(61), seed=0))
    engine.check(PromptGroup("p", Prompt("p", text="1"), IDS, SamplingParams(60), seed=0))


def test_told_to_stay_loaded_it_keeps_its_weights_on_a_cpu(tiny_model: Path) -> None:
    engine = HFRollout(
        str(tiny_model), device=torch.device("cpu"), dtype=torch.bfloat16, max_batch=4, stays_loaded=True
    )
    run(engine.resume())
    run(engine.release())
    assert num_weights(engine) > 0
    with pytest.raises(AssertionError, match="resume"):
        run(engine.log_probs([IDS]))


def test_all_ends_of_text_count(model: Any, tokenizer: Any) -> None:
    own = int(tokenizer.eos_token_id)
    before = model.generation_config.eos_token_id
    try:
        for declared, expected in ((None, {own}), (own, {own}), ([own, 9], {own, 9})):
            model.generation_config.eos_token_id = declared
            assert set(eos_ids(model.generation_config, tokenizer)) == expected
    finally:
        model.generation_config.eos_token_id = before
