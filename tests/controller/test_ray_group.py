"""What only Ray's groups can run into: late and dead processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from practicum.controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker
from practicum.errors import DeadlineError, WorkerDied


class Mortal(Worker):
    def exit(self) -> None:
        os._exit(7)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def pid(self) -> int:
        return os.getpid()


@pytest.fixture
def group(ray_session: None) -> Iterator[RayWorkerGroup[Mortal]]:
    with RayResourcePool([2]) as pool:
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Mortal), name="mortals")
        yield group
        group.shutdown()


def test_a_call_past_its_deadline_names_the_late_ranks(group: RayWorkerGroup[Mortal]) -> None:
    start = time.monotonic()
    with pytest.raises(DeadlineError, match=r"'mortals': Mortal.sleep passed its deadline.*rank 0 .*rank 1") as caught:
        group.with_timeout(0.3).execute_all(Mortal.sleep, 30.0)
    assert time.monotonic() - start < 3
    assert caught.value.ranks == (0, 1)


def test_a_dead_worker_is_noticed_and_a_closed_group_says_so(group: RayWorkerGroup[Mortal]) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerDied, match=r"'mortals': rank 0 \(node .*\) died during Mortal.exit"):
        group.execute_rank_zero(Mortal.exit)
    assert time.monotonic() - start < 5
    group.shutdown()
    with pytest.raises(WorkerDied, match="shut down"):
        group.execute_all(Mortal.pid)


def test_each_rank_is_a_process_of_its_own(group: RayWorkerGroup[Mortal]) -> None:
    assert len({os.getpid(), *group.execute_all(Mortal.pid)}) == 3
