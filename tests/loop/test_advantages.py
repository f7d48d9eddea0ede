from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from practicum.config import AlgorithmConfig
from practicum.errors import RewardError
from practicum.loop.advantages import Batch, graded_batch, share_with_signal, variance_explained, with_advantages
from practicum.reward.desks import Graded
from practicum.reward.graded import GradedBatch, GradingReport
from practicum.types import Score, TrainingSample
from tests.samples import make_training_sample

GROUPS = np.array([0, 0, 1, 1])


def batch_of(*rewards: float | None, **arrays: Any) -> Batch:
    """Answers of three tokens, the second not the model's own."""
    return [None if reward is None else item(place, reward, **arrays) for place, reward in enumerate(rewards)]


def item(place: int, reward: float, **arrays: Any) -> TrainingSample:
    made = make_training_sample(2, 3, seed=place)
    mask = np.array([True, False, True])
    log_probs = np.where(mask, -1.0, np.nan).astype(np.float32)
    sample = replace(made.sample, loss_mask=mask, log_probs=log_probs, versions=np.where(mask, 0, -1).astype(np.int32))
    told = {name: np.array(values, np.float32) for name, values in arrays.items()}
    return replace(made, sample=sample, score=Score(reward), place=place, **told)


def advantages(batch: Batch) -> list[list[float] | None]:
    return [found and found.advantages.round(4).tolist() for found in batch]


def test_an_answer_s_advantage_is_that_of_each_of_its_tokens() -> None:
    found = with_advantages(batch_of(1.0, 0.0, 1.0, 1.0), GROUPS, AlgorithmConfig(advantage="dr_grpo"))
    assert advantages(found) == [[0.5, 0.0, 0.5], [-0.5, 0.0, -0.5], [0.0] * 3, [0.0] * 3]
    assert share_with_signal(found, GROUPS) == 0.5


def test_what_is_left_out_has_no_part_in_it() -> None:
    found = with_advantages(batch_of(1.0, 0.0, None, 1.0), GROUPS, AlgorithmConfig(advantage="rloo"))
    assert advantages(found) == [[1.0, 0.0, 1.0], [-1.0, 0.0, -1.0], None, [0.0] * 3]


def test_options_reach_the_estimator() -> None:
    config = AlgorithmConfig(advantage="grpo", with_std=False)
    found = with_advantages(batch_of(3.0, 1.0, 0.0, 0.0), GROUPS, config)
    assert advantages(found)[0] == [1.0, 0.0, 1.0]


def test_gae_bridges_over_what_a_tool_said_and_tells_the_critic_what_to_expect() -> None:
    config = AlgorithmConfig(advantage="gae", gamma=1.0, lam=0.5, whiten=False)
    given = batch_of(1.0, 0.0, 1.0, 0.0, values=[0.25, np.nan, 0.5])
    found = with_advantages(given, GROUPS, config)
    assert advantages(found)[0] == [0.25 + 0.5 * 0.5, 0.0, 0.5]
    first = found[0]
    assert first is not None and first.returns is not None
    assert first.returns[[0, 2]].tolist() == [0.75, 1.0]
    explained = variance_explained(found)
    assert explained is not None and explained < 1


def test_whitening_is_over_all_learnt_tokens_and_leaves_returns_alone() -> None:
    given = batch_of(1.0, 0.0, 1.0, 0.0, values=[0.25, np.nan, 0.5])
    plain = with_advantages(given, GROUPS, AlgorithmConfig(advantage="gae", whiten=False))
    found = with_advantages(given, GROUPS, AlgorithmConfig(advantage="gae"))
    tokens = np.concatenate([one.advantages[[0, 2]] for one in found if one])
    assert tokens.mean() == pytest.approx(0, abs=1e-6) and tokens.std() == pytest.approx(1, abs=1e-4)
    for one, other in zip(found, plain, strict=True):
        assert one is not None and other is not None and one.returns is not None and other.returns is not None
        assert one.returns.tolist() == other.returns.tolist()


def test_straying_costs_reward_at_the_token_where_it_happens() -> None:
    kl = {"coefficient": 0.1, "estimator": "k1", "place": "reward"}
    given = batch_of(1.0, 1.0, 1.0, 1.0, reference_log_probs=[-2.0, np.nan, -1.5])
    config = AlgorithmConfig.model_validate({"advantage": "gae", "kl": kl, "lam": 1.0, "whiten": False})
    given = [one and replace(one, values=np.zeros(3, np.float32)) for one in given]
    found = with_advantages(given, GROUPS, config, kl_coefficient=0.2)  # as it stands, not as it began
    assert advantages(found)[0] == [pytest.approx(1 - 0.2 * 1.5), 0.0, pytest.approx(1 - 0.2 * 0.5)]


def test_a_greedy_answer_that_could_not_be_graded_takes_its_group_along() -> None:
    config = AlgorithmConfig(advantage="remax")
    found = with_advantages(batch_of(1.0, 0.0, 1.0, 1.0), GROUPS, config, baselines=[0.25, None])
    assert advantages(found) == [[0.75, 0.0, 0.75], [-0.25, 0.0, -0.25], None, None]
    with pytest.raises(RewardError, match="no greedy answer could be graded"):
        with_advantages(batch_of(1.0, 0.0, 1.0, 1.0), GROUPS, config, baselines=[None, None])


def test_before_they_are_known_advantages_are_no_numbers() -> None:
    samples = [item(0, 1.0).sample, item(1, 1.0).sample]
    scores = [Graded(Score(1.0)), Graded(Score(None, status="invalid"))]
    graded = GradedBatch.of(samples, scores, GradingReport.of(scores, 0.0, 0, 0), None, "mask")
    first, second = graded_batch(7, samples, graded)
    assert first is not None and np.isnan(first.advantages).all() and (first.step, first.place) == (7, 0)
    assert second is None
