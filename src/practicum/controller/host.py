"""The process side of a group: builds the worker in its place, then serves calls.

A failure leaves it as a `WorkerError` that says who failed and where. `RayHost` is the same as a Ray actor, with a
method of its own for each method of the worker, to which arguments come packed.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from practicum.controller.packed import FusedWorker, RayClassWithInitArgs, roles_of
from practicum.controller.stacks import StackAddress, serve_stacks
from practicum.controller.wire import Payload, fill_slots, unpack
from practicum.controller.worker import Worker, WorkerContext
from practicum.errors import WorkerError

# A small error comes along with the answer and is noticed at once; a large one would have to be fetched first.
_LONGEST_TEXT = 20_000
_LARGEST_CAUSE = 50_000


@dataclass(frozen=True, slots=True)
class CallHead:
    """What a call is, without its arguments; `role` names the part of a fused worker it is for."""

    role: str | None
    method: str
    wants_reply: bool = True

    @property
    def name(self) -> str:
        """What the actor calls it."""
        return f"{self.role or ''}.{self.method}{'' if self.wants_reply else '!'}"


class WorkerHost:
    def __init__(self) -> None:
        self._context = WorkerContext(group="?")
        self._worker: Worker | None = None
        self._address = host_address()

    def build(self, packed: RayClassWithInitArgs[Any], context: WorkerContext) -> None:
        self._context = context
        try:
            self._worker = packed.build(context)
        except Exception as error:
            raise self._failure(error, f"{packed.cls.__name__}.__init__") from error

    def call(self, head: CallHead, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        assert self._worker is not None, "call before build"
        target: Any = self._worker
        if head.role is not None:
            assert isinstance(self._worker, FusedWorker)
            target = self._worker.roles[head.role]
        try:
            reply = getattr(target, head.method)(*args, **kwargs)
            if isinstance(reply, Generator | Coroutine):  # of which Ray would send the first item, or nothing
                raise TypeError(f"a {type(reply).__name__} cannot be an answer: return a list")
        except Exception as error:
            raise self._failure(error, f"{type(target).__name__}.{head.method}") from error
        return reply if head.wants_reply else None

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _failure(self, error: Exception, what: str) -> WorkerError:
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


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a worker process came up."""

    node_id: str
    address: str
    pid: int
    free_port: int
    stack: StackAddress

    def __str__(self) -> str:
        return f"node {self.address}, pid {self.pid}"


class RayHost(WorkerHost):
    def __init__(self, import_paths: Sequence[str]) -> None:
        """`import_paths` are the driver's: a worker class defined beside its script can be imported here too."""
        super().__init__()
        sys.path.extend(path for path in import_paths if path not in sys.path)

    def seat(self) -> Seat:
        import ray

        # The address by which Ray's nodes know each other: the machine may have others.
        self._address = ray._private.worker.global_worker.node_ip_address
        node_id = ray.get_runtime_context().get_node_id()
        return Seat(node_id, self._address, os.getpid(), free_port(), serve_stacks(self._address))

    def build_packed(self, packed: Payload, context: WorkerContext) -> None:
        import ray

        os.environ.update(context.environment(sees_one_device=len(ray.get_gpu_ids()) == 1))
        self.build(unpack(packed), context)

    def call_packed(self, head: CallHead, shared: Payload, own: Payload, replies: Sequence[Any]) -> Any:
        args: list[Any] = [unpack(own)] if own else []
        kwargs: Mapping[str, Any] = {}
        if shared:
            more, kwargs = unpack(shared)
            args.extend(more)
        if replies:
            args, kwargs = fill_slots(args, kwargs, replies)
        return self.call(head, args, kwargs)


def host_class(packed: RayClassWithInitArgs[Any]) -> type[RayHost]:
    """A host with a method for each call its workers can get.

    One method for all would have to be told which is meant, and an argument makes a no-op on Ray a seventh slower.
    """
    classes: dict[str | None, type[Worker]] = {None: packed.cls}
    classes |= {name: role.cls for name, role in roles_of(packed).items()}
    heads = [
        CallHead(role, method, wants_reply)
        for role, cls in classes.items()
        for method in {name for base in cls.__mro__ for name, value in vars(base).items() if callable(value)}
        if not method.startswith("__")
        for wants_reply in (True, False)
    ]
    return type("RayHost", (RayHost,), {head.name: _serving(head) for head in heads})


def _serving(head: CallHead) -> Callable[..., Any]:
    def serve(host: RayHost, shared: Payload = b"", own: Payload = b"", *replies: Any) -> Any:
        """`shared` are the arguments all ranks get, `own` is the first one where each rank has its own; `replies` of
        other workers fill the slots among them."""
        return host.call_packed(head, shared, own, replies)

    return serve


def _can_travel(error: Exception) -> bool:
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # whatever a foreign exception's pickling may raise: then only its text is carried over
        return False
    return len(pickled) < _LARGEST_CAUSE


def host_address() -> str:
    """This machine's address as other machines of the cluster see it, or loopback when it is on no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address: nothing is sent, the kernel picks the interface
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
