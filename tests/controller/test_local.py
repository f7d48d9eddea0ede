from __future__ import annotations

import os
import threading

import pytest

from practicum.controller import FusedWorker, LocalWorkerGroup, RayClassWithInitArgs, Worker
from practicum.errors import WorkerDied, WorkerError


class Clerk(Worker):
    def __init__(self, diary: list[str]) -> None:
        self.diary = diary

    def pid(self) -> int:
        return os.getpid()

    def fail(self) -> None:
        raise KeyError("in here")

    def close(self) -> None:
        self.diary.append("closed")


def test_it_runs_here_and_a_debugger_sees_the_original_exception() -> None:
    group = LocalWorkerGroup(RayClassWithInitArgs(Clerk, []), name="office")
    assert group.execute_all(Clerk.pid) == [os.getpid()]
    with pytest.raises(WorkerError) as caught:
        group.execute_all(Clerk.fail)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__cause__.__traceback__ is not None


class LateClerk(Clerk):
    begun = threading.Event()
    may_go_on = threading.Event()

    def __init__(self) -> None:
        super().__init__([])
        self.begun.set()
        assert self.may_go_on.wait(10)


def test_calls_that_come_while_it_is_started_again_find_nobody() -> None:
    LateClerk.may_go_on.set()
    group = LocalWorkerGroup(RayClassWithInitArgs(LateClerk), name="office")
    LateClerk.begun.clear()
    LateClerk.may_go_on.clear()
    starting = threading.Thread(target=group.restart)
    starting.start()
    assert LateClerk.begun.wait(10)
    with pytest.raises(WorkerDied, match="has been shut down"):
        group.execute_all(LateClerk.pid)
    LateClerk.may_go_on.set()
    starting.join(10)
    assert group.execute_all(LateClerk.pid) == [os.getpid()]


def test_fused_workers_are_closed_once() -> None:
    diary: list[str] = []
    packed = RayClassWithInitArgs(FusedWorker, clerk=RayClassWithInitArgs(Clerk, diary))
    group = LocalWorkerGroup(packed, name="office")
    group.shutdown()
    group.shutdown()
    assert diary == ["closed"]
