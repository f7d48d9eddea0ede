from __future__ import annotations

import pickle
from typing import Any

import pytest

from practicum.controller import GroupFuture, join_batches, split_batch
from practicum.controller.future import Replies
from practicum.controller.loop import run_sync
from practicum.errors import DeadlineError, WorkerDied, WorkerError


class Known(Replies):
    """Replies, or a failure, that are there."""

    def _wait(self, deadline: float) -> list[Any]:
        for reply in self.handles:
            if isinstance(reply, WorkerError):
                raise reply
        return list(self.handles)

    async def _arrive(self, deadline: float) -> list[Any]:
        return self._wait(deadline)


def future(replies: list[Any], gather: Any = list, upstream: Any = ()) -> GroupFuture[Any]:
    return GroupFuture(Known(replies, 0.0, upstream), range(len(replies)), gather)


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
