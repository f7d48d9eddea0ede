from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from practicum.config import AlgorithmConfig
from practicum.errors import RewardError
from practicum.loop.advantages import (
    Learnable,
    add_advantages,
    has_signal,
    learnable,
    share_with_signal,
    variance_explained,
)
from tests.samples import make_group


def learnt_from(*groups: tuple[float | None, ...], **arrays: Any) -> Learnable:
    """Groups of answers of three tokens, the second not the model's own."""
    made = [make_group(*rewards, id=f"1/{index}") for index, rewards in enumerate(groups)]
    mask = np.array([True, False, True])
    for sample in (sample for group in made for sample in group.samples):
        sample.loss_mask = mask
        sample.log_probs = np.where(mask, -1.0, np.nan).astype(np.float32)
        for name, values in arrays.items():
            setattr(sample, name, np.array(values, np.float32))
    return learnable(made, "mask")


def advantages(learnt: Learnable) -> list[list[float]]:
    arrays = [sample.advantages for own in learnt for sample in own]
    return [array.round(4).tolist() for array in arrays if array is not None]


def test_an_answer_s_advantage_is_that_of_each_of_its_tokens() -> None:
    learnt = learnt_from((1.0, 0.0), (1.0, 1.0))
    add_advantages(learnt, AlgorithmConfig(advantage="dr_grpo"))
    assert advantages(learnt) == [[0.5, 0.0, 0.5], [-0.5, 0.0, -0.5], [0.0] * 3, [0.0] * 3]
    assert share_with_signal(learnt) == 0.5


def test_what_is_left_out_has_no_part_in_it() -> None:
    learnt = learnt_from((1.0, 0.0), (None, 1.0))
    add_advantages(learnt, AlgorithmConfig(advantage="rloo"))
    assert advantages(learnt) == [[1.0, 0.0, 1.0], [-1.0, 0.0, -1.0], [0.0] * 3]


def test_a_group_with_an_ungraded_answer_is_dropped_whole_if_asked() -> None:
    groups = [make_group(1.0, None, id="1/0"), make_group(1.0, 0.0, id="1/1")]
    assert [len(own) for own in learnable(groups, "mask")] == [1, 2]
    assert [len(own) for own in learnable(groups, "drop_group")] == [0, 2]
    with pytest.raises(RewardError, match=r"nothing to learn from .*drop_group leaves out .* The first: \?"):
        learnable(groups[:1], "drop_group")


def test_a_group_has_signal_where_its_rewards_differ() -> None:
    rewards = [(1.0, 1.0), (0.0, 1.0), (0.0, 0.0), (None, 1.0), (None, None), (None, 1.0, 0.0)]
    groups = [make_group(*own) for own in rewards]
    assert [has_signal(group, "mask") for group in groups] == [False, True, False, False, False, True]
    assert [has_signal(group, "drop_group") for group in groups] == [False, True, False, False, False, False]


def test_samples_learn_with_the_score_of_their_trajectory() -> None:
    group = make_group(1.0, 0.25)
    ((first, second),) = learnable([group], "mask")
    assert first.score is group.trajectories[0].score and second.score is group.trajectories[1].score
    assert first.id == "1/0/0" and first.advantages is None


def test_options_reach_the_estimator() -> None:
    learnt = learnt_from((3.0, 1.0), (0.0, 0.0))
    add_advantages(learnt, AlgorithmConfig(advantage="grpo", with_std=False))
    assert advantages(learnt)[0] == [1.0, 0.0, 1.0]


def test_gae_bridges_over_what_a_tool_said_and_tells_the_critic_what_to_expect() -> None:
    learnt = learnt_from((1.0, 0.0), (1.0, 0.0), values=[0.25, np.nan, 0.5])
    add_advantages(learnt, AlgorithmConfig(advantage="gae", gamma=1.0, lam=0.5, whiten=False))
    assert advantages(learnt)[0] == [0.25 + 0.5 * 0.5, 0.0, 0.5]
    returns = learnt[0][0].returns
    assert returns is not None and returns[[0, 2]].tolist() == [0.75, 1.0]
    explained = variance_explained(learnt)
    assert explained is not None and explained < 1


def test_whitening_is_over_all_learnt_tokens_and_leaves_returns_alone() -> None:
    plain, white = (learnt_from((1.0, 0.0), (1.0, 0.0), values=[0.25, np.nan, 0.5]) for _ in range(2))
    add_advantages(plain, AlgorithmConfig(advantage="gae", whiten=False))
    add_advantages(white, AlgorithmConfig(advantage="gae"))
    tokens = np.concatenate([np.array(own)[[0, 2]] for own in advantages(white)])
    assert tokens.mean() == pytest.approx(0, abs=1e-4) and tokens.std() == pytest.approx(1, abs=1e-3)
    for one, other in zip(itertools.chain(*plain), itertools.chain(*white), strict=True):
        assert one.returns is not None and other.returns is not None
        assert one.returns.tolist() == other.returns.tolist()


def test_straying_costs_reward_at_the_token_where_it_happens() -> None:
    kl = {"coefficient": 0.1, "estimator": "k1", "place": "reward"}
    learnt = learnt_from((1.0, 1.0), (1.0, 1.0), reference_log_probs=[-2.0, np.nan, -1.5], values=[0.0, 0.0, 0.0])
    config = AlgorithmConfig.model_validate({"advantage": "gae", "kl": kl, "lam": 1.0, "whiten": False})
    add_advantages(learnt, config, kl_coefficient=0.2)  # as it stands, not as it began
    assert advantages(learnt)[0] == [pytest.approx(1 - 0.2 * 1.5), 0.0, pytest.approx(1 - 0.2 * 0.5)]


def test_a_greedy_answer_that_could_not_be_graded_takes_its_group_along() -> None:
    groups = [make_group(1.0, 0.0, id="1/0", baseline=0.25), make_group(1.0, 1.0, id="1/1")]
    learnt = learnable(groups, "mask", needs_baseline=True)
    add_advantages(learnt, AlgorithmConfig(advantage="remax"), baselines=[group.baseline for group in groups])
    assert advantages(learnt) == [[0.75] * 3, [-0.25] * 3] and learnt[1] == []
    with pytest.raises(RewardError, match="no greedy answer could be graded"):
        learnable(groups[1:], "mask", needs_baseline=True)
