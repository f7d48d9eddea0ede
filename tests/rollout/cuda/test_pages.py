"""Who has which pages, and how many rows and programs a step is computed with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.rollout.cuda.graphs import num_splits, rung
from practicum.rollout.cuda.pages import PAGE, PagePool, num_pages


def test_a_page_is_free_when_the_last_of_its_holders_is_gone() -> None:
    pool = PagePool(5)
    assert pool.num == pool.num_free == 4
    shared = pool.take(2)
    pool.share(shared)
    pool.share(shared)
    for left in (2, 2, 4):
        pool.give_back(shared)
        assert pool.num_free == left
    with pytest.raises(AssertionError, match="twice"):
        pool.give_back(shared)


def test_nobody_gets_more_than_there_is_or_the_page_of_fillers() -> None:
    pool = PagePool(4)
    with pytest.raises(AssertionError, match="more pages than there are"):
        pool.take(4)
    assert sorted(pool.take(3)) == [1, 2, 3]


@given(st.lists(st.integers(0, 3), max_size=60))
def test_pages_are_held_by_one_row_or_by_none(moves: list[int]) -> None:
    pool, held = PagePool(9), []
    for move in moves:
        if move and pool.num_free >= move:
            held.append(pool.take(move))
        elif held:
            pool.give_back(held.pop(0))
        there = [page for own in held for page in own]
        assert len(there) == len(set(there)) == pool.num - pool.num_free


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (PAGE, 1), (PAGE + 1, 2), (5 * PAGE, 5)])
def test_a_page_is_begun_by_its_first_token(tokens: int, pages: int) -> None:
    assert num_pages(tokens) == pages


@given(st.integers(1, 3000))
def test_a_rung_holds_its_rows_with_few_beside_them(rows: int) -> None:
    assert rows <= rung(rows) < max(2 * rows, rows + 2)


def test_contexts_are_shared_out_only_where_processors_have_nothing_to_do() -> None:
    assert num_splits(num_programs=2048, num_blocks=500, num_processors=132) == 1
    assert num_splits(num_programs=8, num_blocks=6, num_processors=132) == 4  # no more than there are blocks
    assert num_splits(num_programs=8, num_blocks=1000, num_processors=132) == 32
    assert num_splits(num_programs=256, num_blocks=128, num_processors=132) == 4
