"""Jobs that do everything wrong: they fail alone, by the right kind, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from practicum.errors import ProcessError
from practicum.processes import JobFailed, ProcessPool, Work
from practicum.processes import pool as pool_module
from practicum.processes.work import Limits, packed
from tests.processes.works import (
    AsyncTricks,
    CannotPrepare,
    ExitsInPrepare,
    NeverReady,
    Tricks,
)

DEADLINE_S = 30.0
ROOT = Path(__file__).parents[3]


@asynccontextmanager
async def pool_of(work: Work, size: int = 1, memory_mb: int = 256, capacity: int = 1) -> AsyncIterator[ProcessPool]:
    pool = ProcessPool(work, size=size, limits=Limits(memory_mb << 20, capacity))
    await pool.start()
    started = server_of(pool)
    try:
        yield pool
    finally:
        everything = [started, *started.children(recursive=True)] if started.is_running() else []
        await pool.close()
        _, alive = psutil.wait_procs(everything, timeout=10)
        assert not alive


def server_of(pool: ProcessPool) -> psutil.Process:
    process = pool._server._process
    assert process is not None
    return psutil.Process(process.pid)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def within_deadline() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await test()

    asyncio.run(within_deadline())


async def outcome(pool: ProcessPool, what: str, argument: Any = None, timeout_s: float = 20.0) -> Any:
    """The value, or kind and reason of the failure."""
    try:
        return (await pool.run((what, argument), timeout_s)).value
    except JobFailed as failure:
        return failure.kind, failure.reason


async def pids_in(path: Path) -> list[int]:
    while not path.exists():  # the test as a whole has a deadline
        await asyncio.sleep(0.01)
    return [int(pid) for pid in path.read_text().split()]


async def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_results_come_back_and_processes_are_reused() -> None:
    async def test() -> None:
        async with pool_of(Tricks(), size=2) as pool:
            assert await asyncio.gather(*(outcome(pool, "square", i) for i in range(50))) == [i * i for i in range(50)]
            assert len({await outcome(pool, "pid") for _ in range(20)}) <= 2

    run(test)


def test_as_many_at_a_time_as_there_are_processes_and_waiting_is_told_from_running() -> None:
    async def test() -> None:
        async with pool_of(Tricks(), size=2) as pool:
            await asyncio.gather(*(pool.run(("nap", 0.05), 10) for _ in range(2)))
            results = await asyncio.gather(*(pool.run(("nap", 0.2), 10) for _ in range(4)))
            shortest_s = min(result.ran_s for result in results)
            assert [result.waited_s > shortest_s / 2 for result in results] == [False, False, True, True]

    run(test)


@pytest.mark.parametrize(
    ("what", "argument", "kind", "reason"),
    [
        ("raise_error", "no such thing", "raised", "raised KeyError: 'no such thing'"),
        ("exit_softly", 3, "raised", "raised SystemExit: 3"),
        ("exit_hard", 7, "crashed", "its process ended with exit code 7"),
        ("exit_hard", 0, "crashed", "its process ended with exit code 0"),
        ("segfault", None, "crashed", "its process crashed with SIGSEGV"),
        ("allocate", None, "raised", "raised MemoryError"),
        ("hang", None, "timeout", "took longer than 1 s"),
        ("cannot_be_sent", None, "raised", "its result cannot be sent"),
        ("close_sockets", 0.0, "crashed", "exit code 1"),
    ],
)
def test_a_job_fails_by_its_own_fault_and_alone(what: str, argument: Any, kind: str, reason: str) -> None:
    async def test() -> None:
        async with pool_of(Tricks(), size=2) as pool:
            jobs = [outcome(pool, "square", i) for i in range(10)]
            jobs.insert(5, outcome(pool, what, argument, timeout_s=1.0))
            results = await asyncio.gather(*jobs)
            failed_kind, failed_reason = results.pop(5)
            assert (failed_kind, reason in failed_reason) == (kind, True), failed_reason
            assert results == [i * i for i in range(10)]
            assert await outcome(pool, "square", 9) == 81

    run(test)


def test_a_job_that_cuts_itself_off_is_ended_before_its_time() -> None:
    async def test() -> None:
        async with pool_of(Tricks()) as pool:
            kind, reason = await outcome(pool, "close_sockets", 60.0, timeout_s=20.0)
            assert (kind, reason) == ("crashed", "closed the connection of the process it ran in")

    run(test)


def test_a_process_killed_from_outside_loses_its_job_only_after_several_times(tmp_path: Path) -> None:
    async def test() -> None:
        async with pool_of(Tricks()) as pool:
            kind, reason = await outcome(pool, "kill_itself", str(tmp_path / "tries"))
            assert kind == "lost" and "ended 4 times" in reason and "killed from outside" in reason
            assert len((tmp_path / "tries").read_text()) == 4
            task = asyncio.create_task(outcome(pool, "nap", 0.5))
            while not (children := server_of(pool).children()):
                await asyncio.sleep(0.01)
            children[0].kill()
            assert await task == 0.5

    run(test)


def test_what_a_job_has_started_ends_with_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with pool_of(Tricks()) as pool:
            path = tmp_path / "pids"
            task = asyncio.create_task(outcome(pool, "start_others", str(path), timeout_s=2.0))
            pids = await pids_in(path)
            assert len(pids) == 3 and all(map(is_alive, pids))
            assert (await task)[0] == "timeout"
            assert await gone(pids)

    run(test)


def test_what_a_finished_job_has_left_behind_ends_with_the_pool(tmp_path: Path) -> None:
    async def test() -> None:
        async with pool_of(Tricks()) as pool:
            path = tmp_path / "pids"
            await pool.run(("start_others_and_return", str(path)), 10)
            pids = await pids_in(path)
        assert await gone(pids)

    run(test)


def test_a_process_that_leaks_is_replaced_before_it_runs_out() -> None:
    async def test() -> None:
        async with pool_of(Tricks(), memory_mb=128) as pool:
            pids = [await outcome(pool, "leak", 20) for _ in range(12)]
            assert all(isinstance(pid, int) for pid in pids)
            assert 3 <= len(set(pids)) <= 6

    run(test)


@pytest.mark.parametrize("what", ["fork_and_return", "fork_and_raise"])
def test_a_job_is_answered_by_the_process_that_was_asked_and_not_by_a_copy(what: str) -> None:
    async def test() -> None:
        async with pool_of(Tricks(), size=2) as pool:
            results = await asyncio.gather(*(outcome(pool, what, float(n)) for n in range(100)))
            assert results == [float(n) for n in range(100)]

    run(test)


def test_a_copy_of_a_process_with_coroutines_answers_nothing_either() -> None:
    async def test() -> None:
        async with pool_of(AsyncTricks(), capacity=16) as pool:
            jobs = [("fork_and_return", float(n)) if n % 3 else ("nap", 0.01 * n) for n in range(60)]
            results = await asyncio.gather(*(outcome(pool, *job) for job in jobs))
            assert results == [argument for _, argument in jobs]

    run(test)


def test_a_copy_that_stays_ends_with_its_process_which_is_replaced(tmp_path: Path) -> None:
    async def test() -> None:
        async with pool_of(Tricks()) as pool:
            pid = await outcome(pool, "fork_and_stay", str(tmp_path / "pid"))
            assert await outcome(pool, "pid") != pid
            # It may have been killed before it could say so.
            assert not (tmp_path / "pid").exists() or await gone(await pids_in(tmp_path / "pid"))

    run(test)


@pytest.fixture
def few_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("what", "argument", "num_jobs"),
    [("leak_threads", 6, 30), ("leak_threads", 1, 100), ("leak_files", 60, 30), ("lower_limits", None, 5)],
)
def test_a_process_is_worn_by_what_jobs_leave_and_replaced_before_it_costs_one(
    what: str, argument: Any, num_jobs: int, few_files: None
) -> None:
    async def test() -> None:
        async with pool_of(Tricks(), memory_mb=128) as pool:
            pids = [await outcome(pool, what, argument) for _ in range(num_jobs)]
            assert all(isinstance(pid, int) for pid in pids), pids
            assert 1 < len(set(pids)) <= num_jobs

    run(test)


def test_coroutines_wear_a_process_too() -> None:
    async def test() -> None:
        async with pool_of(AsyncTricks(), memory_mb=128, capacity=4) as pool:
            pids = await asyncio.gather(*(outcome(pool, "leak_threads", 3) for _ in range(40)))
            assert all(isinstance(pid, int) for pid in pids), pids
            assert len(set(pids)) > 1

    run(test)


def test_an_alarm_that_a_job_leaves_does_not_ring_in_the_next() -> None:
    async def test() -> None:
        async with pool_of(Tricks()) as pool:
            await outcome(pool, "set_alarm", 0.1)
            assert await outcome(pool, "nap", 0.3) == 0.3

    run(test)


@pytest.mark.parametrize("data", [b"x" * 64, b"\0" * 8, b"\0" * 7 + b"\4none", packed((1 << 60, True, 5.0, False))])
def test_what_a_job_writes_to_its_connection_is_no_result(data: bytes) -> None:
    async def test() -> None:
        async with pool_of(Tricks()) as pool:
            kind, _ = await outcome(pool, "write_everywhere", data, timeout_s=2.0)
            assert kind in ("crashed", "timeout", "lost")
            assert await outcome(pool, "square", 3) == 9

    run(test)


def test_what_jobs_print_is_kept_up_to_a_limit_and_the_rest_is_counted(capfd: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        async with pool_of(Tricks(), size=2) as pool:
            assert await asyncio.gather(*(outcome(pool, "print_much", 4) for _ in range(4))) == [4] * 4

    run(test)
    printed = capfd.readouterr().err
    assert "    | first words\n" in printed
    assert len(printed) < 80 << 10
    told = re.search(r"\.\.\. and ([\d,]+) bytes more", printed)
    assert told is not None and int(told[1].replace(",", "")) > 15 << 20


def test_results_and_jobs_larger_than_a_socket_buffer() -> None:
    async def test() -> None:
        for work, capacity in ((Tricks(), 1), (AsyncTricks(), 8)):
            async with pool_of(work, memory_mb=512, capacity=capacity) as pool:
                results = await asyncio.gather(*(outcome(pool, "large", n) for n in (1, 8, 3)))
                assert [len(result) for result in results] == [1 << 20, 8 << 20, 3 << 20]
                if capacity == 1:
                    assert await outcome(pool, "length", b"x" * (9 << 20)) == 9 << 20

    run(test)


def test_a_job_nobody_waits_for_is_stopped(tmp_path: Path) -> None:
    async def test() -> None:
        async with pool_of(Tricks()) as pool:
            path = tmp_path / "pid"
            task = asyncio.create_task(pool.run(("say_and_hang", str(path)), 60))
            queued = asyncio.create_task(pool.run(("say_and_hang", str(tmp_path / "never")), 60))
            pids = await pids_in(path)
            queued.cancel()
            task.cancel()
            assert await gone(pids)
            assert await outcome(pool, "square", 4) == 16  # the place is free again
            assert not (tmp_path / "never").exists()

    run(test)


def test_the_fork_server_killed_in_the_middle(tmp_path: Path) -> None:
    async def test() -> None:
        async with pool_of(Tricks(), size=2) as pool:
            jobs = [asyncio.create_task(outcome(pool, "nap", 0.1)) for _ in range(12)]
            hanging = asyncio.create_task(pool.run(("say_and_hang", str(tmp_path / "pid")), 60))
            await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            old = server_of(pool)
            processes = old.children()
            old.kill()
            assert await asyncio.gather(*jobs) == [0.1] * 12
            assert server_of(pool).pid != old.pid
            assert await gone([process.pid for process in processes])
            hanging.cancel()

    run(test)


def test_a_fork_server_that_dies_again_and_again_is_given_up_and_says_so() -> None:
    async def test() -> None:
        async with pool_of(Tricks()) as pool:
            job = asyncio.create_task(outcome(pool, "hang", timeout_s=60.0))
            while not job.done():
                if pool._server.is_up:
                    os.kill(server_of(pool).pid, signal.SIGKILL)
                await asyncio.sleep(0.01)
            kind, reason = await job
            assert kind == "lost" and "the process that starts" in reason and "from outside" not in reason
            while pool._broken is None:
                if pool._server.is_up:
                    os.kill(server_of(pool).pid, signal.SIGKILL)
                await asyncio.sleep(0.01)
            # Later jobs do not wait for ever.
            assert await outcome(pool, "square", 3) == (
                "lost",
                "the process that starts the others died again and again",
            )

    run(test)


def test_work_that_cannot_be_made_ready_says_why() -> None:
    async def test() -> None:
        for work, why in (
            (CannotPrepare(), "FileNotFoundError: no such schema"),
            (ExitsInPrepare(), "exit code 5"),
            (NeverReady(), "not ready within 0.5 s"),
        ):
            timeout_s = 0.5 if isinstance(work, NeverReady) else 20.0
            pool = ProcessPool(work, size=1, limits=Limits(256 << 20), start_timeout_s=timeout_s)
            before = set(psutil.Process().children())
            with pytest.raises(ProcessError, match=why):
                await pool.start()
            assert set(psutil.Process().children()) <= before
            await pool.close()

    run(test)


def test_closing_fails_what_is_left_and_is_safe_to_repeat() -> None:
    async def test() -> None:
        async with pool_of(Tricks()) as pool:
            jobs = [asyncio.create_task(outcome(pool, "hang")) for _ in range(3)]
            await asyncio.sleep(0)
            await pool.close()
            await pool.close()
            assert [kind for kind, _ in await asyncio.gather(*jobs)] == ["lost"] * 3
            assert (await outcome(pool, "square", 1))[0] == "lost"

    run(test)


# Coroutines, many in one process


def test_coroutines_share_a_process_and_run_side_by_side() -> None:
    async def test() -> None:
        async with pool_of(AsyncTricks(), capacity=256) as pool:
            assert await asyncio.gather(*(outcome(pool, "meet", 200) for _ in range(200))) == [200] * 200
            assert len({await outcome(pool, "pid") for _ in range(5)}) == 1

    run(test)


@pytest.mark.parametrize(
    ("what", "kind", "reason"),
    [
        ("raise_error", "raised", "KeyError"),
        ("exit_softly", "raised", "SystemExit"),
        ("exit_hard", "crashed", "exit code 7"),
        ("block", "timeout", "without giving way to others"),
        ("swallow", "timeout", "took longer than 0.3 s"),
        ("swallow_then_block", "timeout", "took longer than 0.3 s"),
        ("allocate", "raised", "MemoryError"),
        ("cannot_be_sent", "raised", "its result cannot be sent"),
    ],
)
def test_a_coroutine_fails_alone_and_its_neighbours_are_run_again(what: str, kind: str, reason: str) -> None:
    async def test() -> None:
        async with pool_of(AsyncTricks(), capacity=64) as pool:
            bad = asyncio.create_task(outcome(pool, what, 7, timeout_s=0.3 if kind == "timeout" else 10.0))
            good = [asyncio.create_task(outcome(pool, "nap", 0.6, timeout_s=6.0)) for _ in range(20)]
            failed_kind, failed_reason = await bad
            assert (failed_kind, reason in failed_reason) == (kind, True), failed_reason
            assert await asyncio.gather(*good) == [0.6] * 20
            assert await asyncio.gather(*(outcome(pool, "nap", 0.1) for _ in range(5))) == [0.1] * 5

    run(test)


@pytest.mark.parametrize("what", ["exit_hard", "kill_itself", "block"])
def test_many_bad_coroutines_do_not_drag_the_good_ones_down(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_CANCEL_GRACE_S", 0.4)

    async def test() -> None:
        async with pool_of(AsyncTricks(), capacity=64) as pool:
            argument = str(tmp_path / "tries") if what == "kill_itself" else 7
            bad = [asyncio.create_task(outcome(pool, what, argument, timeout_s=0.4)) for _ in range(5)]
            good = [asyncio.create_task(outcome(pool, "nap", 0.3, timeout_s=5.0)) for _ in range(20)]
            kinds = {kind for kind, _ in await asyncio.gather(*bad)}
            assert kinds == {{"exit_hard": "crashed", "kill_itself": "lost", "block": "timeout"}[what]}
            assert await asyncio.gather(*good) == [0.3] * 20

    run(test)


def test_a_cancelled_coroutine_frees_its_place() -> None:
    async def test() -> None:
        async with pool_of(AsyncTricks(), capacity=1 << 10) as pool:
            tasks = [asyncio.create_task(pool.run(("nap", 60), 90)) for _ in range(10)]
            await outcome(pool, "pid")
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            while any(process.jobs for process in pool._processes):
                await asyncio.sleep(0.01)

    run(test)


# At scale, and when the owner is gone

OWNER = """
import asyncio, os, sys
sys.path[:0] = {paths!r}
from practicum.processes import ProcessPool
from practicum.processes.work import Limits, packed
from tests.processes.works import Tricks

