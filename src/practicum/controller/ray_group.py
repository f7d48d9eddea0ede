"""Worker groups whose workers are Ray actors in a resource pool."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Container, Mapping, Sequence
from typing import Any

import ray

from practicum.controller.group import Call, GroupFuture, Replies, WorkerGroup, positive_seconds
from practicum.controller.host import host_method
from practicum.controller.loop import run_sync
from practicum.controller.pool import RayResourcePool
from practicum.controller.wire import INLINE_BYTES, Payload, Slot, num_bytes, pack_arguments
from practicum.controller.worker import Mesh, RayClassWithInitArgs, W, known_as
from practicum.controller.workers import WorkerSet, WorkerSetPlan
from practicum.errors import CallError, DeadlineError, ResourceError, WorkerDied

log = logging.getLogger("practicum.controller")

_LATE_END_S = 1.0  # for a worker that was late to end its call: its event loop may be blocked


class RayWorkerGroup(WorkerGroup[W]):
    """One worker per place of the pool. A `detached` group outlives its driver; others find it by name (`attach`)."""

    def __init__(
        self,
        pool: RayResourcePool,
        packed: RayClassWithInitArgs[W],
        *,
        name: str | None = None,
        meshes: Mapping[str, Mesh] | None = None,
        use_gpu: bool | None = None,
        detached: bool = False,
        start_timeout_s: float = 120.0,
        timeout_s: float = 600.0,
        starts: bool = True,
    ) -> None:
        """`starts=False` leaves the start to `restart_async`, for callers on an event loop."""
        name = name or packed.cls.__name__
        use_gpu = pool.use_gpu if use_gpu is None else use_gpu
        positive_seconds(start_timeout_s, "start_timeout_s", name)
        plan = WorkerSetPlan(name, packed, pool, use_gpu, meshes or {}, detached, start_timeout_s)
        super().__init__(name, packed, pool.world_size, timeout_s, plan.meshes)
        if use_gpu and not pool.use_gpu:
            raise ResourceError(f"group {name!r} asks for GPUs, but its pool has no GPUs: open it with use_gpu=True")
        if detached and not (pool.detached and pool.is_owner):
            raise CallError(
                f"detached group {name!r} needs a whole detached pool, which its attached drivers can release"
            )
        self._hold(plan, run_sync(plan.start()) if starts else None)

    def _hold(self, plan: WorkerSetPlan, workers: WorkerSet | None) -> None:
        self._plan = plan
        self._workers = workers  # None when there are none
        self._num_ends = 0
        self._origin = self  # of all views, which have the same workers
        self._restarting = threading.Lock()  # restarts come one after another
        # Calls of two threads reach all ranks in one order: else their collectives would wait for each other.
        self._send_lock = threading.Lock()

    @classmethod
    def attach(cls, name: str, worker_class: type[W], *, timeout_s: float = 600.0) -> RayWorkerGroup[W]:
        """Return a detached group that another driver started. Its pool is `group.pool`."""
        if not ray.is_initialized():
            raise ResourceError(f"no cluster to look for group {name!r} in: join it first, with ray_cluster(address)")
        workers = WorkerSet.find(name)
        plan = workers.plan
        found = known_as(plan.packed.cls, worker_class)
        if found is None:
            raise CallError(f"group {name!r} is of {plan.packed.cls}, not {worker_class}")
        group: RayWorkerGroup[W] = cls.__new__(cls)
        WorkerGroup.__init__(group, name, plan.packed, plan.pool.world_size, timeout_s, plan.meshes)
        group._worker_class = found
        group._hold(plan, workers)
        return group

    @property
    def pool(self) -> RayResourcePool:
        return self._plan.pool

    def stacks(self) -> dict[int, str]:
        return self._running().stacks()

    def restart(self) -> None:
        """Start the workers anew, also after processes were lost, or nodes as long as others have room."""
        with self._restarting:
            run_sync(self.restart_async())

    async def restart_async(self) -> None:
        await asyncio.to_thread(self.shutdown)
        num_ends = self._origin._num_ends
        self._origin._workers = await self._plan.start()
        if self._origin._num_ends > num_ends:
            self.shutdown()
            raise WorkerDied(
                f"group {self.name!r} was shut down while it started", group=self.name, ranks=range(self.world_size)
            )

    def shutdown(self) -> None:
        self._origin._num_ends += 1
        workers, self._origin._workers = self._origin._workers, None
        if workers is not None:
            if workers.plan.detached and workers.is_reachable:
                workers.end_detached()
            else:
                workers.end()

    def _running(self) -> WorkerSet:
        workers = self._origin._workers
        if workers is None or not workers.is_reachable:
            why = "been shut down, or is just being restarted" if workers is None else "ended with its Ray"
            raise WorkerDied(f"group {self.name!r} has {why}", group=self.name, ranks=range(self.world_size))
        return workers

    def _send(self, call: Call, ranks: Sequence[int], answering: Container[int], deadline: float) -> Replies:
        workers = self._running()
        arguments = self._packed(call, workers, len(ranks))
        handles, call_ids = [], []
        with self._send_lock:
            for rank in ranks:
                method = host_method(call.role, call.method, rank in answering)
                handle, call_id = workers.send(rank, method, arguments(rank))
                handles.append(handle)
                call_ids.append(call_id)

        async def arrive(until: float) -> list[Any]:
            try:
                return await workers.arrive(handles, ranks, call.what, until)
            except asyncio.CancelledError:
                if call.is_awaited:
                    await self._cancel(workers, ranks, call_ids, call.what, self._timeout_s)
                raise

        collect = functools.partial(workers.collect, handles, ranks, call.what)
        return Replies(handles, deadline, call.upstream, collect, arrive)

    async def _stream(self, call: Call, rank: int) -> AsyncGenerator[Any, None]:
        workers = self._running()
        arguments = self._packed(call, workers, 1)(rank)
        with self._send_lock:
            items, call_id = workers.send(rank, host_method(call.role, call.method, True), arguments)
        has_ended, end_s = False, self._timeout_s
        try:
            while True:
                deadline = time.monotonic() + self._timeout_s
                try:
                    item = await asyncio.wait_for(anext(items), self._timeout_s)
                    (reply,) = await workers.arrive([item], [rank], call.what, deadline)
                except StopAsyncIteration:
                    has_ended = True
                    return
                except TimeoutError:
                    end_s = _LATE_END_S
                    raise await asyncio.to_thread(workers.late, [rank], f"the next item of {call.what}") from None
                yield reply
        finally:
            if not has_ended:
                await self._cancel(workers, [rank], [call_id], call.what, end_s)

    async def _cancel(
        self, workers: WorkerSet, ranks: Sequence[int], call_ids: Sequence[Any], what: str, timeout_s: float
    ) -> None:
        """Cancel calls of coroutines, and return when they have ended. That they do not end is logged, not raised: it
        must not hide the error or the cancellation that led here."""
        try:
            with self._send_lock:
                handles = [
                    workers.send(rank, "cancel", [call_id])[0] for rank, call_id in zip(ranks, call_ids, strict=True)
                ]
            await workers.arrive(handles, ranks, f"the end of {what}, cancelled", time.monotonic() + timeout_s)
        except WorkerDied:
            pass  # a process that is gone runs no coroutines
        except DeadlineError as error:
            log.warning("%s", error.message)

    def _packed(self, call: Call, workers: WorkerSet, num_ranks: int) -> Callable[[int], Sequence[Any]]:
        """Return the packed arguments by rank: shared, own, and replies of other calls for the slots among them."""
        if not hasattr(workers.hosts[0], host_method(call.role, call.method, True)):
            raise CallError(f"group {self.name!r}: its workers, started by another driver, have no {call.what}")
        refs: list[Any] = []
        args = [_in_slot(value, refs) for value in call.args]
        kwargs = {name: _in_slot(value, refs) for name, value in call.kwargs.items()}
        shared: Any = b""
        if args or kwargs:
            shared = _parcel(pack_arguments((args, kwargs), call.what, call.by_name), num_ranks)
        if call.own is not None:
            own = [[shared, *self._own_argument(call, value, refs)] for value in call.own]
            return lambda rank: own[self._mesh.coordinates(rank).data]
        same = [shared, b"", *refs] if refs else [shared] if shared else []
        return lambda rank: same

    def _own_argument(self, call: Call, value: Any, refs: Sequence[Any]) -> list[Any]:
        """Return the packed argument of one shard, followed by the replies for its slots."""
        refs = list(refs)
        payload = pack_arguments(_in_slot(value, refs), call.what, lambda: call.by_name(own=value))
        return [_parcel(payload, self.world_size // self._mesh.data), *refs]


def _in_slot(value: Any, refs: list[Any]) -> Any:
    """Return a slot for the replies of a Ray group's future, which are added to `refs`; all else stays as it is."""
    if not isinstance(value, GroupFuture):
        return value
    if not all(isinstance(handle, ray.ObjectRef) for handle in value.handles):
        return value.result()
    first = len(refs)
    refs.extend(value.handles)
    return Slot(first, len(refs), value.gather)


def _parcel(payload: Payload, num_receivers: int) -> Any:
    """Put a large payload for several receivers into the object store once; they share the copy on their node."""
    return ray.put(payload) if num_receivers > 1 and num_bytes(payload) > INLINE_BYTES else payload
