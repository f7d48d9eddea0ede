"""Penalties, to be added to another grader: for answers near the length limit, and for those that repeat themselves."""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
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


class Repetition(Rule):
    """Minus the share of n-grams that occurred before in the same answer, times max_penalty.

    0 where every n-gram is new, near -max_penalty for an answer that loops. Answers shorter than n are never penalised.
    Meant to be added to another grader. Needs no ground truth.
    """

    n: int = Field(default=8, ge=1)
    """Length of the n-grams. Short ones (2, 3) also catch the turns of phrase that any long text repeats."""
    unit: Literal["tokens", "words"] = "tokens"
    """What n counts: tokens, or words between white space with upper and lower case alike."""
    max_penalty: float = Field(default=1.0, gt=0)
    """What an answer of nothing but repeats loses."""

    def grade(self, sample: Sample) -> Score:
        units = sample.token_ids if self.unit == "tokens" else _word_ids(sample.text)
        return Score(-repeated_share(units, self.n) * self.max_penalty or 0.0)  # never -0.0


def repeated_share(units: NDArray[np.int32], n: int) -> float:
    """Return the share of the n-grams in a row of units that are equal to an earlier one."""
    total = len(units) - n + 1
    if total < 1:
        return 0.0
    # The bytes of each n-gram: Python hashes and compares them several times faster than NumPy sorts rows.
    windows = np.ascontiguousarray(sliding_window_view(units, n))
    distinct = set(windows.view(np.dtype((np.void, n * units.itemsize)))[:, 0].tolist())
    return 1 - len(distinct) / total


def _word_ids(text: str) -> NDArray[np.int32]:
    ids: dict[str, int] = {}
    return np.array([ids.setdefault(word, len(ids)) for word in text.lower().split()], np.int32)
