"""How many rows and programs a step is computed with."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from practicum.rollout.cuda.graphs import num_splits, rung


@given(st.integers(1, 3000))
def test_a_rung_holds_its_rows_with_few_beside_them(rows: int) -> None:
    assert rows <= rung(rows) < max(2 * rows, rows + 2)


def test_contexts_are_shared_out_only_where_processors_have_nothing_to_do() -> None:
    assert num_splits(num_programs=2048, num_blocks=500, num_processors=132) == 1
    assert num_splits(num_programs=8, num_blocks=6, num_processors=132) == 4  # no more than there are blocks
    assert num_splits(num_programs=8, num_blocks=1000, num_processors=132) == 32
    assert num_splits(num_programs=256, num_blocks=128, num_processors=132) == 4
