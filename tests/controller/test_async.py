"""Awaited calls and streams: workers with coroutines, on Ray and in the in-process twin."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from practicum.controller import (
    FusedWorker,
    LocalWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    WorkerGroup,
)
from practicum.controller.loop import driver_loop, iterate, run_sync
from practicum.errors import CallError, ConfigError, DeadlineError, WorkerDied, WorkerError

NUM_RANKS = 2


class Writer(Worker):
    def __init__(self) -> None:
        self.events: list[Any] = []

    async def double(self, value: int) -> int:
        await asyncio.sleep(0)
        return 2 * value + self.rank

    async def doubles(self, values: list[int]) -> list[int]:
        return [2 * value for value in values]

    async def sleep(self, seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.events.append("cancelled")
            raise
        return "slept"

    async def fail_on(self, rank: int) -> None:
        if self.rank == rank:
            raise ConfigError("has had enough")
        await asyncio.sleep(60)

    async def count(self, num: int, pause_s: float = 0.0, fail_at: int = -1) -> AsyncIterator[int]:
        try:
            for number in range(num):
                if number == fail_at:
                    raise ConfigError("cannot count any further")
                yield number
                await self.pause(pause_s)
        finally:
            await asyncio.sleep(0.05)  # a generator may have something to await when it ends
            self.events.append("closed")

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def block_the_loop(self, seconds: float) -> AsyncIterator[None]:
        time.sleep(seconds)
        yield

    async def on_device_thread(self) -> tuple[str, str]:
        return threading.current_thread().name, await self.on_device(lambda: threading.current_thread().name)

    def note(self, event: Any) -> str:
        self.events.append(event)
        return threading.current_thread().name

    def take(self) -> list[Any]:
        events, self.events = self.events, []
        return events

    def block(self, seconds: float) -> None:
        time.sleep(seconds)

    def first(self, array: Any) -> int:
        self.events.append(int(array[0]))
        return int(array[0])

    def pid(self) -> int:
        return os.getpid()


class Plain(Worker):
    def __init__(self) -> None:
        self.built_on = threading.current_thread().name

    def work(self, seconds: float) -> tuple[str, str]:
        time.sleep(seconds)
        return self.built_on, threading.current_thread().name


class Closing(Worker):
    def __init__(self, diary: list[Any]) -> None:
        self.diary = diary

    async def work(self) -> None: ...

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.diary.append(asyncio.get_running_loop())


class NeverClosed(Worker):
    async def close(self) -> None:
        await asyncio.sleep(60)


@pytest.fixture(scope="module")
def pool(ray_session: None) -> Iterator[RayResourcePool]:
    with RayResourcePool([NUM_RANKS], max_colocate_count=2) as pool:
        yield pool


@pytest.fixture(scope="module", params=["ray", "local"])
def writers(request: pytest.FixtureRequest) -> Iterator[WorkerGroup[Writer]]:
    packed = RayClassWithInitArgs(Writer)
    group: WorkerGroup[Writer]
    if request.param == "ray":
        group = RayWorkerGroup(request.getfixturevalue("pool"), packed, name="writers")
    else:
        group = LocalWorkerGroup(packed, name="writers", world_size=NUM_RANKS)
    with group:
        yield group


@pytest.fixture
def mortals(pool: RayResourcePool) -> Iterator[WorkerGroup[Writer]]:
    with RayWorkerGroup(pool, RayClassWithInitArgs(Writer), name="mortals") as group:
        yield group


async def until(happened: Callable[[], bool]) -> None:
    for _ in range(1000):
        if happened():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


def test_coroutines_are_awaited_or_waited_for(writers: WorkerGroup[Writer]) -> None:
    async def main() -> None:
        assert await writers.execute_all_async(Writer.double, 4) == [8, 9]
        assert await writers.execute_rank_async(1, Writer.double, 1) == 3
        assert await writers.execute_rank_zero_async(Writer.note, "plain") != ""
        future = writers.scatter_async(Writer.doubles, [1, 2, 3])
        assert await future == await future == [2, 4, 6]
        assert await writers.scatter_async(Writer.doubles, future) == [4, 8, 12]
        assert await writers.map_async(Writer.double, [1, 2]) == [2, 5]
        many = [writers.execute_rank_async(n % NUM_RANKS, Writer.double, n) for n in range(50)]
        assert await asyncio.gather(*many) == [2 * n + n % NUM_RANKS for n in range(50)]
        # A plain method whose argument has to be awaited first.
        assert await writers.execute_all_async(Writer.first, future.forward()) == [2, 2]

    asyncio.run(main())
    run_sync(main())
    assert writers.execute_all(Writer.double, 4) == [8, 9]
    assert writers.scatter(Writer.doubles, [1, 2, 3]) == [2, 4, 6]
    assert writers.scatter(Writer.doubles, writers.scatter_async(Writer.doubles, [1, 2, 3])) == [4, 8, 12]
    writers.execute_all(Writer.take)


def test_streams_give_items_as_they_come_two_at_once(writers: WorkerGroup[Writer]) -> None:
    async def consume(rank: int) -> list[int]:
        return [number async for number in writers.stream(rank, Writer.count, 50, pause_s=0.001)]

    async def main() -> list[list[int]]:
        return list(await asyncio.gather(consume(0), consume(1), consume(0)))

    assert run_sync(main()) == [list(range(50))] * 3
    assert writers.execute_all(Writer.take) == [["closed", "closed"], ["closed"]]


def test_closing_a_stream_early_ends_the_workers_generator(writers: WorkerGroup[Writer]) -> None:
    async def main() -> None:
        async with aclosing(writers.stream(0, Writer.count, 1000, pause_s=0.02)) as numbers:
            async for number in numbers:
                if number == 2:
                    break
        assert await writers.execute_rank_async(0, Writer.take) == ["closed"]

    run_sync(main())


def test_cancelling_an_await_cancels_the_coroutines(writers: WorkerGroup[Writer]) -> None:
    async def main() -> None:
        call = asyncio.ensure_future(asyncio.wait_for(writers.execute_all_async(Writer.sleep, 60.0), 0.3))
        with pytest.raises(TimeoutError):
            await call
        assert await writers.execute_all_async(Writer.take) == [["cancelled"], ["cancelled"]]

    run_sync(main())


def test_a_failure_carries_its_cause(writers: WorkerGroup[Writer]) -> None:
    async def main() -> None:
        with pytest.raises(WorkerError, match=r"'writers', rank 1 of 2 .*Writer.fail_on raised ConfigError") as caught:
            await writers.execute_all_async(Writer.fail_on, 1)
        assert caught.value.ranks == (1,) and isinstance(caught.value.cause, ConfigError)
        seen = []
        with pytest.raises(WorkerError, match=r"rank 0 of 2 .*Writer.count raised ConfigError") as caught:
            async for number in writers.stream(0, Writer.count, 9, fail_at=3):
                seen.append(number)
        assert seen == [0, 1, 2] and isinstance(caught.value.cause, ConfigError)
        assert "cannot count any further" in (caught.value.remote_traceback or "")
        failing = writers.execute_rank_async(1, Writer.fail_on, 1)
        with pytest.raises(WorkerError, match=r"rank 1 of 2 .*has had enough"):
            await writers.execute_all_async(Writer.double, failing.forward())  # type: ignore[call-overload]
        with pytest.raises(WorkerError, match=r"rank 1 of 2 .*has had enough"):
            await writers.execute_all_async(Writer.first, failing.forward())

    run_sync(main())
    writers.execute_all(Writer.take)


def test_a_generator_is_called_by_stream_and_nothing_else_is(writers: WorkerGroup[Writer]) -> None:
    with pytest.raises(CallError, match=r"Writer.count is a generator: call it with stream"):
        writers.execute_all(Writer.count, 3)
    with pytest.raises(CallError, match=r"Writer.double is no async generator: call it with execute_rank"):
        writers.stream(0, Writer.double, 3)  # type: ignore[arg-type]
    with pytest.raises(CallError, match="has ranks 0 to 1, not 2"):
        writers.stream(2, Writer.count, 3)


def test_plain_methods_are_called_in_the_order_of_the_calls(writers: WorkerGroup[Writer]) -> None:
    large = np.full(2_000_000, -1, np.int8)  # goes through the object store
    calls: list[Any] = []
    for number in range(100):
        calls.append(writers.execute_all_async(Writer.note, number))
        if number % 20 == 0:
            calls.append(writers.execute_all_async(Writer.first, large))
    for call in calls:
        call.result()
    events = writers.execute_all(Writer.take)
    assert events[0] == events[1]
    assert [event for event in events[0] if event >= 0] == list(range(100))
    assert [events[0].index(20 * n) for n in range(5)] == [21 * n for n in range(5)]


def test_coroutines_can_use_the_device_thread(writers: WorkerGroup[Writer]) -> None:
    (loop, device), _ = writers.execute_all(Writer.on_device_thread)
    assert (loop == device) is isinstance(writers, LocalWorkerGroup)
    assert writers.execute_rank_zero(Writer.note, 0) == device or isinstance(writers, LocalWorkerGroup)
    writers.execute_all(Writer.take)


def test_a_worker_killed_during_an_await_or_a_stream_is_named_at_once(mortals: WorkerGroup[Writer]) -> None:
    async def consume() -> None:
        async for _ in mortals.stream(1, Writer.count, 5, pause_s=60.0):
            first.set()

    async def main() -> None:
        stream = asyncio.ensure_future(consume())
        await first.wait()
        awaited = asyncio.gather(mortals.execute_all_async(Writer.sleep, 60.0))
        await asyncio.sleep(0.1)
        start = time.monotonic()
        os.kill((await mortals.execute_rank_async(1, Writer.pid)), signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"'mortals': rank 1 \(node .*, pid .*\) died during Writer.count"):
            await stream
        with pytest.raises(WorkerDied, match=r"'mortals': rank 1 .* died during Writer.sleep") as caught:
            await awaited
        assert time.monotonic() - start < 2
        assert caught.value.ranks == (1,)

    first = asyncio.Event()
    run_sync(main())
    mortals.restart()
    assert mortals.execute_all(Writer.double, 1) == [2, 3]


def test_a_deadline_shows_what_all_ranks_do_and_await(mortals: WorkerGroup[Writer]) -> None:
    async def main() -> None:
        short = mortals.with_timeout(1.0)
        with pytest.raises(DeadlineError, match=r"Writer.sleep passed its deadline; no answer from rank 1") as caught:
            await short.map_async(Writer.sleep, [0.0, 60.0])
        assert caught.value.ranks == (1,)
        assert "await asyncio.sleep(seconds)" in caught.value.stacks[1]
        assert "await asyncio.sleep(seconds)" not in caught.value.stacks[0]
        seen = []
        with pytest.raises(DeadlineError, match=r"the next item of Writer.count passed its deadline") as caught:
            async for number in short.stream(0, Writer.count, 5, pause_s=60.0):
                seen.append(number)
        assert seen == [0]
        assert "await self.pause(pause_s)" in caught.value.stacks[0]
        assert "await asyncio.sleep(seconds)" in caught.value.stacks[0]
        assert await mortals.execute_rank_async(0, Writer.take) == ["closed"]
        # One item may take as long as the next.
        assert [n async for n in short.stream(0, Writer.count, 4, pause_s=0.4)] == [0, 1, 2, 3]
        busy = mortals.execute_all_async(Writer.block, 2.0)
        await asyncio.sleep(0.2)
        assert "time.sleep(seconds)" in (await asyncio.to_thread(mortals.stacks))[0]
        assert await mortals.execute_all_async(Writer.double, 3) == [6, 7]  # its event loop is free
        await busy

    run_sync(main())


def test_a_worker_whose_event_loop_is_blocked_is_named_after_one_deadline(mortals: WorkerGroup[Writer]) -> None:
    async def main() -> None:
        async with asyncio.timeout(11.0):  # two deadlines would be more
            async for _ in mortals.with_timeout(6.0).stream(1, Writer.block_the_loop, 60.0):
                raise AssertionError("not reached")

    with pytest.raises(DeadlineError, match=r"next item of Writer.block_the_loop .*no answer from rank 1") as caught:
        run_sync(main())
    assert "time.sleep(seconds)" in caught.value.stacks[1]


def test_a_restart_ends_what_is_under_way(mortals: WorkerGroup[Writer]) -> None:
    async def main() -> None:
        stream = mortals.stream(0, Writer.count, 5, pause_s=60.0)
        assert await anext(stream) == 0
        pending = mortals.execute_all_async(Writer.sleep, 60.0)
        await asyncio.to_thread(mortals.restart)
        with pytest.raises(WorkerDied, match=r"rank 0 was ended by a restart or shutdown before it answered Writer.s"):
            await pending
        with pytest.raises(WorkerDied, match=r"rank 0 was ended by a restart or shutdown before it answered Writer.c"):
            await anext(stream)
        assert await mortals.execute_all_async(Writer.double, 1) == [2, 3]

    run_sync(main())


def test_a_plain_role_has_one_thread_while_the_event_loop_of_the_other_stays_free(pool: RayResourcePool) -> None:
    fused = RayClassWithInitArgs(FusedWorker, plain=RayClassWithInitArgs(Plain), writer=RayClassWithInitArgs(Writer))
    with RayWorkerGroup(pool, fused, name="fused") as group:
        plains, writers = group.role("plain", Plain), group.role("writer", Writer)

        async def main() -> None:
            working = [plains.execute_all_async(Plain.work, 0.5) for _ in range(3)]
            assert await writers.execute_all_async(Writer.double, 1) == [2, 3]
            assert [n async for n in writers.stream(1, Writer.count, 5)] == [0, 1, 2, 3, 4]
            assert not any(future.replies.received for future in working)
            threads = {name for future in working for names in await future for name in names}
            threads |= set(await writers.execute_all_async(Writer.note, 0))
            assert len(threads) == 1

        run_sync(main())


def test_the_twin_runs_coroutines_on_the_loop_of_the_caller() -> None:
    group = LocalWorkerGroup(RayClassWithInitArgs(Writer), name="twin")

    async def main() -> None:
        assert (await group.execute_rank_zero_async(Writer.on_device_thread))[0] == threading.current_thread().name
        future = group.execute_all_async(Writer.double, 1)
        with pytest.raises(RuntimeError, match="a blocking call was made on the event loop"):
            future.result()
        assert await future == [2]

    asyncio.run(main())


def test_a_close_that_is_a_coroutine_is_run() -> None:
    diary: list[Any] = []
    packed = RayClassWithInitArgs(Closing, diary)
    LocalWorkerGroup(packed).shutdown()
    fused = RayClassWithInitArgs(FusedWorker, a=packed, b=RayClassWithInitArgs(Plain), c=packed)
    with LocalWorkerGroup(fused):
        pass
    assert diary == [driver_loop()] * 3

    async def main() -> None:
        group = LocalWorkerGroup(packed)
        await asyncio.to_thread(group.restart)
        assert len(diary) == 4
        group.shutdown()
        await until(lambda: len(diary) == 5)

    run_sync(main())


def test_a_close_runs_on_the_loop_of_the_other_coroutines_for_as_long_as_that_runs() -> None:
    diary: list[Any] = []
    fused = RayClassWithInitArgs(FusedWorker, role=RayClassWithInitArgs(Closing, diary))
    group = LocalWorkerGroup(fused)

    async def main() -> asyncio.AbstractEventLoop:
        await group.role("role", Closing).execute_all_async(Closing.work)
        return asyncio.get_running_loop()

    async def main_that_closes() -> None:
        loop = await main()
        await asyncio.to_thread(group.restart)
        assert diary == [loop]

    asyncio.run(main_that_closes())
    asyncio.run(main())
    group.shutdown()
    assert diary[1:] == [driver_loop()]


def test_a_close_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("practicum.controller.worker._MOST_CLOSE_S", 0.1)
    group = LocalWorkerGroup(RayClassWithInitArgs(NeverClosed), name="open")
    with pytest.raises(DeadlineError, match=r"'open': NeverClosed.close of rank 0 was not done within 0.1 s"):
        group.shutdown()


def test_a_coroutine_is_cancelled_when_its_waiter_is_interrupted() -> None:
    ended = []

    async def main() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            ended.append(True)

    main_thread = threading.get_ident()
    threading.Timer(0.3, lambda: signal.pthread_kill(main_thread, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        run_sync(main())
    assert ended == [True]

    async def nested() -> None:
        run_sync(main())

    with pytest.raises(RuntimeError, match="await it instead"):
        run_sync(nested())
    assert driver_loop() is driver_loop()


def test_the_worker_of_an_attached_driver_has_its_own_order(mortals: WorkerGroup[Writer]) -> None:
    """Two senders count their calls each for themselves."""
    workers: Any = mortals._running()  # type: ignore[attr-defined]
    other = type(workers)(workers.plan, workers.hosts, workers.locations, workers.id)
    for sender in (workers, other, other, workers):
        handle, _ = sender.send(0, ".double", [])
        with pytest.raises(WorkerError, match="missing 1 required positional argument"):
            sender.collect([handle], [0], "a call", time.monotonic() + 30)


def test_an_async_generator_is_iterated_over_and_closed_with_its_iterator() -> None:
    ended = []

    async def numbers(fails: bool) -> AsyncIterator[int]:
        try:
            yield 1
            if fails:
                raise ConfigError("no more")
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            ended.append(fails)

    with pytest.raises(ConfigError, match="no more"):
        list(iterate(numbers(fails=True)))  # type: ignore[arg-type]
    iterator: Any = iterate(numbers(fails=False))  # type: ignore[arg-type]
    assert next(iterator) == 1
    iterator.close()
    main_thread = threading.get_ident()
    threading.Timer(0.3, lambda: signal.pthread_kill(main_thread, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        list(iterate(numbers(fails=False)))  # type: ignore[arg-type]
    assert ended == [True, False, False]
