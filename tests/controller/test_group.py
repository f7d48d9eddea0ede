"""The contract of worker groups, for Ray and for the in-process twin."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from practicum.controller import (
    FusedWorker,
    LocalWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    WorkerGroup,
    split_evenly,
)
from practicum.errors import ConfigError, WorkerError


class Counter(Worker):
    def __init__(self, start: int = 0) -> None:
        self.total = start + self.rank  # its place is known before __init__ runs

    def add(self, values: Sequence[int]) -> int:
        self.total += sum(values)
        return self.total

    def squares(self, values: Sequence[int]) -> list[int]:
        return [value * value for value in values]

    def place(self) -> tuple[int, int, int, int]:
        return self.rank, self.world_size, self.context.local_rank, self.context.node_rank

    def fail_on(self, rank: int) -> None:
        if self.rank == rank:
            raise ConfigError(f"rank {rank} has had enough")
        time.sleep(20 if self.world_size > 1 else 0)


class Reader(Worker):
    def read_neighbour(self) -> int:
        counter = self.siblings["counter"]
        assert isinstance(counter, Counter)
        return counter.total


@pytest.fixture(scope="module", params=["ray", "local"])
def open_group(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Opens groups of either kind; they end with the module."""
    with ExitStack() as stack:
        pool = None
        if request.param == "ray":
            request.getfixturevalue("ray_session")
            pool = stack.enter_context(RayResourcePool([2], max_colocate_count=8))

        def open_(packed: RayClassWithInitArgs[Any], name: str = "counters") -> WorkerGroup[Any]:
            group = LocalWorkerGroup(packed, name=name) if pool is None else RayWorkerGroup(pool, packed, name=name)
            stack.callback(group.shutdown)
            return group

        yield open_


@pytest.fixture(scope="module")
def counters(open_group: Any) -> WorkerGroup[Counter]:
    group: WorkerGroup[Counter] = open_group(RayClassWithInitArgs(Counter, 10))
    return group


def test_every_rank_answers_in_order_and_keeps_its_state(counters: WorkerGroup[Counter]) -> None:
    ranks = range(counters.world_size)
    assert counters.execute_all(Counter.add, [1, 2]) == [13 + rank for rank in ranks]
    assert counters.execute_all(Counter.add, values=[1]) == [14 + rank for rank in ranks]
    assert counters.execute_rank_zero(Counter.add, [1]) == 15
    assert counters.map(Counter.add, [[rank * 100] for rank in ranks])[-1] == (15 if len(ranks) == 1 else 115)


def test_workers_know_their_place(counters: WorkerGroup[Counter]) -> None:
    size = counters.world_size
    assert counters.execute_all(Counter.place) == [(rank, size, rank, 0) for rank in range(size)]


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_scatter_splits_along_the_batch_and_joins_in_order(counters: WorkerGroup[Counter], count: int) -> None:
    assert counters.scatter(Counter.squares, list(range(count))) == [i * i for i in range(count)]


def test_async_calls_keep_their_order(counters: WorkerGroup[Counter]) -> None:
    futures = [counters.execute_rank_zero_async(Counter.add, [1]) for _ in range(3)]
    last = futures[2].result()
    assert futures[0].result() == last - 2


def test_fused_roles_share_a_process_and_reach_each_other(open_group: Any) -> None:
    fused = RayClassWithInitArgs(
        FusedWorker, counter=RayClassWithInitArgs(Counter, 5), reader=RayClassWithInitArgs(Reader)
    )
    group = open_group(fused)
    group.role("counter", Counter).execute_all(Counter.add, [10])
    assert group.role("reader", Reader).execute_all(Reader.read_neighbour) == [15 + r for r in range(group.world_size)]
    with pytest.raises(ValueError, match=r"no role 'critic'.*counter \(Counter\), reader \(Reader\)"):
        group.role("critic", Counter)


def test_a_failure_names_group_rank_and_cause_while_others_are_busy(open_group: Any) -> None:
    group = open_group(RayClassWithInitArgs(Counter))
    last = group.world_size - 1
    start = time.monotonic()
    with pytest.raises(WorkerError, match=rf"'counters', rank {last} of .*fail_on raised ConfigError") as caught:
        group.execute_all(Counter.fail_on, last)
    assert time.monotonic() - start < 5
    assert caught.value.ranks == (last,)
    assert isinstance(caught.value.cause, ConfigError)
    assert "has had enough" in (caught.value.remote_traceback or "")


def test_a_wrong_call_is_refused_before_anything_runs(counters: WorkerGroup[Counter]) -> None:
    with pytest.raises(ValueError, match="Counter has no method 'read_neighbour'"):
        counters.execute_all(Reader.read_neighbour)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ranks, but"):
        counters.map(Counter.add, [[1]] * 5)


def test_a_failing_constructor_is_reported_like_a_call(open_group: Any) -> None:
    with pytest.raises(WorkerError, match=r"Counter.__init__ raised TypeError"):
        open_group(RayClassWithInitArgs(Counter, "not a number"))


def test_split_evenly_keeps_order_and_differs_by_one_at_most() -> None:
    assert split_evenly([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
    assert split_evenly([1], 3) == [[1], [], []]
