"""Bare Ray in the `controller` benchmark: actors, and as little code around them as does the work."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import ray

from bench.controller_work import ITEMS, ROWS, items, rows


class Echo:
    def noop(self) -> None:
        pass

    def pid(self) -> int:
        return os.getpid()

    def echo(self, shard: Any) -> Any:
        return shard


class BareTeam:
    def __init__(self, num_workers: int) -> None:
        actor: Any = ray.remote(Echo)
        self._actors = [actor.remote() for _ in range(num_workers)]

    def noop(self) -> Any:
        return ray.get([actor.noop.remote() for actor in self._actors])

    def batches(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        yield ITEMS, self._echo_items
        yield ROWS, self._echo_rows

    def pids(self) -> Sequence[int]:
        return list(ray.get([actor.pid.remote() for actor in self._actors]))

    def stop(self) -> None:
        for actor in self._actors:
            ray.kill(actor)

    def _echo_items(self) -> list[Any]:
        batch, size = items(), len(items()) // len(self._actors)
        shards = [batch[i * size : (i + 1) * size] for i in range(len(self._actors))]
        return [item for reply in self._echo(shards) for item in reply]

    def _echo_rows(self) -> Any:
        return np.concatenate(self._echo(np.array_split(rows(), len(self._actors))))

    def _echo(self, shards: Sequence[Any]) -> Any:
        return ray.get([actor.echo.remote(shard) for actor, shard in zip(self._actors, shards, strict=True)])
