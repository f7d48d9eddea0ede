from __future__ import annotations

import os

import pytest

from practicum.controller import FusedWorker, LocalWorkerGroup, RayClassWithInitArgs, Worker
from practicum.errors import WorkerError


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


def test_fused_workers_are_closed_once() -> None:
    diary: list[str] = []
    packed = RayClassWithInitArgs(FusedWorker, clerk=RayClassWithInitArgs(Clerk, diary))
    group = LocalWorkerGroup(packed, name="office")
    group.shutdown()
    group.shutdown()
    assert diary == ["closed"]
