"""Random ragged batches as plain Python, and how close a fast function must come to a slow one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

# Numbers that are equal or clearly apart: what is between them is rounding, on which nobody need agree.
NUMBERS = st.integers(-640, 640).map(lambda n: n / 64)


@dataclass(frozen=True)
class Answers:
    """Answers to prompts with a few numbers for each token; an answer may have no tokens."""

    rewards: list[float]
    groups: list[int]
    tokens: list[list[tuple[float, ...]]]  # by answer

    @property
    def sequences(self) -> list[int]:
        return [i for i, tokens in enumerate(self.tokens) for _ in tokens]

    def column(self, number: int) -> list[list[float]]:
        """One number of each token, by answer."""
        return [[token[number] for token in tokens] for tokens in self.tokens]


def answers(*columns: st.SearchStrategy[float], max_tokens: int = 6) -> st.SearchStrategy[Answers]:
    """Up to 12 answers to up to 4 prompts: some alone in their group, some groups with equal rewards."""
    rewards = st.one_of(NUMBERS, st.sampled_from([0.0, 1.0]))
    answer = st.tuples(rewards, st.integers(0, 3), st.lists(st.tuples(*columns), max_size=max_tokens))
    return st.lists(answer, min_size=1, max_size=12).map(lambda rows: Answers(*map(list, zip(*rows, strict=True))))


def flat(rows: Sequence[Sequence[float]]) -> Tensor:
    return tensor([number for row in rows for number in row])


def tensor(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def assert_close(fast: Tensor, slow: Sequence[float]) -> None:
    assert fast.isfinite().all()
    assert fast.tolist() == pytest.approx(list(slow), rel=1e-6, abs=1e-9)


def slopes(function: Callable[[list[float]], float], at: list[float], step: float = 1e-6) -> list[float]:
    """The gradient by finite differences."""

    def moved(i: int, by: float) -> float:
        return function([x + by * (i == j) for j, x in enumerate(at)])

    return [(moved(i, step) - moved(i, -step)) / (2 * step) for i in range(len(at))]
