from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.data import ShuffledStream


def test_every_epoch_has_each_item_once_in_another_order() -> None:
    stream = ShuffledStream(list(range(10)), seed=1)
    first, second = stream.take(10), stream.take(10)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


@given(st.integers(1, 20), st.integers(0, 60), st.integers(0, 5), st.lists(st.integers(1, 7), max_size=6))
def test_a_resumed_stream_goes_on_where_it_stopped(size: int, stop: int, seed: int, takes: list[int]) -> None:
    items = list(range(size))
    whole, head = ShuffledStream(items, seed=seed), ShuffledStream(items, seed=seed)
    assert whole.take(stop) == head.take(stop)
    resumed = ShuffledStream(items, seed=seed, position=head.position)
    for count in takes:
        assert resumed.take(count) == whole.take(count)


def test_the_seed_decides_the_order() -> None:
    assert ShuffledStream(range(50), seed=1).take(50) != ShuffledStream(range(50), seed=2).take(50)
    with pytest.raises(ValueError, match="at least one"):
        ShuffledStream([], seed=0)


def test_items_that_were_drawn_in_vain_come_first() -> None:
    whole = ShuffledStream(list(range(7)), seed=3)
    first, in_vain, after = whole.draw(4), whole.draw(5), whole.draw(2)
    assert (first, in_vain, after) == ([0, 1, 2, 3], [4, 5, 6, 7, 8], [9, 10])
    resumed = ShuffledStream(list(range(7)), seed=3, position=whole.position, again=in_vain)
    assert resumed.draw(3) + resumed.draw(4) == [*in_vain, 11, 12]
    assert resumed.at(in_vain) == whole.at(in_vain)
