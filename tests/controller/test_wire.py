"""How batches are cut and joined, how arguments travel, and replies that are still under way."""

from __future__ import annotations

import pickle
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from practicum.controller import GroupFuture
from practicum.controller.group import Replies
from practicum.controller.loop import run_sync
from practicum.controller.wire import (
    Slot,
    join_batches,
    num_bytes,
    pack,
    pack_arguments,
    split_batch,
    unpack,
    unpack_arguments,
)
from practicum.errors import CallError, DeadlineError, ReplyError, WorkerDied, WorkerError


@dataclass
class Thing:
    array: NDArray[Any]
    text: str


def test_arrays_travel_beside_the_pickle_uncopied() -> None:
    array = np.arange(1000.0)
    payload = pack([Thing(array, "a"), Thing(array[::2], "b"), Thing(np.asfortranarray(array.reshape(10, 100)), "c")])
    assert isinstance(payload, list) and np.shares_memory(payload[1], array)
    assert num_bytes(payload) > 16_000
    back = unpack(payload)
    np.testing.assert_array_equal(back[0].array, array)
    np.testing.assert_array_equal(back[1].array, array[::2])
    np.testing.assert_array_equal(back[2].array, array.reshape(10, 100))


@pytest.mark.parametrize("value", [None, 0, "text", (), {"a": [1]}, np.float32(1.5)])
def test_small_things_come_back_as_they_were(value: Any) -> None:
    assert unpack(pack(value)) == value
    assert unpack(pack(np.zeros(0))).shape == (0,)


def test_the_argument_that_cannot_travel_is_named() -> None:
    arguments = {"good": 1, "bad": threading.Lock()}
    with pytest.raises(CallError, match=r"argument 'bad' of Some.method cannot be sent .*TypeError: cannot pickle"):
        pack_arguments(list(arguments.values()), "Some.method", lambda: arguments)


def test_slots_are_filled_with_the_replies_they_stand_for() -> None:
    shared = pack(([1, Slot(0, 2, sum)], {"x": Slot(2, 3, list), "y": "same"}))
    assert unpack_arguments(shared, b"", 10, 20, 30) == ([1, 30], {"x": [30], "y": "same"})
    assert unpack_arguments(shared, pack(Slot(2, 3, max)), 10, 20, 30)[0] == [30, 1, 30]


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


def future(replies: list[Any], gather: Any = list, upstream: Any = ()) -> GroupFuture[Any]:
    """One whose replies, or failure, are there."""

    def collect(deadline: float) -> list[Any]:
        for reply in replies:
            if isinstance(reply, WorkerError):
                raise reply
        return replies

    async def arrive(deadline: float) -> list[Any]:
        return collect(deadline)

    return GroupFuture(Replies(replies, 0.0, upstream, collect, arrive), range(len(replies)), gather)


def failing(error: WorkerError, upstream: Any = ()) -> GroupFuture[Any]:
    return future([error], upstream=upstream)


async def awaited(future: GroupFuture[Any]) -> Any:
    return await future


def test_the_failure_of_a_call_upstream_explains_the_one_below() -> None:
    late = DeadlineError("down is late", group="down", ranks=[0])
    died = WorkerDied("up died", group="up", ranks=[1])
    assert future([1]).result() == [1]
    for upstream, told in (([], late), ([future([1])], late), ([future([1]), failing(died)], died)):
        with pytest.raises(WorkerError) as caught:
            failing(late, upstream).result()
        assert caught.value is told
        with pytest.raises(WorkerError) as caught:
            run_sync(awaited(failing(late, upstream)))
        assert caught.value is told


def test_a_future_inside_an_argument_is_refused_in_words() -> None:
    with pytest.raises(TypeError, match="a future can be an argument of a call, but not be inside one"):
        pickle.dumps([future([1])])


def test_joined_replies_are_handed_on_one_by_one_when_the_numbers_agree() -> None:
    batch = future([[1], [2, 3, 4]], join_batches)
    assert batch.result() == [1, 2, 3, 4]
    assert [share.result() for share in batch.shares(2, split_batch)] == [[1], [2, 3, 4]]


def test_otherwise_the_batch_is_put_together_and_cut() -> None:
    batch = future([[1], [2, 3, 4]], join_batches)
    assert [share.result() for share in batch.shares(3, split_batch)] == [[1, 2], [3], [4]]
    assert [share.result() for share in batch.shares(2, lambda b, n: [b[:3], b[3:]])] == [[1, 2, 3], [4]]
    total = future([[1, 2], [3, 4]], lambda replies: [*replies[0], *replies[1]])
    assert [share.result() for share in total.shares(2, split_batch)] == [[1, 2], [3, 4]]
    assert all(len(share.handles) == 2 for share in total.shares(2, split_batch))
