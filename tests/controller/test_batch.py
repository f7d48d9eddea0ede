from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.controller import join_batches, split_batch
from practicum.errors import CallError, ReplyError


class Pair(NamedTuple):
    one: Any
    other: Any


@given(st.lists(st.integers()), st.integers(1, 9))
def test_shards_joined_are_the_batch_and_differ_by_one_at_most(batch: list[int], parts: int) -> None:
    shards = split_batch(batch, parts)
    sizes = [len(shard) for shard in shards]
    assert len(shards) == parts and max(sizes) - min(sizes) <= 1
    assert join_batches(shards) == batch
    assert [item for shard in split_batch(tuple(batch), parts) for item in shard] == batch
    columns = {"a": np.array(batch, dtype=object), "b": list(batch)}
    joined = join_batches(split_batch(columns, parts))
    assert list(joined["a"]) == joined["b"] == batch


def test_an_array_is_cut_without_copying() -> None:
    batch = np.arange(12).reshape(6, 2)
    first, second = split_batch(batch, 2)
    assert np.shares_memory(first, batch) and np.shares_memory(second, batch)
    np.testing.assert_array_equal(join_batches([first, second]), batch)


@pytest.mark.parametrize("batch", [3, None, "text", b"bytes", {1, 2}, np.float64(1), iter([1]), {"a": 3}, Pair(1, 2)])
def test_what_cannot_be_split_is_named(batch: Any) -> None:
    with pytest.raises(CallError, match=r"cannot be split.*scatter_with"):
        split_batch(batch, 2)


def test_entries_of_different_length_are_named() -> None:
    with pytest.raises(CallError, match=r"differ in length.*'a': 2, 'b': 3"):
        split_batch({"a": [1, 2], "b": [1, 2, 3]}, 2)


def test_replies_that_cannot_be_joined_are_named() -> None:
    assert join_batches([None, None]) is None
    with pytest.raises(ReplyError, match="type tuple cannot be joined"):
        join_batches([(1, 2), (3, 4)])  # a pair of results, or items? Better not guess
    with pytest.raises(ReplyError, match="cannot be joined: all the input array dimensions"):
        join_batches([np.zeros((1, 2)), np.zeros((1, 3))])
    with pytest.raises(ReplyError, match="type MaskedArray cannot be joined"):
        join_batches([np.ma.array([1], mask=[True])] * 2)
    with pytest.raises(ReplyError, match=r"type float cannot be joined.*gather of your own"):
        join_batches([1.0, 2.0])
    with pytest.raises(ReplyError, match=r"different types.*NoneType, list"):
        join_batches([[1], None])
    with pytest.raises(ReplyError, match="different keys"):
        join_batches([{"a": [1]}, {"b": [1]}])
