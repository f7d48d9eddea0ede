"""From graded groups to advantages: where the table of estimators meets the samples of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from practicum.algo import ADVANTAGES, KL_ESTIMATORS, Outcomes, explained_variance, whiten
from practicum.config import AlgorithmConfig
from practicum.errors import RewardError
from practicum.types import PromptGroup, Sample, Trajectory

OnFailure = Literal["mask", "drop_group"]
Learnable = list[list[Sample]]
"""The samples of a step that are learnt from, by group; a group may have none left."""


def graded(group: PromptGroup, on_failure: OnFailure) -> list[Trajectory]:
    """Return the trajectories of a group that have a reward; none if one has not and takes the others with it."""
    found = [one for one in group.trajectories if one.score is not None and one.score.value is not None]
    return [] if on_failure == "drop_group" and len(found) < len(group.trajectories) else found


def has_signal(group: PromptGroup, on_failure: OnFailure) -> bool:
    """Return whether the rewards of a group differ (dynamic sampling: DAPO, arXiv 2503.14476, section 3.2)."""
    return len({one.score.value for one in graded(group, on_failure) if one.score is not None}) > 1


def learnable(groups: Sequence[PromptGroup], on_failure: OnFailure, *, needs_baseline: bool = False) -> Learnable:
    """Return the samples to learn from, each with the score of its trajectory."""
    found: Learnable = []
    for group in groups:
        found.append([])
        for trajectory in graded(group, on_failure):
            for sample in trajectory.samples:
                sample.score = trajectory.score
                found[-1].append(sample)
    if not any(found):
        scores = [one.score for group in groups for one in group.trajectories if one.score is not None]
        reason = next((score.reason for score in scores if score.value is None), "no answers")
        raise RewardError(
            "there is nothing to learn from in this step: every prompt has an answer that could not be graded, and "
            f"reward.on_failure=drop_group leaves out the others with it. The first: {reason}."
        )
    if needs_baseline:  # where it could not be graded there is nothing to compare with
        found = [own if group.baseline is not None else [] for own, group in zip(found, groups, strict=True)]
        if not any(found):
            raise RewardError("there is nothing to learn from in this step: no greedy answer could be graded.")
    return found


def add_advantages(
    learnt: Learnable,
    algorithm: AlgorithmConfig,
    kl_coefficient: float = 0.0,
    baselines: Sequence[float | None] | None = None,
) -> None:
    """Fill in the advantages of each sample, and with a critic its returns. `baselines` are by group."""
    samples = [sample for own in learnt for sample in own]
    outcomes = _outcomes(learnt, algorithm, kl_coefficient, baselines)
    advantages = ADVANTAGES[algorithm.advantage].advantages(outcomes, **algorithm.options("advantage"))
    if outcomes.values is not None:
        for sample, own in zip(samples, _split(advantages + outcomes.values, samples), strict=True):
            sample.returns = own
    if algorithm.whitens:
        advantages = whiten(advantages)
    for sample, own in zip(samples, _split(advantages, samples), strict=True):
        sample.advantages = own


def share_with_signal(learnt: Learnable) -> float:
    """Return the share of the groups whose samples have an advantage other than zero."""
    return sum(any(_teaches(sample) for sample in own) for own in learnt) / len(learnt)


def _teaches(sample: Sample) -> bool:
    assert sample.advantages is not None
    return bool((sample.advantages[sample.loss_mask] != 0).any())


def variance_explained(learnt: Learnable) -> float | None:
    """Return the share of the variance of the returns that the critic foresaw; None where they are all equal."""
    samples = [sample for own in learnt for sample in own]
    values, returns = ([getattr(sample, name) for sample in samples] for name in ("values", "returns"))
    return explained_variance(_joined(values, samples), _joined(returns, samples))


def _outcomes(
    learnt: Learnable,
    algorithm: AlgorithmConfig,
    kl_coefficient: float,
    baselines: Sequence[float | None] | None,
) -> Outcomes:
    samples = [sample for own in learnt for sample in own]
    groups = [index for index, own in enumerate(learnt) for _ in own]
    lengths = torch.tensor([sample.num_learnt for sample in samples])
    penalties = None
    if algorithm.kl.coefficient > 0 and algorithm.kl.place == "reward":
        # Of the policy that drew the tokens, which is what the estimators are made for.
        rollout = _joined([sample.log_probs for sample in samples], samples)
        reference = _joined([sample.reference_log_probs for sample in samples], samples)
        penalties = kl_coefficient * KL_ESTIMATORS[algorithm.kl.estimator](rollout, reference)
    return Outcomes(
        rewards=torch.tensor([_reward(sample) for sample in samples], dtype=torch.float64),
        groups=torch.tensor(groups),
        sequences=torch.repeat_interleave(torch.arange(len(samples)), lengths),
        penalties=penalties,
        values=_joined([sample.values for sample in samples], samples) if algorithm.needs_critic else None,
        baselines=None if baselines is None else torch.tensor([baselines[g] for g in groups], dtype=torch.float64),
    )


def _reward(sample: Sample) -> float:
    assert sample.score is not None and sample.score.value is not None
    return sample.score.value


def _joined(arrays: Sequence[NDArray[np.float32] | None], samples: Sequence[Sample]) -> Tensor:
    """Return the learnt tokens [tokens] of per-token arrays [answer], end to end."""
    parts = []
    for array, sample in zip(arrays, samples, strict=True):
        assert array is not None
        parts.append(array[sample.loss_mask])
    return torch.from_numpy(np.concatenate(parts)).double()


def _split(flat: Tensor, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
    """Undo `_joined`: return arrays [answer], 0 where nothing is learnt."""
    parts = np.split(flat.float().numpy(), np.cumsum([sample.num_learnt for sample in samples])[:-1])
    found = []
    for sample, part in zip(samples, parts, strict=True):
        whole = np.zeros(len(sample.token_ids), np.float32)
        whole[sample.loss_mask] = part
        found.append(whole)
    return found
