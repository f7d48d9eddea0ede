"""DAPO's soft penalty for answers that come near the length limit."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from practicum.reward.graders.base import Rule
from practicum.types import Sample, Score


class Overlong(Rule):
    """0 for answers of up to max_tokens - margin tokens, from there linearly down to -1 at max_tokens, and -1 beyond.

    Meant to be added to another grader. Needs no ground truth.
    """

    max_tokens: int = Field(ge=1)
    """Length of the full penalty; usually rollout.max_new_tokens, beyond which answers are cut off."""
    margin: int = Field(ge=0)
    """Tokens before max_tokens over which the penalty grows. With 0, only longer answers are penalised, at once."""

    @model_validator(mode="after")
    def _margin_fits(self) -> Self:
        if self.margin > self.max_tokens:
            raise ValueError(f"margin={self.margin} must not be larger than max_tokens={self.max_tokens}")
        return self

    def grade(self, sample: Sample) -> Score:
        over = len(sample.token_ids) - (self.max_tokens - self.margin)
        if over <= 0:
            return Score(0.0)
        return Score(-over / self.margin if over < self.margin else -1.0)
