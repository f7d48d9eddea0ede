"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): prompts whose answers teach nothing give way to others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from practicum.reward import GradedBatch
from practicum.types import Sample

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Practice(Generic[P]):
    """Prompts, each with the same number of answers, and what those were worth; answers to one prompt together."""

    prompts: list[P]
    samples: list[Sample]
    graded: GradedBatch

    def __post_init__(self) -> None:
        if len(self.samples) != len(self.graded.scores) or len(self.samples) % len(self.prompts):
            raise ValueError(f"{len(self.samples)} answers to {len(self.prompts)} prompts do not go round")

    @property
    def per_prompt(self) -> int:
        return len(self.samples) // len(self.prompts)

    def stale(self) -> list[int]:
        """Indices of the prompts whose graded answers all have the same reward, or none."""
        found = []
        for index in range(len(self.prompts)):
            own = range(index * self.per_prompt, (index + 1) * self.per_prompt)
            values = {self.graded.scores[i].value for i in own if self.graded.kept[i]}
            if len(values) < 2:
                found.append(index)
        return found

    def renewed(self, other: Practice[P]) -> Practice[P]:
        """With the prompts of `other` that do teach something, in the places of those here that do not."""
        useless = set(other.stale())
        fresh = [index for index in range(len(other.prompts)) if index not in useless]
        prompts, samples = list(self.prompts), list(self.samples)
        scores, kept, rewards = list(self.graded.scores), list(self.graded.kept), list(self.graded.token_rewards)
        for old, new in zip(self.stale(), fresh, strict=False):
            prompts[old] = other.prompts[new]
            here, there = (slice(i * self.per_prompt, (i + 1) * self.per_prompt) for i in (old, new))
            samples[here] = other.samples[there]
            scores[here], kept[here] = other.graded.scores[there], other.graded.kept[there]
            rewards[here] = other.graded.token_rewards[there]
        return Practice(prompts, samples, GradedBatch(scores, kept, rewards, self.graded.report))


def num_renewed(before: Sequence[P], after: Sequence[P]) -> int:
    """How many prompts were exchanged."""
    return sum(one is not other for one, other in zip(before, after, strict=True))
