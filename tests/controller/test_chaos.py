"""Two hundred calls while workers are killed, stopped, hung and made to raise at random."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from practicum.controller import GroupFuture, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker
from practicum.errors import DeadlineError, WorkerDied, WorkerError

NUM_RANKS = 3
DEADLINE_S = 2.0
# A dead or stopped rank needs a restart, which takes most of the time; the well-behaved calls go fast.
FATES = {"well": 124, "raise": 52, "kill": 12, "hang": 8, "stop": 4}


class Victim(Worker):
    def work(self, fates: dict[int, str]) -> int:
        fate = fates.get(self.rank, "well")
        if fate == "raise":
            raise RuntimeError("told to")
        if fate == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fate == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fate == "hang":
            time.sleep(300)
        return self.rank

    def work_on(self, share: list[int], fates: dict[int, str]) -> list[int]:
        self.work(fates)
        return share

    def pid(self) -> int:
        return os.getpid()


@pytest.fixture
def group(ray_session: None) -> Iterator[RayWorkerGroup[Victim]]:
    with RayResourcePool([NUM_RANKS], resources_per_process={"CPU": 0.5}) as pool:
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Victim), name="victims", timeout_s=DEADLINE_S)
        yield group
        group.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_call_outlives_its_deadline_and_each_failure_names_the_right_rank(group: RayWorkerGroup[Victim]) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"{seed=}")  # shown if the test fails
    dice = random.Random(seed)
    seen = {psutil.Process(pid) for pid in group.execute_all(Victim.pid)}
    fates = [fate for fate, count in FATES.items() for _ in range(count)]
    dice.shuffle(fates)
    for fate in fates:
        rank = dice.randrange(NUM_RANKS)
        start = time.monotonic()
        try:
            reply = start_a_call(group, dice, {rank: fate}).result()
            assert fate == "well" and reply in ([0, 1, 2], list(range(7)), 0)
        except WorkerError as error:
            expected = {
                "well": None,
                "raise": WorkerError,
                "kill": WorkerDied,
                "hang": DeadlineError,
                "stop": DeadlineError,
            }[fate]
            assert type(error) is expected, error
            assert error.ranks == (rank,)
            assert f"rank {rank} " in str(error)
            if isinstance(error, DeadlineError):
                assert sorted(error.stacks) == [0, 1, 2]
        limit_s = {"raise": 1.0, "kill": 2.0}.get(fate, DEADLINE_S + 1.5)
        assert time.monotonic() - start < limit_s
        if fate in ("kill", "hang", "stop"):
            group.restart()
            seen |= {psutil.Process(pid) for pid in group.with_timeout(20).execute_all(Victim.pid)}
    group.shutdown()
    assert not psutil.wait_procs(seen, timeout=20)[1], "processes are left behind"


def start_a_call(group: RayWorkerGroup[Victim], dice: random.Random, fates: dict[int, str]) -> GroupFuture[object]:
    """One of the ways to call all ranks, with the same outcome; now and then others call at the same time."""
    if dice.random() < 0.2 and set(fates.values()) == {"well"}:
        for _ in range(3):
            threading.Thread(target=lambda: _quietly(group), daemon=True).start()
    kind = dice.randrange(3)
    if kind == 0:
        return group.execute_all_async(Victim.work, fates)  # type: ignore[return-value]
    if kind == 1:
        return group.map_async(Victim.work, [fates] * NUM_RANKS)  # type: ignore[return-value]
    return group.scatter_async(Victim.work_on, list(range(7)), fates)  # type: ignore[return-value]


def _quietly(group: RayWorkerGroup[Victim]) -> None:
    with contextlib.suppress(WorkerError):
        group.execute_rank_zero(Victim.pid)
