"""A replica as its manager holds it: one engine over one or several workers of a group.

    hybrid       all ranks of the trainer's group: each writes its share, with the trainer's weights
    colocated    a process of its own on the trainer's places
    standalone   a process of its own on places of its own

A replica of its own can be started again; the trainer's processes cannot, without what they have learnt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from practicum.controller import (
    GroupFuture,
    LocalWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    WorkerGroup,
)
from practicum.rollout.worker import Batch, RolloutWorker, Written
from practicum.weights import Place
from practicum.weights import Ticket as WeightTicket

# Beyond what a worker was told to wait: one that takes longer to say how far it is hangs.
_ANSWER_S = 60.0


class RolloutReplica:
    def __init__(
        self,
        number: int,
        make_group: Callable[[], WorkerGroup[RolloutWorker]],
        *,
        is_own: bool,
        timeout_s: float,
    ) -> None:
        """`is_own`: its processes are its own. `timeout_s` is for what takes its time, such as new weights."""
        self.number = number
        self.is_own = is_own
        self.problem = ""
        """Why it does not write; empty while it does, or may."""
        self.num_restarts = 0
        self._group = make_group().with_timeout(timeout_s)

    @classmethod
    def hybrid(cls, group: WorkerGroup[RolloutWorker], *, timeout_s: float) -> RolloutReplica:
        """The rollout role of the trainer's group."""
        return cls(0, lambda: group, is_own=False, timeout_s=timeout_s)

    @classmethod
    def placed(
        cls,
        number: int,
        pool: RayResourcePool | None,
        packed: RayClassWithInitArgs[RolloutWorker],
        *,
        start_timeout_s: float,
        timeout_s: float,
    ) -> RolloutReplica:
        """On the places of a pool, or without one in this process."""
        name = f"rollout-{number}"

        def make_group() -> WorkerGroup[RolloutWorker]:
            if pool is None:
                return LocalWorkerGroup(packed, name=name, timeout_s=timeout_s)
            return RayWorkerGroup(pool, packed, name=name, start_timeout_s=start_timeout_s, timeout_s=timeout_s)

        return cls(number, make_group, is_own=True, timeout_s=timeout_s)

    @property
    def name(self) -> str:
        return self._group.name

    @property
    def num_lanes(self) -> int:
        """Workers that write, each by itself."""
        return self._group.world_size

    def begin(self, lane: int, batch: Batch, wait_s: float) -> GroupFuture[Written]:
        group = self._group.with_timeout(wait_s + _ANSWER_S)
        return group.execute_rank_async(lane, RolloutWorker.begin, batch, wait_s)

    def collect(self, lane: int, wait_s: float) -> GroupFuture[Written]:
        group = self._group.with_timeout(wait_s + _ANSWER_S)
        return group.execute_rank_async(lane, RolloutWorker.collect, wait_s)

    def take_counts(self) -> list[dict[str, int]]:
        """Of each worker: see `RolloutWorker.take_counts`."""
        return self._group.with_timeout(_ANSWER_S).execute_all(RolloutWorker.take_counts)

    def abort(self) -> None:
        """Break off what is left of the round."""
        self._group.with_timeout(2 * _ANSWER_S).execute_all(RolloutWorker.abort)

    def update_weights(self, version: int, ticket: WeightTicket | None = None) -> None:
        self._group.execute_all(RolloutWorker.update_weights, version, ticket)

    def log_probs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        return self._group.execute_rank_zero(RolloutWorker.log_probs, sequences)

    def where(self) -> Place:
        return self._group.execute_rank_zero(RolloutWorker.where)

    def wake_up(self) -> None:
        self._group.execute_all(RolloutWorker.resume)

    def sleep(self) -> None:
        self._group.execute_all(RolloutWorker.release)

    def restart(self) -> None:
        """From its model's files, asleep."""
        self.num_restarts += 1
        self._group.restart()

    def end(self) -> None:
        """Of a replica of its own, the processes."""
        if self.is_own:
            self._group.shutdown()
