from __future__ import annotations

from typing import Any

from practicum.controller import GroupFuture, join_batches, split_batch


def future(replies: list[Any], gather: Any) -> GroupFuture[Any]:
    return GroupFuture([None] * len(replies), lambda: replies, gather)


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
