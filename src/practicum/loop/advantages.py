"""From graded samples to advantages: where the table of estimators meets the samples of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from practicum.algo import ADVANTAGES, KL_ESTIMATORS, Outcomes, explained_variance, whiten
from practicum.config import AlgorithmConfig
from practicum.errors import RewardError
from practicum.reward import GradedBatch
from practicum.types import Sample, TrainingSample

Batch = list[TrainingSample | None]
"""The samples of a step in their places; None for those that are left out."""


def graded_batch(number: int, samples: Sequence[Sample], graded: GradedBatch) -> Batch:
    """What of a step can be learnt from; of the advantages nothing is known yet."""
    if not any(graded.kept):
        reason = next(score.reason for score in graded.scores if score.value is None)
        raise RewardError(
            "there is nothing to learn from in this step: every prompt has an answer that could not be graded, and "
            f"reward.on_failure=drop_group leaves out the others with it. The first: {reason}."
        )
    return [
        TrainingSample(sample, np.full(len(sample.token_ids), np.nan, np.float32), score, number, place)
        if is_kept
        else None
        for place, (sample, score, is_kept) in enumerate(zip(samples, graded.scores, graded.kept, strict=True))
    ]


def with_advantages(
    batch: Batch,
    groups: NDArray[np.int64],
    algorithm: AlgorithmConfig,
    kl_coefficient: float = 0.0,
    baselines: Sequence[float | None] | None = None,
) -> Batch:
    """`groups` tells which prompt each sample answers, `baselines` the reward of the greedy answer to it."""
    if baselines is not None:  # where it could not be graded there is nothing to compare with
        batch = [item if baselines[group] is not None else None for item, group in zip(batch, groups, strict=True)]
    kept = [item for item in batch if item is not None]
    if not kept:
        raise RewardError("there is nothing to learn from in this step: no greedy answer could be graded.")
    outcomes = _outcomes(kept, groups, algorithm, kl_coefficient, baselines)
    estimator = ADVANTAGES[algorithm.advantage]
    advantages = estimator.advantages(outcomes, **algorithm.options("advantage"))
    returns = None if outcomes.values is None else advantages + outcomes.values
    if algorithm.whitens:
        advantages = whiten(advantages)
    result: Batch = [None] * len(batch)
    targets = [None] * len(kept) if returns is None else _spread(returns, kept)
    for item, own, target in zip(kept, _spread(advantages, kept), targets, strict=True):
        result[item.place] = replace(item, advantages=own, returns=target, step_size=len(kept))
    return result


def share_with_signal(batch: Batch, groups: NDArray[np.int64]) -> float:
    """Share of the prompts whose answers teach anything."""
    teaching = {
        int(groups[item.place])
        for item in batch
        if item is not None and (item.advantages[item.sample.loss_mask] != 0).any()
    }
    return len(teaching) / len(set(groups.tolist()))


def variance_explained(batch: Batch) -> float | None:
    """Of the returns, by what the critic expected; None where they are all equal."""
    kept = [item for item in batch if item is not None]
    values, returns = ([getattr(item, name) for item in kept] for name in ("values", "returns"))
    return explained_variance(_learnt(values, kept), _learnt(returns, kept))


def _outcomes(
    kept: Sequence[TrainingSample],
    groups: NDArray[np.int64],
    algorithm: AlgorithmConfig,
    kl_coefficient: float,
    baselines: Sequence[float | None] | None,
) -> Outcomes:
    own_groups = groups[[item.place for item in kept]]
    lengths = [int(item.sample.loss_mask.sum()) for item in kept]
    penalties = None
    if algorithm.kl.coefficient > 0 and algorithm.kl.place == "reward":
        # Of the policy that drew the tokens, which is what the estimators are made for.
        written = _learnt([item.sample.log_probs for item in kept], kept)
        reference = _learnt([item.reference_log_probs for item in kept], kept)
        penalties = kl_coefficient * KL_ESTIMATORS[algorithm.kl.estimator](written, reference)
    return Outcomes(
        rewards=torch.tensor([_value(item) for item in kept], dtype=torch.float64),
        groups=torch.from_numpy(own_groups),
        sequences=torch.repeat_interleave(torch.arange(len(kept)), torch.tensor(lengths)),
        penalties=penalties,
        values=_learnt([item.values for item in kept], kept) if algorithm.needs_critic else None,
        baselines=None if baselines is None else torch.tensor([baselines[g] for g in own_groups], dtype=torch.float64),
    )


def _value(item: TrainingSample) -> float:
    assert item.score is not None and item.score.value is not None
    return item.score.value


def _learnt(arrays: Sequence[NDArray[np.float32] | None], kept: Sequence[TrainingSample]) -> Tensor:
    """[tokens]: what is per token of the answers, end to end, less what is not learnt."""
    parts = []
    for array, item in zip(arrays, kept, strict=True):
        assert array is not None
        parts.append(array[item.sample.loss_mask])
    return torch.from_numpy(np.concatenate(parts)).double()


def _spread(flat: Tensor, kept: Sequence[TrainingSample]) -> list[NDArray[np.float32]]:
    """The way back: [answer] each, 0 where nothing is learnt."""
    masks = [item.sample.loss_mask for item in kept]
    parts = np.split(flat.float().numpy(), np.cumsum([int(mask.sum()) for mask in masks])[:-1])
    found = []
    for mask, part in zip(masks, parts, strict=True):
        whole = np.zeros(len(mask), np.float32)
        whole[mask] = part
        found.append(whole)
    return found
