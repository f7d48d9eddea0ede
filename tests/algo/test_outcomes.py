from __future__ import annotations

import pytest
import torch

from practicum.algo import Outcomes
from tests.algo.ragged import tensor

REWARDS, GROUPS = tensor([1.0, 5.0, 3.0]), torch.tensor([0, 0, 1])
SEQUENCES = torch.tensor([0, 0, 2, 2, 2])  # the second answer has no learnt token


def test_the_grade_stands_on_the_last_learnt_token() -> None:
    assert Outcomes(REWARDS, GROUPS, SEQUENCES).token_rewards.tolist() == [0, 1, 0, 0, 3]


def test_penalties_are_taken_off_where_they_arose_or_as_a_whole() -> None:
    outcomes = Outcomes(REWARDS, GROUPS, SEQUENCES, penalties=torch.tensor([0.5, 0.25, 1.0, 0.0, -2.0]))
    assert outcomes.token_rewards.tolist() == [-0.5, 0.75, -1.0, 0.0, 5.0]
    assert outcomes.whole_rewards.tolist() == [0.25, 5.0, 4.0]


def test_tensors_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        Outcomes(REWARDS, GROUPS[:2], SEQUENCES)
    with pytest.raises(ValueError, match="differ in length"):
        Outcomes(REWARDS, GROUPS, SEQUENCES, values=torch.zeros(4))
    with pytest.raises(ValueError, match="do not lie together"):
        Outcomes(REWARDS, GROUPS, torch.tensor([0, 2, 0]))
