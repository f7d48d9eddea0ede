"""A replica as its manager knows it: one engine over one or several workers of a group.

    hybrid       all ranks of the trainer's group: each writes its share, with the trainer's weights
    colocated    a process of its own on the trainer's devices
    standalone   a process of its own on devices of its own

A replica of its own can be started again; the trainer's processes cannot, without what they have learnt.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import numpy as np
from numpy.typing import NDArray

from practicum.controller import Controller, RayClassWithInitArgs, RayResourcePool, WorkerGroup
from practicum.rollout.worker import RolloutWorker
from practicum.types import PromptGroup
from practicum.weights import Place, Ticket

_PING_S = 60.0  # a worker that does not answer for so long hangs
_UNBOUNDED_S = 1e8  # between two lists: the manager knows how long all that a worker has may take


class RolloutReplica:
    """One engine. `problem` says why it does not write; it is empty while it may."""

    def __init__(self, number: int, group: WorkerGroup[RolloutWorker], *, is_own: bool) -> None:
        """`is_own`: its processes are its own."""
        self.number = number
        self.is_own = is_own
        self.problem = ""
        self.num_restarts = 0
        self._group = group

    @classmethod
    def hybrid(cls, group: WorkerGroup[RolloutWorker]) -> RolloutReplica:
        """Take the rollout role of the trainer's group for a replica."""
        return cls(0, group, is_own=False)

    @classmethod
    async def start(
        cls,
        number: int,
        controller: Controller,
        packed: RayClassWithInitArgs[RolloutWorker],
        pool: RayResourcePool | None = None,
    ) -> RolloutReplica:
        """Start a replica on the places of a pool; without one on those of the controller, or in this process."""
        group = await controller.group(packed, name=f"rollout-{number}", pool=pool)
        return cls(number, group, is_own=True)

    @property
    def name(self) -> str:
        return self._group.name

    @property
    def num_workers(self) -> int:
        """The number of ranks, each of which writes by itself."""
        return self._group.world_size

    def generate(self, rank: int, groups: list[PromptGroup]) -> AsyncGenerator[list[PromptGroup], None]:
        """See `RolloutWorker.generate`. Closing the iterator aborts what is left."""
        return self._group.with_timeout(_UNBOUNDED_S).stream(rank, RolloutWorker.generate, groups)

    async def ping(self, rank: int) -> None:
        """Raise `WorkerError` where a worker is gone or hangs."""
        await self._group.with_timeout(_PING_S).execute_rank_async(rank, RolloutWorker.ping)

    async def update_weights(self, version: int, ticket: Ticket | None = None) -> None:
        await self._group.execute_all_async(RolloutWorker.update_weights, version, ticket)

    async def log_probs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        return await self._group.execute_rank_zero_async(RolloutWorker.log_probs, sequences)

    async def where(self) -> Place:
        return await self._group.execute_rank_zero_async(RolloutWorker.where)

    async def wake_up(self) -> None:
        await self._group.execute_all_async(RolloutWorker.resume)

    async def sleep(self) -> None:
        await self._group.execute_all_async(RolloutWorker.release)

    async def restart(self) -> None:
        """Start it again from its model's files; it is asleep then."""
        self.num_restarts += 1
        await self._group.restart_async()

    async def end(self) -> None:
        """End the processes of a replica of its own."""
        if self.is_own:
            await asyncio.to_thread(self._group.shutdown)
