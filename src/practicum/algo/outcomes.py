"""The outcomes of a step's answers: all that an advantage estimator may look at."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from practicum.algo.segments import are_last


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The answers of a whole step, with their learnt tokens flat and end to end.

    Tokens that the model did not write (tools, users) are not among them: what follows such a gap follows directly on
    what was before it.
    """

    rewards: Tensor  # [samples], the grades
    groups: Tensor  # [samples], equal numbers for answers to the same prompt
    sequences: Tensor  # [tokens], the index of the sample of each learnt token, never falling
    penalties: Tensor | None = None  # [tokens], taken off the reward where they stand: coefficient * KL to a reference
    values: Tensor | None = None  # [tokens], what the critic expected before each token
    baselines: Tensor | None = None  # [samples], the reward of the greedy answer to the same prompt

    def __post_init__(self) -> None:
        samples, tokens = {len(self.rewards), len(self.groups)}, {len(self.sequences)}
        samples |= set() if self.baselines is None else {len(self.baselines)}
        tokens |= {len(tensor) for tensor in (self.penalties, self.values) if tensor is not None}
        if len(samples) != 1 or len(tokens) != 1:
            raise ValueError(f"outcomes of {samples} samples and {tokens} tokens: their tensors differ in length")
        if (self.sequences[1:] < self.sequences[:-1]).any():
            raise ValueError("outcomes: the tokens of a sample do not lie together, in the order of the samples")

    @property
    def whole_rewards(self) -> Tensor:
        """[samples], the grade less all penalties of the answer."""
        if self.penalties is None:
            return self.rewards
        return self.rewards.index_add(0, self.sequences, self.penalties.to(self.rewards), alpha=-1)

    @property
    def token_rewards(self) -> Tensor:
        """[tokens], the grade on the last learnt token of each answer, less the penalty of each token.

        An answer without learnt tokens has none to stand on: its grade counts for its group alone.
        """
        grades = torch.where(are_last(self.sequences), self.rewards[self.sequences], 0.0)
        return grades if self.penalties is None else grades - self.penalties.to(grades)

    @property
    def known_values(self) -> Tensor:
        """The values, for an estimator that cannot do without."""
        if self.values is None:
            raise ValueError("this estimator needs a critic's values, and there are none")
        return self.values.to(self.rewards)

    @property
    def known_baselines(self) -> Tensor:
        """The baselines, for an estimator that cannot do without."""
        if self.baselines is None:
            raise ValueError("this estimator needs the reward of a greedy answer to each prompt, and there is none")
        return self.baselines.to(self.rewards)
