"""Who has which pages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
