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
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Container,
    Coroutine,
    Generator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeAlias, TypeVar, cast, overload

from practicum.controller.wire import join_batches, split_batch
from practicum.controller.worker import Mesh, RayClassWithInitArgs, W, Worker, find_mesh, known_as, roles_of
from practicum.errors import CallError, WorkerError

V = TypeVar("V", bound=Worker)
P = ParamSpec("P")
B = TypeVar("B")
S = TypeVar("S")
R = TypeVar("R")
Out = TypeVar("Out")
Result = TypeVar("Result", covariant=True)  # a future list of samples is a future sequence of them

Gather = Callable[[list[Any]], Any]
Split = Callable[[B, int], Sequence[S]]
Join = Callable[[list[R]], Out]
Method = Callable[Concatenate[W, P], R]
Coro = Callable[Concatenate[W, P], Coroutine[Any, Any, R]]
MethodOn = Callable[Concatenate[W, S, P], R]  # its first argument is not the same for all ranks
CoroOn = Callable[Concatenate[W, S, P], Coroutine[Any, Any, R]]


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
    is_awaited: bool = False  # the method is a coroutine

    @property
    def upstream(self) -> list[GroupFuture[Any]]:
        """Return the futures among the arguments."""
        arguments = (*self.args, *self.kwargs.values(), *(self.own or ()))
        return [value for value in arguments if isinstance(value, GroupFuture)]

    def by_name(self, own: Any = None) -> dict[str, Any]:
        """Return the arguments under the names of the method's parameters, for messages; without self and futures."""
        leading = () if self.own is None else (own,)
        bound = inspect.signature(self.function).bind(None, *leading, *self.args, **self.kwargs).arguments
        return {name: value for name, value in list(bound.items())[1:] if not isinstance(value, GroupFuture)}


@dataclass(eq=False, slots=True)
class Replies:
    """The replies to one call, which may still be under way, and two ways to wait for them: blocking and awaited.

    Both take a time of the monotonic clock as their deadline, and raise the first failure to arrive, or
    `DeadlineError`. Being cancelled while it awaits them cancels the coroutines that were called.
    """

    handles: Sequence[Any]  # one per rank that was called; Ray's references if it is a Ray group's
    deadline: float
    upstream: Sequence[GroupFuture[Any]]  # among the arguments
    collect: Callable[[float], list[Any]]
    arrive: Callable[[float], Awaitable[list[Any]]]
    received: list[Any] | None = None

    def wait(self, deadline: float | None = None) -> list[Any]:
        if self.received is None:
            try:
                self.received = self.collect(self.deadline if deadline is None else deadline)
            except WorkerError:
                for future in self.upstream:
                    future.replies.wait(time.monotonic())
                raise
        return self.received

    async def wait_async(self, deadline: float | None = None) -> list[Any]:
        if self.received is None:
            try:
                self.received = await self.arrive(self.deadline if deadline is None else deadline)
            except WorkerError:
                for future in self.upstream:
                    await future.replies.wait_async(time.monotonic())
                raise
        return self.received


