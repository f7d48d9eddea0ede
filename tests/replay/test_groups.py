from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from practicum.replay.codec import Groups, group_sizes, most_groups
from practicum.replay.combinations import sort_columns


@pytest.mark.parametrize(("k", "sizes"), [(3, (2, 3, 4)), (4, (1, 8)), (2, (7,)), (1, (1, 1, 1, 1))])
def test_every_row_of_a_class_has_a_number_of_its_own(k: int, sizes: tuple[int, ...]) -> None:
    groups = Groups(sum(sizes), k, sizes)
    every = np.array(list(itertools.combinations(range(sum(sizes)), k)), np.uint8)
    keys, counts = groups.keys(every)
    assert counts.sum() == len(every)
    for key in np.unique(keys).tolist():
        rows = every[keys == key]
        (word,) = groups.words(key)
        assert word.limit == len(rows) == counts[key]
        numbers = np.empty(len(rows), np.int64)
        groups.number(word, sort_columns(rows), numbers)
        assert sorted(numbers.tolist()) == list(range(len(rows)))
        found = np.empty((k, len(rows)), np.uint8)
        groups.columns(word, numbers, found)
        assert np.array_equal(found.T, rows)


def test_classes_of_too_many_rows_for_a_word_take_two() -> None:
    groups = Groups(512, 10, (112, 200, 200))
    rows = np.sort(np.stack([np.random.default_rng(i).choice(512, 10, replace=False) for i in range(50)]), axis=1)
    keys, _ = groups.keys(rows.astype(np.uint16))
    for row, key in zip(rows.astype(np.uint16), keys.tolist(), strict=True):
        found = np.empty((10, 1), np.uint16)
        for word in groups.words(key):
            assert word.limit <= 1 << 62
            number = np.empty(1, np.int64)
            groups.number(word, sort_columns(row[None]), number)
            groups.columns(word, number, found)
        assert np.array_equal(found[:, 0], row)


def test_a_group_of_which_a_part_fits_no_word_is_refused() -> None:
    groups = Groups(512, 10, (12, 500))
    assert groups.can_number(0) and not groups.can_number(10)
    with pytest.raises(ValueError, match="too many to number"):
        groups.words(10)


@pytest.mark.parametrize("key", [0, 4, 15, 60, 65535])
def test_a_key_that_no_row_has_is_refused(key: int) -> None:
    with pytest.raises(ValueError, match="no rows have"):
        Groups(10, 3, (2, 6, 2)).words(key)


def test_a_number_beyond_the_class_is_refused() -> None:
    groups = Groups(8, 2, (4, 4))
    (word,) = groups.words(1)
    with pytest.raises(ValueError, match="damaged"):
        groups.columns(word, np.array([16]), np.empty((2, 1), np.uint8))


@pytest.mark.parametrize("sizes", [(), (4, 3), (8, 0), (1,) * 8])
def test_sizes_that_are_not_those_of_all_experts_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="groups of"):
        Groups(8, 6, sizes)


@settings(max_examples=40, deadline=None)
@given(num=st.integers(1, 300), wanted=st.integers(1, 6), skew=st.floats(0, 3))
def test_groups_hold_every_expert_once(num: int, wanted: int, skew: float) -> None:
    sizes = group_sizes(np.arange(1, num + 1) ** -skew, wanted)
    assert sum(sizes) == num and min(sizes) >= 1 and len(sizes) <= wanted


def test_groups_are_cut_where_popularity_falls() -> None:
    assert group_sizes(np.array([0.9] * 4 + [0.05] * 60), 2) == (4, 60)


@pytest.mark.parametrize("k", [1, 2, 8, 10, 255, 300])
def test_keys_fit_16_bits(k: int) -> None:
    assert most_groups(k) >= 1 and math.log2(k + 1) * (most_groups(k) - 1) <= 16
