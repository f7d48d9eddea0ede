from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum import Sample
from practicum.reward.graders.penalties import Repetition, repeated_share
from tests.samples import make_sample


def with_tokens(tokens: list[int]) -> Sample:
    return replace(make_sample(answer=len(tokens)), token_ids=np.array(tokens, np.int32))


def naive_share(units: list[int], n: int) -> float:
    seen: list[list[int]] = []
    repeats = 0
    grams = [units[start : start + n] for start in range(len(units) - n + 1)]
    for gram in grams:
        repeats += gram in seen
        seen.append(gram)
    return repeats / len(grams) if grams else 0.0


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 6))
def test_the_share_is_that_of_the_definition(tokens: list[int], n: int) -> None:
    assert repeated_share(np.array(tokens, np.int32), n) == pytest.approx(naive_share(tokens, n))


@pytest.mark.parametrize(
    ("tokens", "n", "value"),
    [
        ([1, 2, 3, 4], 2, 0.0),
        ([1, 2, 1, 2], 2, -1 / 3),
        ([1, 1, 1, 1, 1], 1, -0.8),
        ([1, 2], 3, 0.0),
        ([256, 1, 1, 256, 65536], 1, -0.4),
    ],
)
def test_repeated_tokens_cost(tokens: list[int], n: int, value: float) -> None:
    assert Repetition(n=n).grade(with_tokens(tokens)).value == pytest.approx(value)


def test_words_ignore_case_and_spacing() -> None:
    sample = make_sample(text="The cat. the  CAT.\nthe dog")
    assert Repetition(n=2, unit="words").grade(sample).value == pytest.approx(-0.2 * 2)
    assert Repetition(n=2, unit="words").grade(make_sample(text="")).value == 0.0


def test_the_penalty_scales() -> None:
    assert Repetition(n=1, max_penalty=0.5).grade(with_tokens([1, 1])).value == -0.25


def test_a_penalty_of_nothing_is_zero_without_a_sign() -> None:
    assert str(Repetition().grade(with_tokens([1, 2])).value) == "0.0"


@pytest.mark.parametrize("n", [3, 8, 32])
def test_long_answers_are_quick(n: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 50_000, 32_768)
    sample = with_tokens(tokens.tolist())
    started = time.process_time()
    Repetition(n=n).grade(sample)
    assert time.process_time() - started < 0.2
