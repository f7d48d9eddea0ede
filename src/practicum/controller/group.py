"""One remote control for a group of workers.

A call names the method by reference, so that the type checker sees method and arguments:

    group.execute_all(Counter.add, [1, 2, 3])      every rank, the same arguments    -> one reply per rank
    group.execute_rank_zero(Counter.add, [1])      rank 0 only                       -> its reply
    group.execute_rank(2, Counter.add, [1])        that rank only                    -> its reply
    group.map(Counter.add, [[1], [2]])             one argument per rank             -> one reply per rank
    group.scatter(Counter.square, [1, 2, 3])       split along the batch             -> replies joined in order
    group.scatter_with(cut, glue, Counter.f, x)    the same with a split and a gather of one's own

Each has an `_async` form that returns a `GroupFuture` at once. Views are the same workers seen differently:
`group.with_timeout(5)` has another deadline, `group.role("actor", ActorWorker)` calls one role of fused workers,
`group.mesh("actor")` counts in shards: all ranks of a shard get the same argument, one of them answers for it.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast

from practicum.controller.batch import join_batches, split_batch
from practicum.controller.future import Gather, GroupFuture, only
from practicum.controller.mesh import Mesh
from practicum.controller.packed import RayClassWithInitArgs, known_as, roles_of
from practicum.controller.worker import Worker, find_mesh
from practicum.errors import CallError

W = TypeVar("W", bound=Worker)
V = TypeVar("V", bound=Worker)
P = ParamSpec("P")
B = TypeVar("B")
S = TypeVar("S")
R = TypeVar("R")
Out = TypeVar("Out")


@dataclass(frozen=True, slots=True)
class Call:
    """One method with its arguments, checked against its signature, on its way to some ranks of a group."""

    what: str  # class and method, for messages
    role: str | None
    method: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    own: Sequence[Any] | None = None  # the first argument where each shard has its own

    def by_name(self, own: Any = None) -> dict[str, Any]:
        """The arguments under the names of the method's parameters, for messages; without self and futures."""
        leading = () if self.own is None else (own,)
        bound = inspect.signature(self.function).bind(None, *leading, *self.args, **self.kwargs).arguments
        return {name: value for name, value in list(bound.items())[1:] if not isinstance(value, GroupFuture)}


