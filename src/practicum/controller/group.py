"""One remote control for a group of workers.

A call names the method by reference, so that the type checker sees method and arguments:

    group.execute_all(Counter.add, [1, 2, 3])      every rank, the same arguments    -> one reply per rank
    group.execute_rank_zero(Counter.add, [1])      rank 0 only                       -> its reply
    group.map(Counter.add, [[1], [2]])             one argument per rank             -> one reply per rank
    group.scatter(Counter.square, [1, 2, 3])       split along the batch             -> replies joined in order

Each has an `_async` form that returns a `GroupFuture` at once. `group.with_timeout(5)` is the same group with another
deadline; `group.role("actor", ActorWorker)` is the same processes seen as one role of a fused worker.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast

from practicum.controller.worker import Call, FusedWorker, RayClassWithInitArgs, Worker

W = TypeVar("W", bound=Worker)
V = TypeVar("V", bound=Worker)
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Out = TypeVar("Out")


class GroupFuture(Generic[Out]):
    """Replies that may still be under way. The deadline counts from the call, not from `result`."""

    def __init__(self, collect: Callable[[], Out]) -> None:
        self._collect = collect

    def result(self) -> Out:
        return self._collect()


class WorkerGroup(ABC, Generic[W]):
    """What Ray's groups and the in-process twin have in common."""

    def __init__(self, name: str, packed: RayClassWithInitArgs[W], world_size: int, timeout_s: float) -> None:
        self.name = name
        self.world_size = world_size
        self._packed = packed
        self._worker_class: type[Worker] = packed.cls
        self._role: str | None = None
        self._timeout_s = timeout_s

    def execute_all_async(
        self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> GroupFuture[list[R]]:
        call = self._call(method, args, kwargs)
        return self._start([(rank, call) for rank in range(self.world_size)])

    def execute_all(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return self.execute_all_async(method, *args, **kwargs).result()

    def execute_rank_zero_async(
        self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> GroupFuture[R]:
        replies: GroupFuture[list[R]] = self._start([(0, self._call(method, args, kwargs))])
        return GroupFuture(lambda: replies.result()[0])

    def execute_rank_zero(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        return self.execute_rank_zero_async(method, *args, **kwargs).result()

    def map_async(
        self, method: Callable[Concatenate[W, T, P], R], per_rank: Sequence[T], *args: P.args, **kwargs: P.kwargs
    ) -> GroupFuture[list[R]]:
        if len(per_rank) != self.world_size:
            raise ValueError(f"group {self.name!r} has {self.world_size} ranks, but {len(per_rank)} arguments came")
        return self._start([(r, self._call(method, (arg, *args), kwargs)) for r, arg in enumerate(per_rank)])

    def map(
        self, method: Callable[Concatenate[W, T, P], R], per_rank: Sequence[T], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        return self.map_async(method, per_rank, *args, **kwargs).result()

    def scatter_async(
        self,
        method: Callable[Concatenate[W, Sequence[T], P], Sequence[R]],
        batch: Sequence[T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> GroupFuture[list[R]]:
        replies = self.map_async(method, split_evenly(batch, self.world_size), *args, **kwargs)
        return GroupFuture(lambda: [item for reply in replies.result() for item in reply])

    def scatter(
        self,
        method: Callable[Concatenate[W, Sequence[T], P], Sequence[R]],
        batch: Sequence[T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        return self.scatter_async(method, batch, *args, **kwargs).result()

    def with_timeout(self, timeout_s: float) -> Self:
        view = copy.copy(self)
        view._timeout_s = timeout_s
        return view

    def role(self, name: str, cls: type[V]) -> WorkerGroup[V]:
        """The role `name` of a group of `FusedWorker`s, as a group of its own."""
        roles = self._packed.kwargs if issubclass(self._packed.cls, FusedWorker) else {}
        if name not in roles or not issubclass(roles[name].cls, cls):
            known = ", ".join(f"{role} ({packed.cls.__name__})" for role, packed in roles.items()) or "none"
            raise ValueError(f"group {self.name!r} has no role {name!r} of class {cls.__name__}; its roles: {known}")
        view = cast(WorkerGroup[V], copy.copy(self))
        view._role = name
        view._worker_class = roles[name].cls
        return view

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers. Safe to call twice."""

    @abstractmethod
    def _submit(self, rank: int, call: Call) -> Any:
        """Start a call on one rank, return a handle for `_collect`."""

    @abstractmethod
    def _collect(self, handles: Sequence[Any], ranks: Sequence[int], what: str, deadline: float) -> list[Any]:
        """All replies in order; raises the first failure to arrive, or `DeadlineError` at the deadline."""

    def _call(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        name = getattr(method, "__name__", repr(method))
        if not callable(getattr(self._worker_class, name, None)):
            raise ValueError(f"group {self.name!r}: {self._worker_class.__name__} has no method {name!r}")
        return Call(self._role, name, args, kwargs)

    def _start(self, calls: Sequence[tuple[int, Call]]) -> GroupFuture[list[Any]]:
        deadline = time.monotonic() + self._timeout_s
        ranks = [rank for rank, _ in calls]
        handles = [self._submit(rank, call) for rank, call in calls]
        what = f"{self._worker_class.__name__}.{calls[0][1].method}"
        return GroupFuture(lambda: self._collect(handles, ranks, what, deadline))


def split_evenly(batch: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Contiguous shards whose sizes differ by at most one; some are empty when there are fewer items than parts."""
    size, extra = divmod(len(batch), parts)
    ends = [size * (i + 1) + min(i + 1, extra) for i in range(parts)]
    return [batch[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
