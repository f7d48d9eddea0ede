"""The process side of a group: builds the worker in its place, then serves calls.

Exceptions leave it as a `WorkerError` that says which worker raised them where. `RayHost` is a Ray actor, with a method
for each method of the worker that takes packed arguments.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import socket
import sys
import traceback
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from practicum.controller.loop import running_loop
from practicum.controller.stacks import StackAddress, serve_stacks
from practicum.controller.wire import Payload, unpack, unpack_arguments
from practicum.controller.worker import RayClassWithInitArgs, Worker, WorkerContext, close_worker, roles_of
from practicum.errors import WorkerError

# A small error comes along with the answer and is noticed at once; a large one would have to be fetched first.
_LONGEST_TEXT = 20_000
_LARGEST_CAUSE = 50_000


class WorkerHost:
    """Builds a worker and calls it. `role` names the part of a fused worker that a call is for."""

    def __init__(self) -> None:
        self._context = WorkerContext(group="?")
        self._worker: Worker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # which runs its coroutines, and its close
        self._address = host_address()

    def build(self, packed: RayClassWithInitArgs[Any], context: WorkerContext) -> None:
        self._context = context
        try:
            self._worker = packed.build(context)
        except Exception as error:
            raise self.failure(error, f"{packed.cls.__name__}.__init__") from error

    def call(self, role: str | None, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self.method(role, name) as method:
            reply = method(*args, **kwargs)
            if isinstance(reply, Generator | Coroutine):  # of which Ray would send the first item, or nothing
                raise TypeError(f"a {type(reply).__name__} cannot be an answer: return a list")
        return reply

    def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            close_worker(worker, self._loop)

    def note_loop(self) -> None:
        """Note that a coroutine of the worker runs on this loop, unless the loop of those before still runs."""
        if self._loop is None or not self._loop.is_running():
            self._loop = asyncio.get_running_loop()

    @contextmanager
    def method(self, role: str | None, name: str) -> Iterator[Callable[..., Any]]:
        """Give a method of the worker. An exception leaves the block as a `WorkerError` that names worker and place."""
        target: Any = self._worker
        if role is not None:
            target = target.roles[role]
        try:
            yield getattr(target, name)
        except Exception as error:
            raise self.failure(error, f"{type(target).__name__}.{name}") from error

    def failure(self, error: Exception, what: str) -> WorkerError:
        context, node, pid = self._context, self._address, os.getpid()
        return WorkerError(
            f"group {context.group!r}, rank {context.rank} of {context.world_size} (node {node}, pid {pid}): "
            f"{what} raised {type(error).__name__}: {str(error)[:_LONGEST_TEXT]}",
            group=context.group,
            ranks=[context.rank],
            node=node,
            pid=pid,
            remote_traceback=traceback.format_exc()[-_LONGEST_TEXT:],
            cause=error if _can_travel(error) else None,
        )


# Functions, not methods: a class with coroutines would be an async actor to Ray.


async def call_awaited(
    host: WorkerHost, role: str | None, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    host.note_loop()
    with host.method(role, name) as method:
        return await method(*args, **kwargs)


async def stream(
    host: WorkerHost, role: str | None, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> AsyncGenerator[Any, None]:
    host.note_loop()
    with host.method(role, name) as method:
        async with aclosing(method(*args, **kwargs)) as items:
            async for item in items:
                yield item


@dataclass(frozen=True, slots=True)
class Location:
    """Where a worker process came up."""

    node_id: str
    address: str
    pid: int
    master_port: int  # held for the time that the process lives
    stack: StackAddress

    def __str__(self) -> str:
        return f"node {self.address}, pid {self.pid}"


class RayHost(WorkerHost):
    def __init__(self, import_paths: Sequence[str]) -> None:
        """`import_paths` are the driver's: a worker class defined beside its script can be imported here too."""
        super().__init__()
        sys.path.extend(path for path in import_paths if path not in sys.path)

    def locate(self) -> Location:
        import ray

        # The address by which Ray's nodes know each other: the machine may have others.
        self._address = ray._private.worker.global_worker.node_ip_address
        self._held = hold_port()
        port, stack = self._held.getsockname()[1], serve_stacks(self._address, running_loop())
        return Location(ray.get_runtime_context().get_node_id(), self._address, os.getpid(), port, stack)

    def build_packed(self, packed: Payload, context: WorkerContext) -> None:
        import ray

        os.environ.update(context.environment(sees_one_device=len(ray.get_gpu_ids()) == 1))
        self.build(unpack(packed), context)


CallId = tuple[str, int]
"""The caller, and the number of its call. Ray does not keep calls to an async actor in order: the host does."""


class AsyncRayHost(RayHost):
    """The host of a class with coroutines: they run on the actor's event loop, all else on the one device thread."""

    def __init__(self, import_paths: Sequence[str]) -> None:
        super().__init__(import_paths)
        self.device_thread = Worker.device_thread = ThreadPoolExecutor(1, "practicum-device")
        self.device_lock = asyncio.Lock()  # first come, first served
        self._next: Counter[str] = Counter()  # of each caller
        self._early: dict[CallId, asyncio.Future[None]] = {}  # calls that came before others that were sent before them
        self.running: dict[CallId, asyncio.Task[Any]] = {}

    async def build_packed(self, packed: Payload, context: WorkerContext) -> None:  # type: ignore[override]
        await asyncio.get_running_loop().run_in_executor(self.device_thread, super().build_packed, packed, context)

    async def in_order(self, call_id: CallId) -> None:
        """Wait until all calls that this caller has sent before have begun."""
        caller, number = call_id
        if number != self._next[caller]:
            self._early[call_id] = asyncio.get_running_loop().create_future()
            await self._early[call_id]
        self._next[caller] += 1
        follower = self._early.pop((caller, number + 1), None)
        if follower is not None:
            follower.set_result(None)

    async def end(self, call_id: CallId, task: asyncio.Task[Any], name: str) -> Any:
        """Wait for a call that runs in a task of its own, so that it can be cancelled wherever it is."""
        await asyncio.wait([task])
        was_cancelled = self.running.pop(call_id, None) is None
        if not task.cancelled():
            return task.result()
        if not was_cancelled:
            raise self.failure(RuntimeError("it was cancelled by something on the worker"), name)

    async def cancel(self, call_id: CallId, calls: Sequence[CallId]) -> None:
        """Cancel coroutines or generators, for which nobody waits any longer, and return when they have ended."""
        await self.in_order(call_id)
        for task in [self.running.pop(call) for call in calls if call in self.running]:
            task.cancel()
            await asyncio.wait([task])


