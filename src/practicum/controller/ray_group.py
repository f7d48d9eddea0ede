"""Worker groups whose workers are Ray actors in a resource pool."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from practicum.controller import register
from practicum.controller.crew import Crew, CrewPlan
from practicum.controller.future import GroupFuture, Replies
from practicum.controller.group import Call, W, WorkerGroup, positive_seconds
from practicum.controller.host import CallHead
from practicum.controller.mesh import Mesh
from practicum.controller.packed import RayClassWithInitArgs, known_as
from practicum.controller.pool import RayResourcePool
from practicum.controller.wire import INLINE_BYTES, Payload, Slot, num_bytes, pack_arguments
from practicum.errors import CallError, ResourceError, WorkerDied


@dataclass(slots=True)
class Post:
    """What all views of a group share: the crew on duty, None when there is none."""

    plan: CrewPlan
    crew: Crew | None = None
    # Starts and ends come one after another.
    relief: threading.Lock = field(default_factory=threading.Lock)
    # Calls of two threads reach all ranks in one order: else their collectives would wait for each other.
    turn: threading.Lock = field(default_factory=threading.Lock)


class RayReplies(Replies):
    """The replies of Ray actors."""

    def __init__(
        self,
        handles: Sequence[Any],
        deadline: float,
        upstream: Sequence[GroupFuture[Any]],
        crew: Crew,
        ranks: Sequence[int],
        what: str,
        cancel: Callable[[], Awaitable[None]] | None,
    ) -> None:
        super().__init__(handles, deadline, upstream)
        self._crew = crew
        self._ranks = ranks
        self._what = what
        self._cancel = cancel

    def _wait(self, deadline: float) -> list[Any]:
        return self._crew.collect(self.handles, self._ranks, self._what, deadline)

    async def _arrive(self, deadline: float) -> list[Any]:
        try:
            return await self._crew.arrive(self.handles, self._ranks, self._what, deadline)
        except asyncio.CancelledError:
            if self._cancel is not None:
                await self._cancel()
            raise


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
    ) -> None:
        name = name or packed.cls.__name__
        use_gpu = pool.use_gpu if use_gpu is None else use_gpu
        positive_seconds(start_timeout_s, "start_timeout_s", name)
        plan = CrewPlan(name, packed, pool, use_gpu, meshes or {}, detached, start_timeout_s)
        super().__init__(name, packed, pool.world_size, timeout_s, plan.meshes)
        if use_gpu and not pool.use_gpu:
            raise ResourceError(f"group {name!r} asks for GPUs, but its pool has no GPUs: open it with use_gpu=True")
        if detached and not (pool.detached and pool.is_owner):
            raise CallError(
                f"detached group {name!r} needs a whole detached pool, which its attached drivers can release"
            )
        self._post = Post(plan)
        self._start_crew()

    @classmethod
    def attach(cls, name: str, worker_class: type[W], *, timeout_s: float = 600.0) -> RayWorkerGroup[W]:
        """A detached group that another driver started. Its pool is `group.pool`."""
        if not ray.is_initialized():
            raise ResourceError(f"no cluster to look for group {name!r} in: join it first, with ray_cluster(address)")
        crew = register.find(name)
        plan = crew.plan
        found = known_as(plan.packed.cls, worker_class)
        if found is None:
            raise CallError(f"group {name!r} is of {plan.packed.cls}, not {worker_class}")
        group: RayWorkerGroup[W] = cls.__new__(cls)
        WorkerGroup.__init__(group, name, plan.packed, plan.pool.world_size, timeout_s, plan.meshes)
        group._worker_class = found
        group._post = Post(plan, crew)
        return group

    @property
    def pool(self) -> RayResourcePool:
        return self._post.plan.pool

    def stacks(self) -> dict[int, str]:
        return self._crew().stacks()

    def restart(self) -> None:
        """Also brings a group back that lost processes, or nodes as long as others have room."""
        with self._post.relief:
            self._end_crew()
            self._start_crew()

    def shutdown(self) -> None:
        with self._post.relief:
            self._end_crew()

    def _start_crew(self) -> None:
        plan = self._post.plan
        self._post.crew = register.start(plan) if plan.detached else plan.start()

    def _end_crew(self) -> None:
        crew, self._post.crew = self._post.crew, None
        if crew is not None:
            if crew.plan.detached and crew.is_reachable:
                register.end(crew)
            else:
                crew.end()

    def _crew(self) -> Crew:
        crew = self._post.crew
        if crew is None:
            raise WorkerDied(
                f"group {self.name!r} has been shut down, or is just being restarted",
                group=self.name,
                ranks=range(self.world_size),
            )
        if not crew.is_reachable:
            raise WorkerDied(
                f"group {self.name!r} has ended with its Ray", group=self.name, ranks=range(self.world_size)
            )
        return crew

    def _send(self, call: Call, ranks: Sequence[int], answering: Sequence[int], deadline: float) -> Replies:
        crew = self._crew()
        arguments = self._packed(call, crew, len(ranks))
        answers = set(answering)
        handles, turns = [], []
        with self._post.turn:
            for rank in ranks:
                method = _actor_method(call.role, call.method, rank in answers)
                handle, turn = crew.send(rank, method, arguments(rank))
                handles.append(handle)
                turns.append(turn)
        cancel = self._cancelling(crew, ranks, turns, call.what) if call.is_awaited else None
        return RayReplies(handles, deadline, call.upstream, crew, ranks, call.what, cancel)

    async def _stream(self, call: Call, rank: int) -> AsyncGenerator[Any, None]:
        crew = self._crew()
        arguments = self._packed(call, crew, 1)(rank)
        with self._post.turn:
            items, turn = crew.send(rank, _actor_method(call.role, call.method, True), arguments)
        ended = False
        try:
            while True:
                deadline = time.monotonic() + self._timeout_s
                try:
                    item = await asyncio.wait_for(anext(items), self._timeout_s)
                    (reply,) = await crew.arrive([item], [rank], call.what, deadline)
                except StopAsyncIteration:
                    ended = True
                    return
                except TimeoutError:
                    raise await asyncio.to_thread(crew.late, [rank], f"the next item of {call.what}") from None
                yield reply
        finally:
            if not ended:
                await self._cancelling(crew, [rank], [turn], call.what)()

    def _cancelling(
        self, crew: Crew, ranks: Sequence[int], turns: Sequence[Any], what: str
    ) -> Callable[[], Awaitable[None]]:
        """A function that cancels calls of coroutines and returns when they have ended."""

        async def cancel() -> None:
            with contextlib.suppress(WorkerDied):  # whoever is gone runs no coroutines
                with self._post.turn:
                    handles = [crew.send(rank, "cancel", [turn])[0] for rank, turn in zip(ranks, turns, strict=True)]
                await crew.arrive(handles, ranks, f"the end of {what}, cancelled", time.monotonic() + self._timeout_s)

        return cancel

    def _packed(self, call: Call, crew: Crew, num_ranks: int) -> Callable[[int], Sequence[Any]]:
        """The arguments for each rank, packed: shared, own, and replies of other calls for the slots among them."""
        if not hasattr(crew.hosts[0], _actor_method(call.role, call.method, True)):
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
        """The argument of one shard, followed by the replies that come along for it."""
        refs = list(refs)
        payload = pack_arguments(_in_slot(value, refs), call.what, lambda: call.by_name(own=value))
        return [_parcel(payload, self.world_size // self._mesh.data), *refs]


def _in_slot(value: Any, refs: list[Any]) -> Any:
    """A future of a Ray group becomes a slot for its replies, which are added to `refs`; all else stays as it is."""
    if not isinstance(value, GroupFuture):
        return value
    if not all(isinstance(handle, ray.ObjectRef) for handle in value.handles):
        return value.result()
    first = len(refs)
    refs.extend(value.handles)
    return Slot(first, len(refs), value.gather)


def _parcel(payload: Payload, num_receivers: int) -> Any:
    """A large payload for several goes into the object store once; Ray hands each the same copy."""
    return ray.put(payload) if num_receivers > 1 and num_bytes(payload) > INLINE_BYTES else payload


@functools.lru_cache(maxsize=4096)
def _actor_method(role: str | None, method: str, wants_reply: bool) -> str:
    return CallHead(role, method, wants_reply).name
