"""The in-process twin of a Ray group: workers called directly, one after another, so that a debugger steps into them.

Workers that talk to each other need a process each: for them the twin has one rank. Calls have no deadline here, since
whoever debugs takes the time it takes; arguments are passed as they are, not as read-only copies; and what is for
processes is left out: environment variables, resources, the options of Ray.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Container, Coroutine, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import Any

from practicum.controller.group import Call, GroupFuture, Replies, WorkerGroup
from practicum.controller.host import CallHead, WorkerHost, call_awaited, free_port, stream
from practicum.controller.loop import driver_loop, run_sync, running_loop
from practicum.controller.stacks import stack_of_this_process
from practicum.controller.worker import Mesh, RayClassWithInitArgs, W, WorkerContext
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
        self._lock = threading.RLock()  # a worker is in one call at a time; it may call its own group
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

    def _send(self, call: Call, ranks: Sequence[int], answering: Container[int], deadline: float) -> Replies:
        self._check_open(ranks)
        heads = [CallHead(call.role, call.method, rank in answering) for rank in ranks]
        if call.is_awaited or any(isinstance(handle, asyncio.Task) for f in call.upstream for handle in f.handles):
            answers = [self._answer(call, rank, head) for rank, head in zip(ranks, heads, strict=True)]
            return self._begun(call, answers, deadline)
        with self._lock:
            outcomes = self._run(call, ranks, heads)

        def values(until: float) -> list[Any]:
            return [outcome.value() for outcome in outcomes]

        async def arrive(until: float) -> list[Any]:
            return values(until)

        return Replies(outcomes, deadline, call.upstream, values, arrive)

    def _begun(self, call: Call, answers: list[Coroutine[Any, Any, _Outcome]], deadline: float) -> Replies:
        """The replies of coroutines, each a task of the caller's loop, or the driver's where the caller is on none."""

        async def begin() -> list[asyncio.Task[_Outcome]]:
            return [asyncio.ensure_future(answer) for answer in answers]

        async def arrive(until: float) -> list[Any]:
            if loop is not asyncio.get_running_loop():
                return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(arrive(until), loop))
            try:
                for coming in asyncio.as_completed(tasks):
                    (await coming).value()
            except asyncio.CancelledError:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                raise
            return [task.result().value() for task in tasks]

        here = running_loop()
        loop = here or driver_loop()
        tasks = [here.create_task(answer) for answer in answers] if here else run_sync(begin(), loop)
        return Replies(tasks, deadline, call.upstream, lambda until: run_sync(arrive(until), loop), arrive)

    def _run(self, call: Call, ranks: Sequence[int], heads: Sequence[CallHead]) -> list[_Outcome]:
        try:
            arrived = {future: future.result() for future in call.upstream}
        except WorkerError as error:  # of the call that an argument comes from
            return [_Outcome(error=error)] * len(ranks)
        outcomes = []
        for rank, head in zip(ranks, heads, strict=True):
            try:
                outcomes.append(_Outcome(self._hosts[rank].call(head, *self._arguments(call, rank, arrived))))
            except WorkerError as error:
                outcomes.append(_Outcome(error=error))
        return outcomes

    async def _answer(self, call: Call, rank: int, head: CallHead) -> _Outcome:
        host = self._hosts[rank]
        try:
            arguments = self._arguments(call, rank, {future: await future for future in call.upstream})
            if call.is_awaited:
                return _Outcome(await call_awaited(host, head, *arguments))
            with self._lock:
                return _Outcome(host.call(head, *arguments))
        except WorkerError as error:
            return _Outcome(error=error)

    async def _stream(self, call: Call, rank: int) -> AsyncGenerator[Any, None]:
        self._check_open([rank])
        arguments = self._arguments(call, rank, {future: await future for future in call.upstream})
        async with aclosing(stream(self._hosts[rank], CallHead(call.role, call.method), *arguments)) as items:
            async for item in items:
                yield item

    def _arguments(
        self, call: Call, rank: int, arrived: Mapping[GroupFuture[Any], Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        own = [] if call.own is None else [call.own[self._mesh.coordinates(rank).data]]

        def at_hand(value: Any) -> Any:
            return arrived[value] if isinstance(value, GroupFuture) else value

        return [at_hand(value) for value in (*own, *call.args)], {k: at_hand(v) for k, v in call.kwargs.items()}

    def _check_open(self, ranks: Sequence[int]) -> None:
        if not self._hosts:
            raise WorkerDied(f"group {self.name!r} has been shut down", group=self.name, ranks=ranks)
