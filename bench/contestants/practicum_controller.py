"""Ours in the `controller` benchmark, and bare Ray actors with as little code around them as does the work."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray

from bench.controller_work import BARE, ITEMS, ROWS, Batches, Team, items, rows, take_steps
from bench.sides import OURS
from practicum.controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, WorkerGroup
from practicum.controller.workers import WorkerSet, WorkerSetPlan


class BareEcho:
    """A worker as Ray has it."""

    def noop(self) -> None:
        pass

    def pid(self) -> int:
        return os.getpid()

    def echo(self, shard: Any) -> Any:
        return shard


class Echo(BareEcho, Worker):
    pass


def our_team(num_workers: int) -> Team:
    pool = RayResourcePool([num_workers])
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Echo), name="echo")

    def batches() -> Batches:
        yield ITEMS, "", lambda: group.scatter(Echo.echo, items())
        yield ROWS, "", lambda: group.scatter(Echo.echo, rows())

    def stop() -> None:
        group.shutdown()
        pool.release()

    return Team(lambda: group.execute_all(Echo.noop), batches, lambda: group.execute_all(Echo.pid), stop)


def bare_team(num_workers: int) -> Team:
    actor: Any = ray.remote(BareEcho)
    actors = [actor.remote() for _ in range(num_workers)]
    size = len(items()) // num_workers

    def echo(shards: Sequence[Any]) -> Any:
        return ray.get([actor.echo.remote(shard) for actor, shard in zip(actors, shards, strict=True)])

    def echo_items() -> list[Any]:
        shards = [items()[i * size : (i + 1) * size] for i in range(num_workers)]
        return [item for reply in echo(shards) for item in reply]

    def batches() -> Batches:
        yield ITEMS, "", echo_items
        yield ROWS, "", lambda: np.concatenate(echo(np.array_split(rows(), num_workers)))

    def stop() -> None:
        for actor in actors:
            ray.kill(actor)

    def ask(method: str) -> Any:
        return ray.get([getattr(actor, method).remote() for actor in actors])

    return Team(partial(ask, "noop"), batches, partial(ask, "pid"), stop)


class FakeHost:
    """Stands for a worker's actor in the driver: whatever is called, the answer is there already."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def __getattr__(self, method: str) -> FakeHost:
        return self

    def remote(self, *args: Any) -> Any:
        return self._answer


def noop_on_fakes(num_workers: int) -> Callable[[], Any]:
    """Return the same call on fakes: all the driver does for each worker, but for handing the call over to Ray."""
    packed = RayClassWithInitArgs(Echo)
    with RayResourcePool([1]) as pool:
        answering = RayWorkerGroup(pool, packed, name="answers")
        answers = [answering.execute_rank_zero_async(Echo.noop).handles[0] for _ in range(num_workers)]
        ray.get(answers)
        answering.shutdown()
    room: Any = SimpleNamespace(world_size=num_workers, use_gpu=False)
    plan = WorkerSetPlan("fakes", packed, room, use_gpu=False, meshes={}, detached=False, start_timeout_s=60.0)
    # A group as it is once its workers are up, around some that were never started.
    group: RayWorkerGroup[Echo] = RayWorkerGroup.__new__(RayWorkerGroup)
    WorkerGroup.__init__(group, "fakes", packed, num_workers, 60.0, {})
    group._hold(plan, WorkerSet(plan, [FakeHost(answer) for answer in answers], []))
    return lambda: group.execute_all(Echo.noop)


if __name__ == "__main__":
    sides = {OURS: our_team, BARE: bare_team}
    take_steps(["practicum", "ray", "numpy"], sides, noop_on_fakes, **json.loads(sys.argv[1]))
