"""The in-process twin of a Ray group: workers called directly, one after another, so that a debugger steps into them.

Workers that talk to each other need a process each: for them the twin has one rank. Calls have no deadline here, since
whoever debugs takes the time it takes; arguments are passed as they are, not as read-only copies; and what is for
processes is left out: environment variables, resources, the options of Ray.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from practicum.controller.future import GroupFuture
from practicum.controller.group import Call, W, WorkerGroup
from practicum.controller.host import CallHead, WorkerHost, free_port
from practicum.controller.mesh import Mesh
from practicum.controller.packed import RayClassWithInitArgs
from practicum.controller.stacks import stack_of_this_process
from practicum.controller.worker import WorkerContext
from practicum.errors import WorkerDied, WorkerError


@dataclass(frozen=True, slots=True)
class _Outcome:
    reply: Any = None
    error: WorkerError | None = None

    def value(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.reply


class LocalWorkerGroup(WorkerGroup[W]):
    def __init__(
        self,
        packed: RayClassWithInitArgs[W],
        *,
        name: str | None = None,
        world_size: int = 1,
        meshes: Mapping[str, Mesh] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__(name or packed.cls.__name__, packed, world_size, timeout_s, meshes or {})
        self._packed = packed
        self._hosts: list[WorkerHost] = []
        self._turn = threading.RLock()  # a worker is in one call at a time; it may call its own group
        self._build()

    def restart(self) -> None:
        self.shutdown()
        self._build()

    def shutdown(self) -> None:
        with ExitStack() as stack:  # all are closed, even if one raises
            for host in self._hosts:
                stack.callback(host.close)
            self._hosts.clear()  # in place: views share the list

    def stacks(self) -> dict[int, str]:
        return dict.fromkeys(range(self.world_size), stack_of_this_process())

    def _build(self) -> None:
        """All or none are there for calls, which may come from another thread."""
        port = free_port()
        built: list[WorkerHost] = []
        try:
            for rank in range(self.world_size):
                context = WorkerContext(
                    self.name,
                    rank=rank,
                    world_size=self.world_size,
                    local_rank=rank,
                    local_world_size=self.world_size,
                    master_port=port,
                    meshes=self._meshes,
                )
                built.append(WorkerHost())
                built[-1].build(self._packed, context)
        except BaseException:
            with ExitStack() as stack:
                for host in built:
                    stack.callback(host.close)
            raise
        self._hosts.extend(built)

    def _send(
        self, call: Call, ranks: Sequence[int], answering: Sequence[int]
    ) -> tuple[Sequence[Any], Callable[[float], list[Any]]]:
        with self._turn:
            outcomes = self._run(call, ranks, set(answering))
        return outcomes, lambda _: [outcome.value() for outcome in outcomes]

    def _run(self, call: Call, ranks: Sequence[int], answering: set[int]) -> list[_Outcome]:
        if not self._hosts:
            raise WorkerDied(f"group {self.name!r} has been shut down", group=self.name, ranks=ranks)
        try:
            args = [_arrived(value) for value in call.args]
            kwargs = {name: _arrived(value) for name, value in call.kwargs.items()}
            own = None if call.own is None else [_arrived(value) for value in call.own]
        except WorkerError as error:  # of the call that an argument comes from
            return [_Outcome(error=error)] * len(ranks)
        outcomes = []
        for rank in ranks:
            head = CallHead(call.role, call.method, rank in answering)
            leading = [] if own is None else [own[self._mesh.coordinates(rank).data]]
            try:
                outcomes.append(_Outcome(self._hosts[rank].call(head, [*leading, *args], kwargs)))
            except WorkerError as error:
                outcomes.append(_Outcome(error=error))
        return outcomes


def _arrived(value: Any) -> Any:
    return value.result() if isinstance(value, GroupFuture) else value
