from __future__ import annotations

import torch
from hypothesis import given

from practicum.algo.segments import are_last, counts, discounted_sums, means, sums
from tests.algo.ragged import NUMBERS, Answers, answers, assert_close, flat


@given(answers(NUMBERS, max_tokens=20))
def test_sums_over_each_sequence(batch: Answers) -> None:
    rows, ids = batch.column(0), torch.tensor(batch.sequences, dtype=torch.int64)
    assert_close(sums(flat(rows), ids), [sum(row) for row in rows for _ in row])
    assert_close(means(flat(rows), ids), [sum(row) / len(row) for row in rows for _ in row])
    assert counts(ids).tolist() == [len(row) for row in rows for _ in row]
    assert are_last(ids).tolist() == [i == len(row) - 1 for row in rows for i in range(len(row))]


@given(answers(NUMBERS, max_tokens=20))
def test_discounted_sums_stay_within_the_sequence(batch: Answers) -> None:
    rows, ids = batch.column(0), torch.tensor(batch.sequences, dtype=torch.int64)
    for factor in (0.0, 0.9, 1.0):
        slow = [sum(factor**i * x for i, x in enumerate(row[t:])) for row in rows for t in range(len(row))]
        assert_close(discounted_sums(flat(rows), ids, factor), slow)


def test_parts_may_lie_in_any_order() -> None:
    x, ids = torch.tensor([1.0, 10.0, 2.0]), torch.tensor([7, -3, 7])
    assert sums(x, ids).tolist() == [3.0, 10.0, 3.0]


def test_gradients_pass_through() -> None:
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 0, 1, 1, 1])
    assert torch.autograd.gradcheck(lambda x: (means(x, ids).exp(), discounted_sums(x, ids, 0.9)), (x,))
