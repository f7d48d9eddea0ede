"""Ours in the `controller` benchmark, and bare Ray actors with as little code around them as does the work."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import ray

from bench.contestant import Line
from bench.controller_work import BARE, ITEMS, ROWS, Job, items, rows, start_ray, take_steps
from bench.sides import OURS
from practicum.controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, WorkerGroup
from practicum.controller.workers import WorkerSet, WorkerSetPlan

Item = tuple[int, ...]


class Echo(Worker):
    def noop(self) -> None:
        pass

    def pid(self) -> int:
        return os.getpid()

    def echo_items(self, shard: Sequence[Item]) -> Sequence[Item]:
        return shard

    def echo_rows(self, shard: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return shard


class OurTeam:
    def __init__(self, num_workers: int) -> None:
        self._pool = RayResourcePool([num_workers])
        self._group = RayWorkerGroup(self._pool, RayClassWithInitArgs(Echo), name="echo")

    def noop(self) -> Any:
        return self._group.execute_all(Echo.noop)

    def batches(self) -> Iterator[tuple[str, str, Callable[[], Any]]]:
        yield ITEMS, "", lambda: self._group.scatter(Echo.echo_items, items())
        yield ROWS, "", lambda: self._group.scatter(Echo.echo_rows, rows())

    def pids(self) -> Sequence[int]:
        return self._group.execute_all(Echo.pid)

    def stop(self) -> None:
        self._group.shutdown()
        self._pool.release()


class BareEcho:
    def noop(self) -> None:
        pass

    def pid(self) -> int:
        return os.getpid()

    def echo(self, shard: Any) -> Any:
        return shard


class BareTeam:
    def __init__(self, num_workers: int) -> None:
        actor: Any = ray.remote(BareEcho)
        self._actors = [actor.remote() for _ in range(num_workers)]

    def noop(self) -> Any:
        return ray.get([actor.noop.remote() for actor in self._actors])

    def batches(self) -> Iterator[tuple[str, str, Callable[[], Any]]]:
        num, size = len(self._actors), len(items()) // len(self._actors)
        slices = [slice(i * size, (i + 1) * size) for i in range(num)]
        yield ITEMS, "", lambda: [item for reply in self._echo([items()[it] for it in slices]) for item in reply]
        yield ROWS, "", lambda: np.concatenate(self._echo(np.array_split(rows(), num)))

    def pids(self) -> Sequence[int]:
        return list(ray.get([actor.pid.remote() for actor in self._actors]))

    def stop(self) -> None:
        for actor in self._actors:
            ray.kill(actor)

    def _echo(self, shards: Sequence[Any]) -> Any:
        return ray.get([actor.echo.remote(shard) for actor, shard in zip(self._actors, shards, strict=True)])


class FakeHost:
    """Stands for a worker's actor in the driver: whatever is called, the answer is there already."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def __getattr__(self, method: str) -> FakeHost:
        return self

    def remote(self, *args: Any) -> Any:
        return self._answer


class FakeGroup(RayWorkerGroup[Echo]):
    """A group as it is once its workers are up, around workers that were never started."""

    def __init__(self, plan: WorkerSetPlan, workers: WorkerSet) -> None:
        WorkerGroup.__init__(self, plan.name, plan.packed, plan.pool.world_size, 60.0, plan.meshes)
        self._hold(plan, workers)


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
    group = FakeGroup(plan, WorkerSet(plan, [FakeHost(answer) for answer in answers], []))
    return lambda: group.execute_all(Echo.noop)


if __name__ == "__main__":
    line = Line()
    start_ray()
    job, packages = Job(**json.loads(sys.argv[1])), ["practicum", "ray", "numpy"]
    take_steps(line, job, packages, {OURS: OurTeam, BARE: BareTeam}, pretend=noop_on_fakes)
