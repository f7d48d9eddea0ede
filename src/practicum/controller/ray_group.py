"""Worker groups whose workers are Ray actors in a resource pool."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from practicum.controller import register
from practicum.controller.crew import Crew
from practicum.controller.future import GroupFuture
from practicum.controller.group import Call, W, WorkerGroup, positive_seconds
from practicum.controller.host import CallHead
from practicum.controller.mesh import Mesh
from practicum.controller.packed import RayClassWithInitArgs, known_as
from practicum.controller.pool import RayResourcePool
from practicum.controller.wire import INLINE_BYTES, Payload, Slot, num_bytes, pack_arguments
from practicum.errors import CallError, ResourceError, WorkerDied


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
        use_gpu = pool.use_gpu if use_gpu is None else use_gpu
        positive_seconds(start_timeout_s, "start_timeout_s", name or packed.cls.__name__)
        crew = Crew(name or packed.cls.__name__, packed, pool, use_gpu, meshes or {}, detached, start_timeout_s)
        self._take_over(crew, timeout_s)
        if use_gpu and not pool.use_gpu:
            raise ResourceError(
                f"group {self.name!r} asks for GPUs, but its pool has no GPUs: open it with use_gpu=True"
            )
        if detached and not pool.detached:
            raise CallError(f"detached group {self.name!r} needs a detached pool, or its place ends with the driver")
        if detached and register.is_taken(self.name):
            raise ResourceError(f"a detached group {self.name!r} runs already: attach to it, or shut it down first")
        self._start_crew()

    @classmethod
    def attach(cls, name: str, worker_class: type[W], *, timeout_s: float = 600.0) -> RayWorkerGroup[W]:
        """A detached group that another driver started. Its pool is `group.pool`."""
        if not ray.is_initialized():
            raise ResourceError(f"no cluster to look for group {name!r} in: join it first, with ray_cluster(address)")
        crew = register.find(name)
        found = known_as(crew.packed.cls, worker_class)
        if found is None:
            raise CallError(f"group {name!r} is of class {crew.packed.cls.__name__}, not {worker_class.__name__}")
        group: RayWorkerGroup[W] = cls.__new__(cls)
        group._take_over(crew, timeout_s)
        group._worker_class = found
        return group

    @property
    def pool(self) -> RayResourcePool:
        return self._crew.pool

    def stacks(self) -> dict[int, str]:
        """What each rank is doing now: its Python stack, also while it is busy with a call."""
        return self._crew.stacks()

    def restart(self) -> None:
        """Also brings a group back that lost processes, or nodes as long as others have room."""
        self.shutdown()
        self._start_crew()

    def shutdown(self) -> None:
        self._crew.end()
        if self._crew.detached:
            register.strike_out(self._crew)

    def _take_over(self, crew: Crew, timeout_s: float) -> None:
        super().__init__(crew.name, crew.packed, crew.pool.world_size, timeout_s, crew.meshes)
        self._crew = crew
        # Two threads' calls reach all ranks in the same order: otherwise their collectives would wait for each other.
        self._turn = threading.Lock()

    def _start_crew(self) -> None:
        self._crew.start()
        if self._crew.detached:
            register.enter(self._crew)

    def _send(self, call: Call, ranks: Sequence[int], answering: Sequence[int]) -> list[Any]:
        hosts = self._crew.hosts
        if not hosts:
            raise WorkerDied(f"group {self.name!r} has been shut down", group=self.name, ranks=ranks)
        refs: list[Any] = []  # replies of other calls, for the slots among the arguments
        args = [_in_slot(value, refs) for value in call.args]
        kwargs = {name: _in_slot(value, refs) for name, value in call.kwargs.items()}
        shared: Any = b""
        if args or kwargs:
            shared = _parcel(pack_arguments((args, kwargs), call.what, call.by_name), len(ranks))
        own = [self._own_argument(call, value, refs) for value in call.own or ()]
        answers = set(answering)
        handles = []
        with self._turn:
            for rank in ranks:
                method = getattr(hosts[rank], _actor_method(call.role, call.method, rank in answers))
                if own:
                    arguments = [shared, *own[self._mesh.coordinates(rank).data]]
                elif refs:
                    arguments = [shared, b"", *refs]
                else:
                    arguments = [shared] if shared else []
                handles.append(method.remote(*arguments))
        return handles

    def _own_argument(self, call: Call, value: Any, refs: Sequence[Any]) -> list[Any]:
        """The argument of one shard, followed by the replies that come along for it."""
        refs = list(refs)
        payload = pack_arguments(_in_slot(value, refs), call.what, lambda: call.by_name(own=value))
        return [_parcel(payload, self.world_size // self._mesh.data), *refs]

    def _collect(self, handles: Sequence[Any], ranks: Sequence[int], what: str, deadline: float) -> list[Any]:
        return self._crew.collect(handles, ranks, what, deadline)


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
