"""The contract of worker groups, for Ray and for the in-process twin."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from practicum.controller import (
    Coordinates,
    FusedWorker,
    LocalWorkerGroup,
    Mesh,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    WorkerGroup,
)
from practicum.errors import CallError, ConfigError, WorkerDied, WorkerError

NUM_RANKS = 4
MESHES = {"flat": Mesh(data=4), "model": Mesh(data=2, tensor=2), "stages": Mesh(data=2, pipeline=2)}


class Counter(Worker):
    def __init__(self, start: int = 0) -> None:
        self.total = start + self.rank  # its place is known before __init__ runs

    def add(self, values: Sequence[int]) -> int:
        self.total += sum(values)
        return self.total

    def squares(self, values: Sequence[int], offset: int = 0) -> list[int]:
        return [value * value + offset for value in values]

    def doubled(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        return values * 2

    def seen(self, values: Sequence[int]) -> tuple[int, list[int]]:
        return self.rank, list(values)

    def place(self) -> tuple[int, int, int, int, int]:
        context = self.context
        return self.rank, self.world_size, context.local_rank, context.local_world_size, context.node_rank

    def where(self, mesh: str) -> Coordinates:
        return self.coordinates(mesh)

    def fail_on(self, rank: int) -> None:
        if self.rank == rank:
            raise ConfigError(f"rank {rank} has had enough")

    def lazily(self) -> Iterator[int]:
        return (i for i in range(3))

    def one_by_one(self) -> Iterator[int]:
        yield 1

    def swallow(self, anything: Any) -> None:
        self.total = -1


class Reader(Worker):
    def add(self, values: Sequence[int]) -> int:
        return -1

    def read_neighbour(self) -> int:
        counter = self.siblings["counter"]
        assert isinstance(counter, Counter)
        return counter.total


def shouting(method: Callable[..., str]) -> Callable[[Any], str]:
    def wrapper(self: Any) -> str:
        return method(self).upper()

    return wrapper


class Decorated(Worker):
    @shouting
    def loud(self) -> str:
        return "hello"

    def quiet(self) -> str:
        return "hello"

    alias = quiet


class Diary(Worker):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, line: str) -> None:
        self.lines.append(line)

    def read(self) -> list[str]:
        return self.lines


class AsyncDiary(Diary):
    async def read_soon(self) -> list[str]:
        return self.lines


@pytest.fixture(scope="module", params=["ray", "local"])
def open_group(request: pytest.FixtureRequest) -> Iterator[Callable[..., WorkerGroup[Any]]]:
    """Opens groups of either kind; they end with the module."""
    with ExitStack() as stack:
        pool: RayResourcePool | None = None
        if request.param == "ray":
            request.getfixturevalue("ray_session")
            shared = {"CPU": 2 / NUM_RANKS}  # the smallest machine has two
            pool = stack.enter_context(RayResourcePool([NUM_RANKS], resources_per_process=shared, max_colocate_count=8))

        def open_(packed: RayClassWithInitArgs[Any], name: str = "counters") -> WorkerGroup[Any]:
            group: WorkerGroup[Any]
            if pool is None:
                group = LocalWorkerGroup(packed, name=name, world_size=NUM_RANKS, meshes=MESHES)
            else:
                group = RayWorkerGroup(pool, packed, name=name, meshes=MESHES)
            stack.callback(group.shutdown)
            return group

        yield open_


@pytest.fixture(scope="module")
def counters(open_group: Callable[..., WorkerGroup[Any]]) -> WorkerGroup[Counter]:
    return open_group(RayClassWithInitArgs(Counter, 10))


def test_every_rank_answers_in_order_and_keeps_its_state(counters: WorkerGroup[Counter]) -> None:
    ranks = range(NUM_RANKS)
    before = counters.execute_all(Counter.add, [])
    assert before == [before[0] + rank for rank in ranks]
    assert counters.execute_all(Counter.add, [1, 2]) == [total + 3 for total in before]
    assert counters.execute_all(Counter.add, values=[1]) == [total + 4 for total in before]
    assert counters.execute_rank_zero(Counter.add, [1]) == before[0] + 5
    assert counters.map(Counter.add, [[rank * 100] for rank in ranks])[3] == before[3] + 304


def test_workers_know_their_place(counters: WorkerGroup[Counter]) -> None:
    size = NUM_RANKS
    assert counters.execute_all(Counter.place) == [(rank, size, rank, size, 0) for rank in range(size)]


@pytest.mark.parametrize("count", [0, 1, 2, 7, 16])
def test_scatter_splits_along_the_batch_and_joins_in_order(counters: WorkerGroup[Counter], count: int) -> None:
    assert counters.scatter(Counter.squares, list(range(count))) == [i * i for i in range(count)]
    assert counters.scatter(Counter.squares, range(count), offset=1) == [i * i + 1 for i in range(count)]
    array = counters.scatter(Counter.doubled, np.arange(count))
    np.testing.assert_array_equal(array, np.arange(count) * 2)


def test_one_rank_can_be_called_by_its_number(counters: WorkerGroup[Counter]) -> None:
    assert [counters.execute_rank(rank, Counter.place)[0] for rank in range(NUM_RANKS)] == list(range(NUM_RANKS))
    calls = [counters.execute_rank_async(rank, Counter.seen, [rank]) for rank in (3, 1)]
    assert [call.result() for call in calls] == [(3, [3]), (1, [1])]
    with pytest.raises(CallError, match="ranks 0 to 3, not 4"):
        counters.execute_rank(NUM_RANKS, Counter.place)


def test_scatter_with_a_split_and_a_gather_of_ones_own(counters: WorkerGroup[Counter]) -> None:
    def every_nth(batch: list[int], parts: int) -> list[list[int]]:
        return [batch[part::parts] for part in range(parts)]

    def by_rank(replies: list[tuple[int, list[int]]]) -> dict[int, list[int]]:
        return dict(replies)

    dealt = counters.scatter_with(every_nth, by_rank, Counter.seen, list(range(6)))
    assert dealt == {0: [0, 4], 1: [1, 5], 2: [2], 3: [3]}
    with pytest.raises(CallError, match="made 1 shares where 4 were asked for"):
        counters.scatter_with(lambda batch, _: [batch], by_rank, Counter.seen, [1])


def test_in_a_mesh_the_ranks_of_a_shard_get_the_same_and_one_answers(counters: WorkerGroup[Counter]) -> None:
    sliced, staged = counters.mesh("model"), counters.mesh("stages")
    assert sliced.scatter_with(lambda b, n: [b[:2], b[2:]], list, Counter.seen, [1, 2, 3]) == [(0, [1, 2]), (2, [3])]
    assert staged.map(Counter.seen, [[1], [2]]) == [(2, [1]), (3, [2])]  # the last stage answers
    assert sliced.scatter(Counter.squares, [1, 2, 3]) == [1, 4, 9]
    assert [rank for rank, _ in sliced.execute_all(Counter.seen, [])] == [0, 2]
    before = counters.execute_all(Counter.add, [])
    sliced.map(Counter.add, [[1], [10]])
    assert counters.execute_all(Counter.add, []) == [b + d for b, d in zip(before, (1, 1, 10, 10), strict=True)]
    assert counters.execute_all(Counter.where, "stages")[2] == Coordinates(data=0, tensor=0, pipeline=1)
    with pytest.raises(CallError, match=r"no mesh 'other'; its meshes: flat, model, stages"):
        counters.mesh("other")
    with pytest.raises(CallError, match="has 2 shards, but 4 arguments came"):
        sliced.map(Counter.add, [[1]] * 4)


def test_async_calls_keep_their_order(counters: WorkerGroup[Counter]) -> None:
    futures = [counters.execute_rank_zero_async(Counter.add, [1]) for _ in range(3)]
    last = futures[2].result()
    assert futures[0].result() == last - 2
    assert futures[0].result() == last - 2  # asking again changes nothing


def test_futures_are_arguments_of_other_calls(counters: WorkerGroup[Counter], open_group: Any) -> None:
    others: WorkerGroup[Counter] = open_group(RayClassWithInitArgs(Counter), "others")
    squares = counters.scatter_async(Counter.squares, [1, 2, 3, 4, 5])
    assert others.scatter(Counter.squares, squares) == [1, 16, 81, 256, 625]
    # Another number of shards: the batch is put together and cut where it arrives.
    shares = others.mesh("model").scatter_with(lambda b, n: [b[:1], b[1:]], list, Counter.seen, squares)
    assert shares == [(0, [1]), (2, [4, 9, 16, 25])]
    assert others.mesh("model").scatter(Counter.squares, squares) == [1, 16, 81, 256, 625]
    # Everywhere the same whole result, as a positional and as a named argument.
    assert others.execute_all(Counter.seen, squares.forward())[3] == (3, [1, 4, 9, 16, 25])
    offset = counters.execute_rank_zero_async(Counter.add, [])
    value = offset.result()
    assert others.scatter(Counter.squares, [1, 2], offset=offset.forward()) == [1 + value, 4 + value]
    # One reply per rank.
    lists = counters.map_async(Counter.squares, [[rank] for rank in range(NUM_RANKS)])
    assert others.map(Counter.seen, lists) == [(rank, [rank * rank]) for rank in range(NUM_RANKS)]
    with pytest.raises(CallError, match="map takes the future of execute_all or map"):
        others.map(Counter.seen, squares)  # type: ignore[arg-type]


def test_a_failure_upstream_names_the_rank_that_failed(counters: WorkerGroup[Counter], open_group: Any) -> None:
    others: WorkerGroup[Counter] = open_group(RayClassWithInitArgs(Counter), "downstream")
    failing = counters.execute_all_async(Counter.fail_on, 2)
    with pytest.raises(WorkerError, match=r"'counters', rank 2 of 4 .*fail_on raised ConfigError") as caught:
        others.execute_all(Counter.swallow, failing.forward())
    assert (caught.value.group, caught.value.ranks) == ("counters", (2,))


def test_fused_roles_share_a_process_and_reach_each_other(open_group: Any) -> None:
    fused = RayClassWithInitArgs(
        FusedWorker, counter=RayClassWithInitArgs(Counter, 5), reader=RayClassWithInitArgs(Reader)
    )
    group = open_group(fused)
    group.role("counter", Counter).execute_all(Counter.add, [10])
    readers = group.role("reader", Reader)
    assert readers.execute_all(Reader.read_neighbour) == [15 + rank for rank in range(NUM_RANKS)]
    assert readers.mesh("model").with_timeout(60).execute_all(Reader.read_neighbour) == [15, 17]
    with pytest.raises(CallError, match=r"no role 'critic'.*counter \(Counter\), reader \(Reader\)"):
        group.role("critic", Counter)
    with pytest.raises(CallError, match=r"no role 'reader' of class Counter"):
        group.role("reader", Counter)


def test_a_failure_names_group_rank_and_cause(open_group: Any) -> None:
    group = open_group(RayClassWithInitArgs(Counter))
    last = group.world_size - 1
    with pytest.raises(WorkerError, match=rf"'counters', rank {last} of .*fail_on raised ConfigError") as caught:
        group.execute_all(Counter.fail_on, last)
    error = caught.value
    assert error.ranks == (last,) and error.node and error.pid
    assert isinstance(error.cause, ConfigError)
    assert "has had enough" in (error.remote_traceback or "")
    failing = group.execute_all_async(Counter.fail_on, 0)  # the call itself raises nothing
    with pytest.raises(WorkerError, match="rank 0 of"):
        failing.result()


def test_a_wrong_call_is_refused_before_anything_runs(counters: WorkerGroup[Counter]) -> None:
    before = counters.execute_all(Counter.add, [])
    for refused, match in [
        (lambda: counters.execute_all(Reader.read_neighbour), "Reader.read_neighbour is not a method of Counter"),  # type: ignore[arg-type]
        (lambda: counters.execute_all(Reader.add, [1]), "Reader.add is not a method of Counter"),  # type: ignore[arg-type]
        (lambda: counters.execute_all(Counter.add), "wrong arguments for Counter.add: missing .*'values'"),  # type: ignore[call-arg]
        (lambda: counters.execute_all(Counter.add, [1], more=2), "Counter.add: got an unexpected .*'more'"),  # type: ignore[call-arg]
        (lambda: counters.map(Counter.add, [[1]] * 5), "has 4 ranks, but 5 arguments came"),
        (lambda: counters.map(Counter.add, {0: [1], 1: [2]}), "map takes a list of arguments, not a dict"),  # type: ignore[arg-type]
        (lambda: counters.map(Counter.add, iter([[1]])), "map takes a list of arguments, not a list_iterator"),  # type: ignore[arg-type]
        (lambda: counters.scatter_with(lambda b, n: None, list, Counter.add, 1), "list of shares, not a NoneType"),  # type: ignore[arg-type,return-value]
        (lambda: counters.execute_all(Counter.__init__), "Counter.__init__ cannot be called on a group"),  # type: ignore[misc]
        (lambda: counters.scatter(Counter.swallow, 3), "type int, cannot be split"),
        (lambda: counters.execute_all(Counter.one_by_one), "Counter.one_by_one is a generator: a worker's method"),
    ]:
        with pytest.raises(CallError, match=match):
            refused()
    assert counters.execute_all(Counter.add, []) == before


def test_an_answer_that_is_not_there_yet_is_refused(counters: WorkerGroup[Counter]) -> None:
    with pytest.raises(WorkerError, match="a generator cannot be an answer: return a list"):
        counters.execute_all(Counter.lazily)


def test_a_failing_constructor_is_reported_like_a_call(open_group: Any) -> None:
    with pytest.raises(WorkerError, match=r"Counter.__init__ raised TypeError"):
        open_group(RayClassWithInitArgs(Counter, "not a number"))


def test_a_mesh_of_another_size_is_refused() -> None:
    with pytest.raises(CallError, match="mesh 'wide' of group 'small' has 4 ranks, the group 1"):
        LocalWorkerGroup(RayClassWithInitArgs(Counter), name="small", meshes={"wide": Mesh(data=4)})


def test_a_restarted_group_starts_from_its_arguments_and_its_views_follow(open_group: Any) -> None:
    group: WorkerGroup[Counter] = open_group(RayClassWithInitArgs(Counter, 7), "phoenix")
    view = group.mesh("model").with_timeout(60)
    group.execute_all(Counter.add, [5])
    group.restart()
    assert group.execute_all(Counter.add, []) == [7, 8, 9, 10]
    assert view.execute_all(Counter.add, []) == [7, 9]
    assert group.execute_all(Counter.place)[3] == (3, 4, 3, 4, 0)
    assert sorted(group.stacks()) == [0, 1, 2, 3]
    with group:
        pass  # its end is a shutdown
    with pytest.raises(WorkerDied, match="'phoenix' has been shut down"):
        view.execute_all(Counter.add, [])
    group.restart()
    assert view.execute_all(Counter.add, []) == [7, 9]
    group.shutdown()


def test_methods_are_found_under_the_name_the_class_gives_them(open_group: Any) -> None:
    group: WorkerGroup[Decorated] = open_group(RayClassWithInitArgs(Decorated), "decorated")
    assert group.execute_all(Decorated.loud) == ["HELLO"] * NUM_RANKS
    assert group.execute_all(Decorated.alias) == ["hello"] * NUM_RANKS
    assert group.execute_all(Worker.close) == [None] * NUM_RANKS


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), "5", None])
def test_a_deadline_is_a_positive_number(counters: WorkerGroup[Counter], timeout_s: Any) -> None:
    with pytest.raises(CallError, match="'counters': timeout_s must be a positive number of seconds"):
        counters.with_timeout(timeout_s)


@pytest.mark.parametrize("cls", [Diary, AsyncDiary])
def test_calls_of_two_threads_reach_all_ranks_in_the_same_order(open_group: Any, cls: type[Diary]) -> None:
    group: WorkerGroup[Diary] = open_group(RayClassWithInitArgs(cls), cls.__name__)
    threads = [
        threading.Thread(target=lambda name=name: [group.execute_all(Diary.write, f"{name}{i}") for i in range(30)])
        for name in "abc"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    diaries = group.execute_all(Diary.read)
    assert len(diaries[0]) == 90
    assert diaries == [diaries[0]] * NUM_RANKS


def test_two_threads_can_call_at_once(counters: WorkerGroup[Counter]) -> None:
    results: list[list[int]] = []

    def call() -> None:
        for _ in range(10):
            results.append(counters.scatter(Counter.squares, [1, 2, 3]))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    for thread in threads:
        thread.join(deadline - time.monotonic())
    assert results == [[1, 4, 9]] * 40
