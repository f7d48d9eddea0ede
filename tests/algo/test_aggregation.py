from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.algo import AGGREGATIONS, Totals
from tests.algo.ragged import NUMBERS, Answers, answers, flat

MAX_TOKENS = 10


def learnt(rows: list[list[float]]) -> list[list[float]]:
    return [row for row in rows if row]


SLOW: dict[str, Callable[[list[list[float]]], float]] = {
    "token_mean": lambda rows: sum(map(sum, rows)) / max(1, sum(map(len, rows))),
    "sequence_mean": lambda rows: sum(sum(row) / len(row) for row in learnt(rows)) / max(1, len(learnt(rows))),
    "sequence_sum": lambda rows: sum(map(sum, rows)) / max(1, len(learnt(rows))),
    "constant": lambda rows: sum(sum(row) / MAX_TOKENS for row in rows) / max(1, len(learnt(rows))),
}


def test_the_table_is_tested_whole() -> None:
    assert set(SLOW) == set(AGGREGATIONS)


def totals(rows: list[list[float]]) -> Totals:
    return Totals(sum(map(len, rows)), len(learnt(rows)), MAX_TOKENS)


@pytest.mark.parametrize("name", SLOW)
@given(batch=answers(NUMBERS), num_parts=st.integers(1, 4))
def test_any_split_into_micro_batches_gives_the_mean_of_the_whole(name: str, batch: Answers, num_parts: int) -> None:
    rows = batch.column(0)
    parts = [rows[start::num_parts] for start in range(num_parts)]  # some may be empty
    loss = 0.0
    for part in parts:
        sequences = torch.tensor([i for i, row in enumerate(part) for _ in row], dtype=torch.int64)
        loss += (AGGREGATIONS[name](sequences, totals(rows)) * flat(part)).sum().item()
    assert loss == pytest.approx(SLOW[name](rows), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name, long, short", [("token_mean", 0.8, 0.2), ("sequence_mean", 0.5, 0.5)])
def test_what_long_answers_weigh(name: str, long: float, short: float) -> None:
    sequences = torch.tensor([0] * 8 + [1] * 2)
    weights = AGGREGATIONS[name](sequences, Totals(10, 2, MAX_TOKENS))
    assert weights[:8].sum().item() == pytest.approx(long)
    assert weights[8:].sum().item() == pytest.approx(short)


def test_with_the_constant_a_token_weighs_the_same_whatever_the_batch() -> None:
    few = AGGREGATIONS["constant"](torch.tensor([0, 1]), Totals(2, 2, MAX_TOKENS))
    many = AGGREGATIONS["constant"](torch.tensor([0] * 9 + [1] * 7), Totals(16, 2, MAX_TOKENS))
    assert few[0] == many[0] == pytest.approx(1 / 20)