class GroupFuture(Generic[Result]):
    """The reply of an `_async` call: awaitable, or to be waited for by `result`. The deadline counts from the call.

    It can be an argument of a call to any group: the replies then go from worker to worker. As the batch of `scatter`
    or the list of `map` it is passed as it is; elsewhere `future.forward()` keeps the type checker content.
    """

    def __init__(self, replies: Replies, kept: Sequence[int], gather: Gather) -> None:
        """`kept` are the replies it is made of, by their index."""
        self.replies = replies
        self.gather = gather
        self._kept = kept

    @property
    def handles(self) -> list[Any]:
        return [self.replies.handles[index] for index in self._kept]

    def result(self) -> Result:
        """Wait for all replies. Raises the first failure, or `DeadlineError`; if it is the failure of a call that an
        argument comes from, that one's."""
        return self._made_of(self.replies.wait())

    def __await__(self) -> Generator[Any, None, Result]:
        """Wait for all replies as `result` does, without blocking the event loop."""
        return self._made_of((yield from self.replies.wait_async().__await__()))

    def _made_of(self, replies: list[Any]) -> Result:
        return cast(Result, self.gather([replies[index] for index in self._kept]))

    def __reduce__(self) -> Any:
        raise TypeError("a future can be an argument of a call, but not be inside one")

    def forward(self) -> Result:
        """Return the future itself, typed as its result, to pass it as an argument of another call."""
        return cast(Result, self)

    def shares(self, parts: int, split: Split[Any, Any]) -> list[GroupFuture[Any]]:
        """Return futures for the shares of a batch that is not there yet.

        A batch that is cut as it was joined, from as many replies, is passed on reply by reply; any other is joined and
        cut where it arrives.
        """
        if (self.gather, split) == (join_batches, split_batch) and len(self._kept) == parts:
            return self.each()
        cuts = [functools.partial(_gather_and_cut, self.gather, split, part, parts) for part in range(parts)]
        return [GroupFuture(self.replies, self._kept, cut) for cut in cuts]

    def each(self) -> list[GroupFuture[Any]]:
        """Return a future for each reply."""
        return [GroupFuture(self.replies, [index], only) for index in self._kept]


Shares = Sequence[S] | GroupFuture[list[S]]
Batch: TypeAlias = GroupFuture[B] | B


def _gather_and_cut(gather: Gather, split: Split[Any, Any], part: int, parts: int, replies: list[Any]) -> Any:
    return split(gather(replies), parts)[part]


def only(replies: list[Any]) -> Any:
    (reply,) = replies
    return reply