async def _fetched(packed: Sequence[Any]) -> list[Any]:
    """Fetch arguments in the object store, which come as references so that Ray does not hold the call up for them."""
    from ray import ObjectRef

    return [await one if isinstance(one, ObjectRef) else one for one in packed]


def host_class(packed: RayClassWithInitArgs[Any]) -> type[RayHost]:
    """Return a host class with a method for each call its workers can get.

    One method for all would take the name as an argument, which makes a no-op on Ray a seventh slower. An async actor
    is slower by more than that, so that only classes that need one get one.
    """
    base, serving = (AsyncRayHost, _serving_async) if is_async(packed) else (RayHost, _serving)
    serves = {
        host_method(role, name, wants_reply): serving(role, name, wants_reply, method)
        for role, name, method in _methods(packed)
        for wants_reply in (True, False)
    }
    return type("RayHost", (base,), serves)


def host_method(role: str | None, name: str, wants_reply: bool) -> str:
    """Return the name of the host's method that calls the worker's and sends its reply, or that does not send it."""
    return f"{role or ''}.{name}{'' if wants_reply else '!'}"


def is_async(packed: RayClassWithInitArgs[Any]) -> bool:
    """Return whether a class, or a role fused into it, has methods that are coroutines or async generators."""
    methods = [method for _, _, method in _methods(packed)]
    return any(inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method) for method in methods)


def _methods(packed: RayClassWithInitArgs[Any]) -> list[tuple[str | None, str, Callable[..., Any]]]:
    """Return all methods that can be called, with role and name."""
    classes: dict[str | None, type[Worker]] = {None: packed.cls}
    classes |= {role: one.cls for role, one in roles_of(packed).items()}
    return [
        (role, name, getattr(cls, name))
        for role, cls in classes.items()
        for name in {name for base in cls.__mro__ for name, value in vars(base).items() if callable(value)}
        if not name.startswith("__") and name != "on_device"
    ]


# Each gets `shared`, the arguments for all ranks, `own`, the first one where each rank has its own, and `replies` of
# other workers for the slots among them; an async host gets all of them as a list, after the id of the call.


def _serving(role: str | None, name: str, wants_reply: bool, _: Callable[..., Any]) -> Callable[..., Any]:
    def serve(host: RayHost, shared: Payload = b"", own: Payload = b"", *replies: Any) -> Any:
        reply = host.call(role, name, *unpack_arguments(shared, own, *replies))
        return reply if wants_reply else None

    return serve


def _serving_async(role: str | None, name: str, wants_reply: bool, method: Callable[..., Any]) -> Callable[..., Any]:
    serve = _serving(role, name, wants_reply, method)

    async def serve_plain(host: AsyncRayHost, call_id: CallId, packed: Sequence[Any] = ()) -> Any:
        await host.in_order(call_id)
        async with host.device_lock:
            arguments = await _fetched(packed)
            return await asyncio.get_running_loop().run_in_executor(host.device_thread, serve, host, *arguments)

    async def serve_coroutine(host: AsyncRayHost, call_id: CallId, packed: Sequence[Any] = ()) -> Any:
        async def run() -> Any:
            reply = await call_awaited(host, role, name, *unpack_arguments(*(await _fetched(packed))))
            return reply if wants_reply else None

        await host.in_order(call_id)
        task = host.running[call_id] = asyncio.ensure_future(run())
        return await host.end(call_id, task, name)

    async def serve_stream(
        host: AsyncRayHost, call_id: CallId, packed: Sequence[Any] = ()
    ) -> AsyncGenerator[Any, None]:
        items: asyncio.Queue[Any] = asyncio.Queue()
        end = object()

        async def run() -> None:
            try:
                async with aclosing(stream(host, role, name, *unpack_arguments(*(await _fetched(packed))))) as made:
                    async for item in made:
                        items.put_nowait(item)
            finally:
                items.put_nowait(end)

        await host.in_order(call_id)
        task = host.running[call_id] = asyncio.ensure_future(run())
        while (item := await items.get()) is not end:
            yield item
        await host.end(call_id, task, name)

    if inspect.isasyncgenfunction(method):
        return serve_stream
    return serve_coroutine if inspect.iscoroutinefunction(method) else serve_plain


def _can_travel(error: Exception) -> bool:
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # whatever a foreign exception's pickling may raise: then only its text is carried over
        return False
    return len(pickled) < _LARGEST_CAUSE


def host_address() -> str:
    """Return this machine's address as other machines of the cluster see it, or loopback if it is on no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address: nothing is sent, the kernel picks the interface
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def hold_port() -> socket.socket:
    """Return a socket that is bound to a port but does not listen. Until it is closed, nobody who asks for a free port
    is given this one, while a server that is told the port, such as torch's TCPStore, can listen there."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: then both may have the port
    held.bind(("", 0))
    return held


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with hold_port() as held:
        return int(held.getsockname()[1])
