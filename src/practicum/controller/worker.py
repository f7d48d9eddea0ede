"""A worker: one object in one process of a group, which knows its place and does as it is called to.

`WorkerHost` is the process side of a group, the same under Ray and in-process: it builds the worker in its place, then
looks up each call's method on it. A failure leaves it as a `WorkerError` that says who failed and where.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from practicum.errors import WorkerError

W = TypeVar("W", bound="Worker")


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """A worker's place in its group, and where the group meets for collectives."""

    group: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    node_rank: int = 0
    master_address: str = "127.0.0.1"
    master_port: int = 0


class Worker:
    """Base of every worker class. Its place is known before `__init__` runs."""

    context: WorkerContext
    siblings: Mapping[str, Worker]
    """The other roles in this process by name, when the worker is fused with others; see `FusedWorker`."""

    @property
    def rank(self) -> int:
        return self.context.rank

    @property
    def world_size(self) -> int:
        return self.context.world_size

    def close(self) -> None:
        """Give back what outlives the object. For in-process groups: a Ray worker ends with its process."""


class RayClassWithInitArgs(Generic[W]):
    """A worker class packed with its arguments, to be built later in another process."""

    def __init__(self, cls: type[W], *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    def build(self, context: WorkerContext, siblings: Mapping[str, Worker] | None = None) -> W:
        worker = self.cls.__new__(self.cls)
        worker.context = context
        worker.siblings = siblings or {}
        worker.__init__(*self.args, **self.kwargs)  # type: ignore[misc]
        return worker


class FusedWorker(Worker):
    """Several workers in one process per rank. Roles are built in order and reach each other through `siblings`."""

    def __init__(self, **roles: RayClassWithInitArgs[Any]) -> None:
        self.roles: dict[str, Worker] = {}
        try:
            for name, packed in roles.items():
                # The mapping is shared, so that a role built early also sees the ones built after it.
                self.roles[name] = packed.build(self.context, self.roles)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for worker in reversed(self.roles.values()):
            worker.close()


@dataclass(frozen=True, slots=True)
class Call:
    """One method call on one worker; `role` names the part of a fused worker it is for."""

    role: str | None
    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a worker process came up."""

    address: str
    pid: int
    free_port: int


class WorkerHost:
    def __init__(self, import_paths: Sequence[str] = ()) -> None:
        """`import_paths` are the driver's: a worker class defined beside its script can be imported here too."""
        sys.path.extend(path for path in import_paths if path not in sys.path)
        self._context = WorkerContext(group="?")
        self._worker: Worker | None = None

    def seat(self) -> Seat:
        return Seat(host_address(), os.getpid(), free_port())

    def build(self, packed: RayClassWithInitArgs[Any], context: WorkerContext) -> None:
        self._context = context
        try:
            self._worker = packed.build(context)
        except Exception as error:
            raise self._failure(error, f"{packed.cls.__name__}.__init__") from error

    @property
    def is_open(self) -> bool:
        return self._worker is not None

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def call(self, call: Call, *args: Any) -> Any:
        """`args`, when given, stand for `call.args`: Ray resolves futures only among a call's direct arguments."""
        assert self._worker is not None, "call before build"
        target: Any = self._worker
        if call.role is not None:
            assert isinstance(self._worker, FusedWorker)
            target = self._worker.roles[call.role]
        try:
            return getattr(target, call.method)(*(args or call.args), **call.kwargs)
        except Exception as error:
            raise self._failure(error, f"{type(target).__name__}.{call.method}") from error

    def _failure(self, error: Exception, what: str) -> WorkerError:
        context, node, pid = self._context, host_address(), os.getpid()
        return WorkerError(
            f"group {context.group!r}, rank {context.rank} of {context.world_size} (node {node}, pid {pid}): "
            f"{what} raised {type(error).__name__}: {error}",
            group=context.group,
            ranks=[context.rank],
            node=node,
            pid=pid,
            remote_traceback=traceback.format_exc(),
            cause=error if _can_be_pickled(error) else None,
        )


def _can_be_pickled(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a foreign exception's pickling may raise: then only its text is carried over
        return False
    return True


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
