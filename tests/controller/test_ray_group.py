"""What only Ray's groups can run into: late, dead and stuck processes, arguments that travel, colocation."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from numpy.typing import NDArray

from practicum.controller import FusedWorker, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker
from practicum.controller.ray_group import _parcel
from practicum.controller.wire import pack
from practicum.errors import CallError, DeadlineError, ResourceError, WorkerDied, WorkerError

MIB = 1 << 20


class Mortal(Worker):
    def exit(self, rank: int) -> None:
        if self.rank == rank:
            os._exit(7)
        time.sleep(60)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def fail_in_collective(self, rank: int) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method="env://")  # from the variables the group set
        dist.barrier()
        if self.rank == rank:
            raise RuntimeError("not today")
        dist.barrier()

    def exit_in_collective(self, rank: int) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method="env://")
        dist.barrier()
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    def pid(self) -> int:
        return os.getpid()

    def master_port(self) -> int:
        return self.context.master_port

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def is_main_thread(self) -> bool:
        return threading.current_thread() is threading.main_thread()

    def spawn(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]).pid

    def is_view(self, array: NDArray[np.uint8]) -> tuple[bool, int]:
        return not array.flags.writeable and not array.flags.owndata, int(array[0])

    def large(self, size: int, gate: str = "") -> NDArray[np.uint8]:
        while gate and not os.path.exists(gate):
            time.sleep(0.01)
        return np.full(size, self.rank, np.uint8)

    def lambda_reply(self) -> Any:
        return threading.Lock()

    def both(self, one: Any, two: Any) -> None: ...

    def apply(self, function: Callable[[int], int]) -> int:
        return function(self.rank)


class Meeting(Worker):
    def __init__(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method="env://")

    def met(self) -> str:
        import torch.distributed as dist

        names: list[Any] = [None, None]
        dist.all_gather_object(names, self.context.group)
        (name,) = set(names)
        return str(name)


@pytest.fixture(scope="module")
def pool(ray_session: None) -> Iterator[RayResourcePool]:
    with RayResourcePool([2], max_colocate_count=2) as pool:
        yield pool


@pytest.fixture
def group(pool: RayResourcePool) -> Iterator[RayWorkerGroup[Mortal]]:
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Mortal), name="mortals")
    yield group
    group.shutdown()


def test_a_call_past_its_deadline_names_the_late_ranks_and_shows_all_stacks(group: RayWorkerGroup[Mortal]) -> None:
    start = time.monotonic()
    with pytest.raises(DeadlineError, match=r"'mortals': Mortal.sleep passed its deadline; no answer from rank 1") as e:
        group.with_timeout(1.5).map(Mortal.sleep, [0.0, 60.0])
    assert time.monotonic() - start < 30
    assert e.value.ranks == (1,)
    assert sorted(e.value.stacks) == [0, 1]
    assert "in sleep\n    time.sleep(seconds)" in e.value.stacks[1]
    assert "time.sleep(seconds)" not in e.value.stacks[0]
    assert "time.sleep(seconds)" in str(e.value)
    assert "in sleep" in group.stacks()[1]


def test_a_process_that_is_stopped_is_told_from_a_busy_one_and_restarts(group: RayWorkerGroup[Mortal]) -> None:
    stopped = group.execute_all(Mortal.pid)[1]
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(DeadlineError, match=r"no answer from rank 1") as caught:
        group.with_timeout(1.0).execute_all(Mortal.pid)
    assert "silent" in caught.value.stacks[1]
    group.restart()
    assert stopped not in group.execute_all(Mortal.pid)
    assert not psutil.wait_procs([psutil.Process(stopped)] if psutil.pid_exists(stopped) else [], timeout=15)[1]


def test_a_dead_worker_is_noticed_while_others_are_busy_and_the_group_restarts(group: RayWorkerGroup[Mortal]) -> None:
    before = group.execute_all(Mortal.pid)
    start = time.monotonic()
    with pytest.raises(WorkerDied, match=r"'mortals': rank 1 \(node .*, pid .*\) died during Mortal.exit") as caught:
        group.execute_all(Mortal.exit, 1)
    assert time.monotonic() - start < 30
    assert (caught.value.ranks, caught.value.pid) == ((1,), before[1])
    # Callers of groups find what they can do in the traceback; the message is also read by those who train.
    assert "restart()" not in str(caught.value) and any("restart()" in note for note in caught.value.__notes__)
    with pytest.raises(WorkerDied, match="rank 1"):
        group.execute_all(Mortal.pid)
    group.restart()
    assert not set(before) & set(group.execute_all(Mortal.pid))


def test_a_call_under_way_at_a_restart_is_told_so(group: RayWorkerGroup[Mortal]) -> None:
    pending = group.execute_all_async(Mortal.sleep, 30.0)
    group.restart()
    with pytest.raises(WorkerDied, match=r"rank 0 was ended by a restart or shutdown before it answered Mortal.sleep"):
        pending.result()
    assert len(group.execute_all(Mortal.pid)) == 2


def test_restarts_and_calls_of_several_threads_do_not_trip_over_each_other(group: RayWorkerGroup[Mortal]) -> None:
    odd: list[BaseException] = []

    def call() -> None:
        for _ in range(40):
            try:
                group.with_timeout(30).execute_all(Mortal.pid)
            except WorkerDied:  # ended, or just being restarted
                time.sleep(0.05)
            except BaseException as error:
                odd.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    threads += [threading.Thread(target=group.restart) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not odd
    assert len(group.execute_all(Mortal.pid)) == 2
    assert all(len(place.tenants) == 1 for place in group.pool.places)


def test_an_exception_arrives_while_the_others_sit_in_a_collective(group: RayWorkerGroup[Mortal]) -> None:
    start = time.monotonic()
    waiting = group.with_timeout(60).execute_all_async(Mortal.fail_in_collective, 1)
    with pytest.raises(WorkerError, match=r"rank 1 of 2.*not today") as caught:
        waiting.result()
    assert caught.value.ranks == (1,)
    assert time.monotonic() - start < 30  # most of it is importing torch
    printed = "".join(traceback.format_exception(caught.value))  # what a user sees who does not catch it
    assert 'raise RuntimeError("not today")' in printed


def test_of_a_death_in_a_collective_the_dead_rank_is_named_not_who_noticed(group: RayWorkerGroup[Mortal]) -> None:
    with pytest.raises(WorkerDied, match=r"rank 1 .*died during Mortal.exit_in_collective"):
        group.with_timeout(60).execute_all(Mortal.exit_in_collective, 1)


def test_each_rank_is_a_process_of_its_own_and_calls_run_in_its_main_thread(group: RayWorkerGroup[Mortal]) -> None:
    assert len({os.getpid(), *group.execute_all(Mortal.pid)}) == 3
    assert group.execute_all(Mortal.is_main_thread) == [True, True]
    assert group.execute_all(Mortal.variable, "RANK") == ["0", "1"]
    assert group.execute_all(Mortal.variable, "WORLD_SIZE") == ["2", "2"]


def test_where_the_ranks_meet_nobody_else_can_listen(group: RayWorkerGroup[Mortal]) -> None:
    (port,) = set(group.execute_all(Mortal.master_port))
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))


def test_groups_that_start_at_the_same_moment_meet_each_for_itself(pool: RayResourcePool) -> None:
    async def main() -> None:
        groups = [
            RayWorkerGroup(pool, RayClassWithInitArgs(Meeting), name=name, starts=False) for name in ("one", "two")
        ]
        try:
            await asyncio.gather(*(group.restart_async() for group in groups))
            assert [group.execute_all(Meeting.met) for group in groups] == [["one", "one"], ["two", "two"]]
        finally:
            for group in groups:
                group.shutdown()

    asyncio.run(main())


def test_a_shutdown_during_a_restart_does_not_wait_for_it_and_counts(group: RayWorkerGroup[Mortal]) -> None:
    async def main() -> None:
        restarting = asyncio.create_task(group.restart_async())
        while all(place.tenants for place in group.pool.places):
            await asyncio.sleep(0)
        while not all(place.tenants for place in group.pool.places):
            await asyncio.sleep(0)
        group.shutdown()
        with pytest.raises(WorkerDied, match="was shut down while it started"):
            await restarting

    asyncio.run(main())
    assert all(place.tenants == [] for place in group.pool.places)
    with pytest.raises(WorkerDied, match="has been shut down"):
        group.execute_all(Mortal.pid)


def test_what_a_worker_started_ends_with_it(group: RayWorkerGroup[Mortal]) -> None:
    children = [psutil.Process(pid) for pid in group.execute_all(Mortal.spawn)]
    os.kill(group.execute_all(Mortal.pid)[0], signal.SIGKILL)
    group.shutdown()
    assert not psutil.wait_procs(children, timeout=10)[1]


def test_large_arguments_are_put_once_and_read_in_place(group: RayWorkerGroup[Mortal]) -> None:
    array = np.full(8 * MIB, 3, np.uint8)
    payload = pack(array)
    assert isinstance(_parcel(payload, 2), ray.ObjectRef)  # for two, stored once,
    assert _parcel(payload, 1) is payload and _parcel(pack(3), 2) == pack(3)  # for one, or if small, sent along
    assert group.execute_all(Mortal.is_view, array) == [(True, 3), (True, 3)]
    assert group.map(Mortal.is_view, [array, array + 1]) == [(True, 3), (True, 4)]


def test_a_future_goes_from_worker_to_worker_without_visiting_the_driver(
    pool: RayResourcePool, group: RayWorkerGroup[Mortal]
) -> None:
    others = RayWorkerGroup(pool, RayClassWithInitArgs(Mortal), name="others")
    try:
        arrays = group.execute_all_async(Mortal.large, 8 * MIB)
        assert others.map(Mortal.is_view, arrays) == [(True, 0), (True, 1)]
        late = group.execute_all_async(Mortal.sleep, 3.0)
        with pytest.raises(DeadlineError, match=r"'mortals': Mortal.sleep passed .*rank 0 .*rank 1") as caught:
            others.with_timeout(1).execute_all(Mortal.apply, late.forward())  # type: ignore[arg-type]
        assert "time.sleep(seconds)" in caught.value.stacks[0]
        dying = group.execute_rank_zero_async(Mortal.exit, 0)
        with pytest.raises(WorkerDied, match=r"'mortals': rank 0 .*died during Mortal.exit"):
            others.with_timeout(20).execute_all(Mortal.apply, dying.forward())  # type: ignore[arg-type]
    finally:
        others.shutdown()


def test_large_replies_do_not_block_small_calls(
    pool: RayResourcePool, group: RayWorkerGroup[Mortal], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with RayWorkerGroup(pool, RayClassWithInitArgs(Mortal), name="others") as others:
        others.execute_all(Mortal.pid)
        pending = [group.execute_all_async(Mortal.large, 32 * MIB) for _ in range(3)]
        pending.append(group.execute_all_async(Mortal.large, 32 * MIB, str(gate)))
        for _ in range(20):
            others.with_timeout(60).execute_all(Mortal.pid)
        gate.touch()  # before that, the last of the large ones is not even made
        replies = [reply for future in pending for reply in future.result()]
        assert [reply.nbytes for reply in replies] == [32 * MIB] * 8
        assert not replies[0].flags.owndata  # still in shared memory


def test_what_cannot_travel_is_named_before_any_rank_runs(group: RayWorkerGroup[Mortal]) -> None:
    lock = threading.Lock()
    with pytest.raises(CallError, match=r"argument 'function' of Mortal.apply cannot be sent .*cannot pickle"):
        group.execute_all(Mortal.apply, lock)  # type: ignore[arg-type]
    future = group.execute_rank_zero_async(Mortal.pid)
    with pytest.raises(CallError, match=r"argument 'two' of Mortal.both cannot be sent .*cannot pickle"):
        group.execute_all(Mortal.both, future.forward(), lock)
    with pytest.raises(CallError, match=r"argument 'one' of Mortal.both .*not be inside one"):
        group.execute_all(Mortal.both, [future], 1)
    with pytest.raises(CallError, match=r"argument 'rank' of Mortal.exit cannot be sent"):
        group.map(Mortal.exit, [0, lock])  # type: ignore[list-item]
    assert len(group.execute_all(Mortal.pid)) == 2  # rank 0 was not told to exit
    offset = 10
    assert group.execute_all(Mortal.apply, lambda rank: rank + offset) == [10, 11]


def test_a_reply_that_cannot_travel_names_rank_and_method(group: RayWorkerGroup[Mortal]) -> None:
    with pytest.raises(
        WorkerError, match=r"rank 0 .*hand over the answer of Mortal.lambda_reply: TypeError: cannot pickle"
    ):
        group.execute_rank_zero(Mortal.lambda_reply)


def test_constructor_arguments_that_cannot_travel_start_nothing(pool: RayResourcePool) -> None:
    class Holder(Worker):
        def __init__(self, thing: Any) -> None:
            self.thing = thing

    with pytest.raises(CallError, match=r"argument 'thing' of Holder.__init__ cannot be sent"):
        RayWorkerGroup(pool, RayClassWithInitArgs(Holder, thing=threading.Lock()))
    assert all(place.tenants == [] for place in pool.places)


def test_groups_share_a_pool_until_it_is_full(pool: RayResourcePool) -> None:
    with ExitStack() as stack:
        for name in ("one", "two"):
            stack.callback(RayWorkerGroup(pool, RayClassWithInitArgs(Mortal), name=name).shutdown)
        with pytest.raises(ResourceError, match=r"no room for group 'three': place 0 .*'one', 'two', and max_colocate"):
            RayWorkerGroup(pool, RayClassWithInitArgs(Mortal), name="three")
    last = RayWorkerGroup(pool, RayClassWithInitArgs(Mortal), name="three")  # there is room again
    last.shutdown()


def test_environment_variables_and_options_reach_the_process(pool: RayResourcePool) -> None:
    packed = RayClassWithInitArgs(Mortal).options(env={"PRACTICUM_TEST": "yes"})
    group = RayWorkerGroup(pool, packed)
    try:
        assert group.execute_all(Mortal.variable, "PRACTICUM_TEST") == ["yes", "yes"]
    finally:
        group.shutdown()
    with pytest.raises(ResourceError, match="asks for 1 nvme per process, place 0 of the pool has 0: add"):
        RayWorkerGroup(pool, RayClassWithInitArgs(Mortal).options(resources={"nvme": 1}))
    with pytest.raises(ResourceError, match="has no GPUs"):
        RayWorkerGroup(pool, RayClassWithInitArgs(Mortal), use_gpu=True)


def test_a_constructor_that_hangs_is_ended_at_the_start_deadline(pool: RayResourcePool) -> None:
    class Slow(Worker):
        def __init__(self) -> None:
            if self.rank == 1:
                time.sleep(60)

    with pytest.raises(DeadlineError, match=r"Slow.__init__ passed its deadline; no answer from rank 1 \(") as caught:
        RayWorkerGroup(pool, RayClassWithInitArgs(Slow), start_timeout_s=5)
    assert "time.sleep(60)" in caught.value.stacks[1]


def test_fused_roles_must_be_packed_and_without_options_of_their_own(pool: RayResourcePool) -> None:
    with pytest.raises(CallError, match="role 'a' of FusedWorker is a type: pack it first"):
        RayWorkerGroup(pool, RayClassWithInitArgs(FusedWorker, a=Mortal))  # type: ignore[arg-type]
    role = RayClassWithInitArgs(Mortal)
    with pytest.raises(CallError, match="role 'a' shares its process with others"):
        RayWorkerGroup(pool, RayClassWithInitArgs(FusedWorker, a=role.options(env={"A": "1"})))
    with pytest.raises(TypeError, match="multiple values for keyword argument 'a'"):
        RayClassWithInitArgs(FusedWorker, a=role, **{"a": role})