class WorkerGroup(ABC, Generic[W]):
    """The interface that Ray's groups and the in-process twin share."""

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

    # Each call takes plain methods and coroutines, typed with what is returned and what is awaited.

    @overload
    def execute_all_async(self, method: Coro[W, P, R], *args: P.args, **kwargs: P.kwargs) -> GroupFuture[list[R]]: ...
    @overload
    def execute_all_async(self, method: Method[W, P, R], *args: P.args, **kwargs: P.kwargs) -> GroupFuture[list[R]]: ...
    def execute_all_async(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._start(self._call(method, args, kwargs), list)

    @overload
    def execute_all(self, method: Coro[W, P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]: ...
    @overload
    def execute_all(self, method: Method[W, P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]: ...
    def execute_all(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self.execute_all_async(method, *args, **kwargs).result()

    @overload
    def execute_rank_zero_async(self, method: Coro[W, P, R], *args: P.args, **kwargs: P.kwargs) -> GroupFuture[R]: ...
    @overload
    def execute_rank_zero_async(self, method: Method[W, P, R], *args: P.args, **kwargs: P.kwargs) -> GroupFuture[R]: ...
    def execute_rank_zero_async(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self.execute_rank_async(0, method, *args, **kwargs)

    @overload
    def execute_rank_zero(self, method: Coro[W, P, R], *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def execute_rank_zero(self, method: Method[W, P, R], *args: P.args, **kwargs: P.kwargs) -> R: ...
    def execute_rank_zero(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self.execute_rank_async(0, method, *args, **kwargs).result()

    @overload
    def execute_rank_async(
        self, rank: int, method: Coro[W, P, R], *args: P.args, **kwargs: P.kwargs
    ) -> GroupFuture[R]: ...
    @overload
    def execute_rank_async(
        self, rank: int, method: Method[W, P, R], *args: P.args, **kwargs: P.kwargs
    ) -> GroupFuture[R]: ...
    def execute_rank_async(self, rank: int, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._start(self._call(method, args, kwargs), only, [self._checked(rank)])

    @overload
    def execute_rank(self, rank: int, method: Coro[W, P, R], *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def execute_rank(self, rank: int, method: Method[W, P, R], *args: P.args, **kwargs: P.kwargs) -> R: ...
    def execute_rank(self, rank: int, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self.execute_rank_async(rank, method, *args, **kwargs).result()

    @overload
    def map_async(
        self, method: CoroOn[W, S, P, R], per_rank: Shares[S], *args: P.args, **kwargs: P.kwargs
    ) -> GroupFuture[list[R]]: ...
    @overload
    def map_async(
        self, method: MethodOn[W, S, P, R], per_rank: Shares[S], *args: P.args, **kwargs: P.kwargs
    ) -> GroupFuture[list[R]]: ...
    def map_async(self, method: Any, per_rank: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(per_rank, GroupFuture):
            if per_rank.gather is not list:
                raise CallError(f"group {self.name!r}: map takes the future of execute_all or map, one reply per rank")
            per_rank = per_rank.each()
        per_rank = self._as_list(per_rank, "map takes a list of arguments")
        if len(per_rank) != self._mesh.data:
            unit = "ranks" if self._mesh.data == self.world_size else "shards"
            raise CallError(f"group {self.name!r} has {self._mesh.data} {unit}, but {len(per_rank)} arguments came")
        return self._start(self._call(method, args, kwargs, own=per_rank), list)

    @overload
    def map(self, method: CoroOn[W, S, P, R], per_rank: Shares[S], *args: P.args, **kwargs: P.kwargs) -> list[R]: ...
    @overload
    def map(self, method: MethodOn[W, S, P, R], per_rank: Shares[S], *args: P.args, **kwargs: P.kwargs) -> list[R]: ...
    def map(self, method: Any, per_rank: Any, *args: Any, **kwargs: Any) -> Any:
        return self.map_async(method, per_rank, *args, **kwargs).result()

    @overload
    def scatter_async(
        self, method: CoroOn[W, B, P, R], batch: Batch[B], *args: P.args, **kwargs: P.kwargs
    ) -> GroupFuture[R]: ...
    @overload
    def scatter_async(
        self, method: MethodOn[W, B, P, R], batch: Batch[B], *args: P.args, **kwargs: P.kwargs
    ) -> GroupFuture[R]: ...
    def scatter_async(self, method: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self.scatter_with_async(split_batch, join_batches, method, batch, *args, **kwargs)

    @overload
    def scatter(self, method: CoroOn[W, B, P, R], batch: Batch[B], *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def scatter(self, method: MethodOn[W, B, P, R], batch: Batch[B], *args: P.args, **kwargs: P.kwargs) -> R: ...
    def scatter(self, method: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self.scatter_async(method, batch, *args, **kwargs).result()

    @overload
    def scatter_with_async(
        self,
        split: Split[B, S],
        gather: Join[R, Out],
        method: CoroOn[W, S, P, R],
        batch: Batch[B],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> GroupFuture[Out]: ...
    @overload
    def scatter_with_async(
        self,
        split: Split[B, S],
        gather: Join[R, Out],
        method: MethodOn[W, S, P, R],
        batch: Batch[B],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> GroupFuture[Out]: ...
    def scatter_with_async(self, split: Any, gather: Any, method: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """`split(batch, n)` cuts the batch into n shares, `gather` makes one reply of n."""
        num_shards = self._mesh.data
        shares = batch.shares(num_shards, split) if isinstance(batch, GroupFuture) else split(batch, num_shards)
        own = self._as_list(shares, "the split must return a list of shares")
        if len(own) != num_shards:
            raise CallError(f"group {self.name!r}: the split made {len(own)} shares where {num_shards} were asked for")
        return self._start(self._call(method, args, kwargs, own=own), gather)

    @overload
    def scatter_with(
        self,
        split: Split[B, S],
        gather: Join[R, Out],
        method: CoroOn[W, S, P, R],
        batch: Batch[B],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Out: ...
    @overload
    def scatter_with(
        self,
        split: Split[B, S],
        gather: Join[R, Out],
        method: MethodOn[W, S, P, R],
        batch: Batch[B],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Out: ...
    def scatter_with(self, split: Any, gather: Any, method: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self.scatter_with_async(split, gather, method, batch, *args, **kwargs).result()

    def stream(
        self, rank: int, method: Callable[Concatenate[W, P], AsyncIterator[R]], *args: P.args, **kwargs: P.kwargs
    ) -> AsyncGenerator[R, None]:
        """Return the items of a method that is an async generator, as they come; the deadline counts for each item.

        The call is made when the first item is asked for. Closing the iterator early cancels the worker's generator,
        and returns when that has ended.
        """
        return self._stream(self._call(method, args, kwargs, streams=True), self._checked(rank))

    def with_timeout(self, timeout_s: float) -> Self:
        view = copy.copy(self)
        view._timeout_s = positive_seconds(timeout_s, "timeout_s", self.name)
        return view

    def mesh(self, name: str) -> Self:
        """Return the group in shards of the mesh of that name: `map` takes an argument per shard, `scatter` splits the
        batch over them, and all calls keep one reply per shard."""
        view = copy.copy(self)
        view._mesh = find_mesh(self._meshes, name, self.name)
        return view

    def role(self, name: str, cls: type[V]) -> WorkerGroup[V]:
        """Return the role `name` of a group of `FusedWorker`s as a group of its own."""
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

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    @abstractmethod
    def stacks(self) -> dict[int, str]:
        """Return the Python stack of each rank, also while it is busy with a call."""

    @abstractmethod
    def restart(self) -> None:
        """End the workers and start them anew in the same places. What they held in memory is lost."""

    @abstractmethod
    async def restart_async(self) -> None:
        """Do what `restart` does without blocking the event loop. Being cancelled ends the workers."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers. Safe to call twice."""

    @abstractmethod
    def _send(self, call: Call, ranks: Sequence[int], answering: Container[int], deadline: float) -> Replies:
        """Start a call on some ranks; those that answer send a reply. Nothing is sent if anything cannot be."""

    @abstractmethod
    def _stream(self, call: Call, rank: int) -> AsyncGenerator[Any, None]:
        """Return the items of a generator on one rank."""

    def _start(self, call: Call, gather: Gather, only_on: Sequence[int] | None = None) -> GroupFuture[Any]:
        deadline = time.monotonic() + self._timeout_s
        ranks = only_on or range(self.world_size)
        answering = only_on or self._mesh.answering_ranks()
        replies = self._send(call, ranks, set(answering), deadline)
        return GroupFuture(replies, [ranks.index(rank) for rank in answering], gather)

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise CallError(f"group {self.name!r} has ranks 0 to {self.world_size - 1}, not {rank}")
        return rank

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
        streams: bool = False,
    ) -> Call:
        cls = self._worker_class
        num_positional = len(args) + (own is not None)
        try:
            name, is_awaited = _found_method(cls, method, num_positional, tuple(kwargs), streams)  # type: ignore[arg-type]  # can be hashed
        except TypeError as error:
            raise CallError(f"group {self.name!r}: {error}") from None
        return Call(f"{cls.__name__}.{name}", self._role, name, method, args, kwargs, own, is_awaited)


@functools.lru_cache(maxsize=4096)
def _found_method(
    cls: type[Worker], method: Callable[..., Any], num_positional: int, names: tuple[str, ...], streams: bool
) -> tuple[str, bool]:
    """Check that the class has the method and that it takes these arguments. Return its name, and whether it is a
    coroutine."""
    found = [name for base in cls.__mro__ for name, value in vars(base).items() if value is method]
    if not found:
        raise TypeError(f"{getattr(method, '__qualname__', repr(method))} is not a method of {cls.__name__}")
    name = found[0]
    if name.startswith("__"):
        raise TypeError(f"{cls.__name__}.{name} cannot be called on a group")
    actual = getattr(cls, name)
    if streams != inspect.isasyncgenfunction(actual) or inspect.isgeneratorfunction(actual):
        how = "is no async generator: call it with execute_rank" if streams else "is a generator: call it with stream"
        if inspect.isgeneratorfunction(actual):
            how = "is a generator: a worker's method returns its answer, or is an async generator"
        raise TypeError(f"{cls.__name__}.{name} {how}")
    try:
        inspect.signature(method).bind(None, *[None] * num_positional, **dict.fromkeys(names))
    except TypeError as error:
        raise TypeError(f"wrong arguments for {cls.__name__}.{name}: {error}") from None
    return name, inspect.iscoroutinefunction(actual)


def positive_seconds(value: float, name: str, group: str) -> float:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CallError(f"group {group!r}: {name} must be a positive number of seconds, not {value!r}")
    return value
