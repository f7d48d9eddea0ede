"""Worker groups whose workers are Ray actors in a resource pool."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from practicum.controller.group import W, WorkerGroup
from practicum.controller.pool import RayResourcePool
from practicum.controller.worker import Call, RayClassWithInitArgs, Seat, WorkerContext, WorkerHost
from practicum.errors import DeadlineError, WorkerDied, WorkerError


class RayWorkerGroup(WorkerGroup[W]):
    """Starts one worker per process of the pool: seats first (address, pid, port), then the workers in their places."""

    def __init__(
        self,
        pool: RayResourcePool,
        packed: RayClassWithInitArgs[W],
        *,
        name: str | None = None,
        use_gpu: bool | None = None,
        start_timeout_s: float = 120.0,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__(name or packed.cls.__name__, packed, pool.world_size, timeout_s)
        use_gpu = pool.use_gpu if use_gpu is None else use_gpu
        deadline = time.monotonic() + start_timeout_s
        self._hosts: list[Any] = []
        self._seats: list[Seat | None] = [None] * pool.world_size
        try:
            self._start_hosts(pool, use_gpu)
            self._seats = self._gather([host.seat.remote() for host in self._hosts], "start of the process", deadline)
            contexts = self._contexts(pool)
            packed_ref = ray.put(packed)
            building = [host.build.remote(packed_ref, c) for host, c in zip(self._hosts, contexts, strict=True)]
            self._gather(building, f"{packed.cls.__name__}.__init__", deadline)
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        for host in self._hosts:
            ray.kill(host)
        self._hosts.clear()  # in place: role views share the list

    def _start_hosts(self, pool: RayResourcePool, use_gpu: bool) -> None:
        actor = ray.remote(WorkerHost)
        for group, bundle, _ in pool.places:
            options = actor.options(
                num_cpus=pool.share,
                num_gpus=pool.share if use_gpu else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            )
            self._hosts.append(options.remote(sys.path))

    def _contexts(self, pool: RayResourcePool) -> list[WorkerContext]:
        first = self._seats[0]
        assert first is not None
        nodes = [node for _, _, node in pool.places]
        return [
            WorkerContext(
                group=self.name,
                rank=rank,
                world_size=self.world_size,
                local_rank=rank - nodes.index(node),
                node_rank=node,
                master_address=first.address,
                master_port=first.free_port,
            )
            for rank, node in enumerate(nodes)
        ]

    def _submit(self, rank: int, call: Call) -> Any:
        if not self._hosts:
            raise WorkerDied(f"group {self.name!r} has been shut down", group=self.name, ranks=[rank])
        bare = Call(call.role, call.method, (), call.kwargs)
        return self._hosts[rank].call.remote(bare, *call.args)

    def _gather(self, refs: Sequence[Any], what: str, deadline: float) -> list[Any]:
        return self._collect(refs, range(len(refs)), what, deadline)

    def _collect(self, handles: Sequence[Any], ranks: Sequence[int], what: str, deadline: float) -> list[Any]:
        rank_of = dict(zip(handles, ranks, strict=True))
        replies: dict[Any, Any] = {}
        pending = list(handles)
        while pending:
            # One at a time: a failure on any rank is raised as soon as it is known, whoever else is still busy.
            ready, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(rank_of[ref] for ref in pending)
                raise DeadlineError(
                    f"group {self.name!r}: {what} passed its deadline; no answer from "
                    f"{', '.join(map(self._whereabouts, late))}",
                    group=self.name,
                    ranks=late,
                )
            for ref in ready:
                replies[ref] = self._reply(ref, rank_of[ref], what)
        return [replies[ref] for ref in handles]

    def _reply(self, ref: Any, rank: int, what: str) -> Any:
        try:
            return ray.get(ref)
        except RayActorError:
            raise WorkerDied(
                f"group {self.name!r}: {self._whereabouts(rank)} died during {what}: its process was killed, "
                "ran out of memory or crashed.",
                group=self.name,
                ranks=[rank],
            ) from None
        except RayTaskError as error:
            if isinstance(error.cause, WorkerError):
                raise error.cause from None
            raise WorkerError(
                f"group {self.name!r}: {self._whereabouts(rank)} could not run {what}: {error}",
                group=self.name,
                ranks=[rank],
            ) from None

    def _whereabouts(self, rank: int) -> str:
        seat = self._seats[rank]
        return f"rank {rank}" + (f" (node {seat.address}, pid {seat.pid})" if seat else "")
