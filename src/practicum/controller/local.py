"""The in-process twin of a Ray group: workers called directly, one after another, so that a debugger steps into them.

Workers that talk to each other need a process each: for them the twin has one rank. Calls have no deadline here, since
whoever debugs takes the time it takes; arguments are passed as they are, not as read-only copies; and what is for
processes is left out: environment variables, resources, the options of Ray.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Container, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, aclosing
from typing import Any

from practicum.controller.group import Call, GroupFuture, Replies, WorkerGroup
from practicum.controller.host import WorkerHost, call_awaited, free_port, stream
from practicum.controller.loop import driver_loop, run_sync, running_loop
from practicum.controller.stacks import stack_of_this_process
from practicum.controller.worker import Mesh, RayClassWithInitArgs, W, WorkerContext
from practicum.errors import WorkerDied, WorkerError


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

    async def restart_async(self) -> None:
        await asyncio.to_thread(self.restart)

    def shutdown(self) -> None:
        hosts = self._hosts[:]
        self._hosts.clear()  # in place: views share the list
        _close(hosts)

    def stacks(self) -> dict[int, str]:
        return dict.fromkeys(range(self.world_size), stack_of_this_process())

    def _build(self) -> None:
        """Build all workers before any can be called, which another thread may do."""
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
            _close(built)
            raise
        self._hosts.extend(built)

    def _send(self, call: Call, ranks: Sequence[int], answering: Container[int], deadline: float) -> Replies:
        self._check_open(ranks)
        if call.is_awaited or any(isinstance(handle, asyncio.Task) for f in call.upstream for handle in f.handles):
            return self._begin(call, ranks, deadline)
        with self._lock:
            outcomes = [self._answer(call, rank) for rank in ranks]

        def values(until: float) -> list[Any]:
            return [outcome.result() for outcome in outcomes]

        async def arrive(until: float) -> list[Any]:
            return values(until)

        return Replies(outcomes, deadline, call.upstream, values, arrive)

    def _begin(self, call: Call, ranks: Sequence[int], deadline: float) -> Replies:
        """Begin coroutines, each as a task of the caller's loop, or of the driver's if the caller is on none."""
        answers = [self._answer_async(call, rank) for rank in ranks]

        async def begin() -> list[asyncio.Task[Future[Any]]]:
            return [asyncio.ensure_future(answer) for answer in answers]

        async def arrive(until: float) -> list[Any]:
            if loop is not asyncio.get_running_loop():
                return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(arrive(until), loop))
            try:
                for coming in asyncio.as_completed(tasks):
                    (await coming).result()
            except asyncio.CancelledError:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                raise
            return [task.result().result() for task in tasks]

        here = running_loop()
        loop = here or driver_loop()
        tasks = [here.create_task(answer) for answer in answers] if here else run_sync(begin(), loop)
        return Replies(tasks, deadline, call.upstream, lambda until: run_sync(arrive(until), loop), arrive)

    def _answer(self, call: Call, rank: int) -> Future[Any]:
        outcome: Future[Any] = Future()
        try:
            arguments = self._arguments(call, rank, {future: future.result() for future in call.upstream})
            outcome.set_result(self._hosts[rank].call(call.role, call.method, *arguments))
        except WorkerError as error:  # also of the call that an argument comes from
            outcome.set_exception(error)
        return outcome

    async def _answer_async(self, call: Call, rank: int) -> Future[Any]:
        host = self._hosts[rank]
        outcome: Future[Any] = Future()
        try:
            arguments = self._arguments(call, rank, {future: await future for future in call.upstream})
            if call.is_awaited:
                outcome.set_result(await call_awaited(host, call.role, call.method, *arguments))
            else:
                with self._lock:
                    outcome.set_result(host.call(call.role, call.method, *arguments))
        except WorkerError as error:
            outcome.set_exception(error)
        return outcome

    async def _stream(self, call: Call, rank: int) -> AsyncGenerator[Any, None]:
        self._check_open([rank])
        arguments = self._arguments(call, rank, {future: await future for future in call.upstream})
        async with aclosing(stream(self._hosts[rank], call.role, call.method, *arguments)) as items:
            async for item in items:
                yield item

    def _arguments(
        self, call: Call, rank: int, arrived: Mapping[GroupFuture[Any], Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        def at_hand(value: Any) -> Any:
            return arrived[value] if isinstance(value, GroupFuture) else value

        own = [] if call.own is None else [call.own[self._mesh.coordinates(rank).data]]
        return [at_hand(value) for value in (*own, *call.args)], {k: at_hand(v) for k, v in call.kwargs.items()}

    def _check_open(self, ranks: Sequence[int]) -> None:
        if not self._hosts:
            raise WorkerDied(f"group {self.name!r} has been shut down", group=self.name, ranks=ranks)


def _close(hosts: Sequence[WorkerHost]) -> None:
    with ExitStack() as stack:  # all are closed, even if one raises
        for host in hosts:
            stack.callback(host.close)