async def main():
    pool = ProcessPool(Tricks(), size=2, limits=Limits(256 << 20))
    await pool.start()
    jobs = [pool.run(("start_others", {path!r}), 600), pool.run(("say_and_hang", {path!r} + "2"), 600)]
    await asyncio.gather(*jobs)

asyncio.run(main())
"""


def test_nothing_is_left_when_the_owner_of_a_pool_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "pids"
    code = OWNER.format(paths=[str(ROOT), str(ROOT / "src")], path=str(path))
    owner = subprocess.Popen([sys.executable, "-c", code])

    async def test() -> None:
        pids = [*await pids_in(path), *await pids_in(Path(f"{path}2"))]
        family = [process.pid for process in psutil.Process(owner.pid).children(recursive=True)]
        owner.kill()
        owner.wait(10)
        assert await gone([*pids, *family])

    try:
        run(test)
    finally:
        owner.kill()
        owner.wait(10)


def test_two_thousand_jobs_of_which_one_in_a_hundred_each_does_something_terrible() -> None:
    bad = {
        0: ("hang", None, "timeout"),
        1: ("raise_error", "x", "raised"),
        2: ("exit_hard", 1, "crashed"),
        3: ("segfault", None, "crashed"),
        4: ("allocate", None, "raised"),
    }

    async def test() -> None:
        async with pool_of(Tricks(), size=8, memory_mb=128) as pool:
            jobs = []
            for i in range(2000):
                what, argument, _ = bad.get(i % 100, ("square", i, None))
                jobs.append(outcome(pool, what, argument, timeout_s=1.5))
            results = await asyncio.gather(*jobs)
            for i, result in enumerate(results):
                expected = bad[i % 100][2] if i % 100 in bad else None
                assert (result[0] if expected else result) == (expected or i * i), (i, result)
            kinds = Counter(result[0] for result in results if isinstance(result, tuple))
            assert kinds == {"timeout": 20, "raised": 40, "crashed": 40}

    run(test)