class WorkerGroup(ABC, Generic[W]):
    """What Ray's groups and the in-process twin have in common."""

    def __init__(
        self, name: str, packed: RayClassWithInitArgs[W], world_size: int, timeout_s: float, meshes: Mapping[str, Mesh]
    ) -> None:
        for mesh_name, mesh in meshes.items():
            if mesh.size != world_size:
                raise CallError(f"mesh {mesh_name!r} of group {name!r} has {mesh.size} ranks, the group {world_size}")
        self.name = name
        self.world_size = world_size
        self._roles = roles_of(packed)
        self._role: str | None = None
        self._worker_class: type[Worker] = packed.cls
        self._meshes = meshes
        self._mesh = Mesh(data=world_size)
        self._timeout_s = positive_seconds(timeout_s, "timeout_s", name)

    def execute_all_async(
        self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> GroupFuture[list[R]]:
        return self._start(self._call(method, args, kwargs), list)

    def execute_all(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return self.execute_all_async(method, *args, **kwargs).result()

    def execute_rank_zero_async(
        self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> GroupFuture[R]:
        return self.execute_rank_async(0, method, *args, **kwargs)

    def execute_rank_zero(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        return self.execute_rank_zero_async(method, *args, **kwargs).result()

    def execute_rank_async(
        self, rank: int, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> GroupFuture[R]:
        if not 0 <= rank < self.world_size:
            raise CallError(f"group {self.name!r} has ranks 0 to {self.world_size - 1}, not {rank}")
        return self._start(self._call(method, args, kwargs), only, ranks=[rank], answering=[rank])

    def execute_rank(self, rank: int, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        return self.execute_rank_async(rank, method, *args, **kwargs).result()

    def map_async(
        self,
        method: Callable[Concatenate[W, S, P], R],
        per_rank: Sequence[S] | GroupFuture[list[S]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> GroupFuture[list[R]]:
        if isinstance(per_rank, GroupFuture):
            if per_rank.gather is not list:
                raise CallError(f"group {self.name!r}: map takes the future of execute_all or map, one reply per rank")
            per_rank = cast(Sequence[S], per_rank.each())
        per_rank = self._as_list(per_rank, "map takes a list of arguments")
        if len(per_rank) != self._mesh.data:
            unit = "ranks" if self._mesh.data == self.world_size else "shards"
            raise CallError(f"group {self.name!r} has {self._mesh.data} {unit}, but {len(per_rank)} arguments came")
        return self._start(self._call(method, args, kwargs, own=per_rank), list)

    def map(
        self,
        method: Callable[Concatenate[W, S, P], R],
        per_rank: Sequence[S] | GroupFuture[list[S]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        return self.map_async(method, per_rank, *args, **kwargs).result()

    def scatter_with_async(
        self,
        split: Callable[[B, int], Sequence[S]],
        gather: Callable[[list[R]], Out],
        method: Callable[Concatenate[W, S, P], R],
        batch: B | GroupFuture[B],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> GroupFuture[Out]:
        """`split` cuts the batch into as many shares as it is told, `gather` makes one reply of many."""
        num_shards = self._mesh.data
        shares = batch.shares(num_shards, split) if isinstance(batch, GroupFuture) else split(batch, num_shards)
        own = self._as_list(shares, "the split must return a list of shares")
        if len(own) != num_shards:
            raise CallError(f"group {self.name!r}: the split made {len(own)} shares where {num_shards} were asked for")
        return self._start(self._call(method, args, kwargs, own=own), gather)

    def scatter_with(
        self,
        split: Callable[[B, int], Sequence[S]],
        gather: Callable[[list[R]], Out],
        method: Callable[Concatenate[W, S, P], R],
        batch: B | GroupFuture[B],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Out:
        return self.scatter_with_async(split, gather, method, batch, *args, **kwargs).result()

    def scatter_async(
        self, method: Callable[Concatenate[W, B, P], R], batch: B | GroupFuture[B], *args: P.args, **kwargs: P.kwargs
    ) -> GroupFuture[R]:
        return self.scatter_with_async(split_batch, join_batches, method, batch, *args, **kwargs)

    def scatter(
        self, method: Callable[Concatenate[W, B, P], R], batch: B | GroupFuture[B], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        return self.scatter_async(method, batch, *args, **kwargs).result()

    def with_timeout(self, timeout_s: float) -> Self:
        view = copy.copy(self)
        view._timeout_s = positive_seconds(timeout_s, "timeout_s", self.name)
        return view

    def mesh(self, name: str) -> Self:
        """The group in shards of the mesh of that name: `map` takes an argument per shard, `scatter` splits the batch
        over them, and all calls keep one reply per shard."""
        view = copy.copy(self)
        view._mesh = find_mesh(self._meshes, name, self.name)
        return view

    def role(self, name: str, cls: type[V]) -> WorkerGroup[V]:
        """The role `name` of a group of `FusedWorker`s, as a group of its own."""
        found = known_as(self._roles[name].cls, cls) if name in self._roles else None
        if found is None:
            known = ", ".join(f"{role} ({packed.cls.__name__})" for role, packed in self._roles.items()) or "none"
            raise CallError(f"group {self.name!r} has no role {name!r} of class {cls.__name__}; its roles: {known}")
        view = cast(WorkerGroup[V], copy.copy(self))
        view._role = name
        view._worker_class = found
        return view

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()

    @abstractmethod
    def stacks(self) -> dict[int, str]:
        """What each rank is doing now: its Python stack, also while it is busy with a call."""

    @abstractmethod
    def restart(self) -> None:
        """End the workers and start them anew in the same places. What they held in memory is lost."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers. Safe to call twice."""

    @abstractmethod
    def _send(
        self, call: Call, ranks: Sequence[int], answering: Sequence[int]
    ) -> tuple[Sequence[Any], Callable[[float], list[Any]]]:
        """Start a call on some ranks: a handle for each, and a function that waits for all replies until a deadline.

        That raises the first failure to arrive, or `DeadlineError`. Nothing is sent if anything cannot be.
        """

    def _start(
        self,
        call: Call,
        gather: Gather,
        ranks: Sequence[int] | None = None,
        answering: Sequence[int] | None = None,
    ) -> GroupFuture[Any]:
        deadline = time.monotonic() + self._timeout_s
        ranks = range(self.world_size) if ranks is None else ranks
        answering = self._mesh.answering_ranks() if answering is None else answering
        handles, collect = self._send(call, ranks, answering)
        kept = [ranks.index(rank) for rank in answering]

        def replies(deadline: float) -> list[Any]:
            received = collect(deadline)
            return [received[index] for index in kept]

        arguments = (*call.args, *call.kwargs.values(), *(() if call.own is None else call.own))
        upstream = [value for value in arguments if isinstance(value, GroupFuture)]
        return GroupFuture([handles[index] for index in kept], replies, deadline, gather, upstream)

    def _as_list(self, values: Any, what: str) -> list[Any]:
        if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__getitem__"):
            raise CallError(f"group {self.name!r}: {what}, not a {type(values).__name__}")
        return list(values)

    def _call(
        self,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        own: Sequence[Any] | None = None,
    ) -> Call:
        cls = self._worker_class
        num_positional = len(args) + (own is not None)
        try:
            name = _method_name(cls, method, num_positional, tuple(kwargs))  # type: ignore[arg-type]  # can be hashed
        except TypeError as error:
            raise CallError(f"group {self.name!r}: {error}") from None
        return Call(f"{cls.__name__}.{name}", self._role, name, method, args, kwargs, own)


@functools.lru_cache(maxsize=4096)
def _method_name(cls: type[Worker], method: Callable[..., Any], num_positional: int, names: tuple[str, ...]) -> str:
    """The name under which the class has the method, if it can be called with so many arguments and such names."""
    found = [name for base in cls.__mro__ for name, value in vars(base).items() if value is method]
    if not found:
        raise TypeError(f"{getattr(method, '__qualname__', repr(method))} is not a method of {cls.__name__}")
    name = found[0]
    if name.startswith("__"):
        raise TypeError(f"{cls.__name__}.{name} cannot be called on a group")
    if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise TypeError(f"{cls.__name__}.{name} is async or a generator: a worker's method returns its answer")
    try:
        inspect.signature(method).bind(None, *[None] * num_positional, **dict.fromkeys(names))
    except TypeError as error:
        raise TypeError(f"wrong arguments for {cls.__name__}.{name}: {error}") from None
    return name


def positive_seconds(value: float, name: str, group: str) -> float:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CallError(f"group {group!r}: {name} must be a positive number of seconds, not {value!r}")
    return value
