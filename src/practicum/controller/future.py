"""Replies that may still be under way, and ways to hand them on before they are there."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import ray

from practicum.controller.batch import join_batches, split_batch
from practicum.errors import WorkerError

Out = TypeVar("Out", covariant=True)  # a future list of samples is a future sequence of them
Gather = Callable[[list[Any]], Any]


class Replies(ABC):
    """The replies to one call, which may still be under way, and two ways to wait for them: blocking and awaited."""

    def __init__(self, handles: Sequence[Any], deadline: float, upstream: Sequence[GroupFuture[Any]] = ()) -> None:
        """`deadline` is a time of the monotonic clock; `upstream` are futures among the arguments."""
        self.handles = handles
        """One per rank that was called; Ray's references if it is a Ray group's."""
        self.deadline = deadline
        self._upstream = [future.replies for future in upstream]
        self._received: list[Any] | None = None

    @abstractmethod
    def _wait(self, deadline: float) -> list[Any]:
        """Wait for all replies. Raises the first failure to arrive, or `DeadlineError`."""

    @abstractmethod
    async def _arrive(self, deadline: float) -> list[Any]:
        """The same, awaited. Being cancelled cancels the coroutines that were called."""

    def wait(self, deadline: float | None = None) -> list[Any]:
        if self._received is None:
            try:
                self._received = self._wait(self.deadline if deadline is None else deadline)
            except WorkerError:
                for replies in self._upstream:
                    replies.wait(time.monotonic())
                raise
        return self._received

    async def arrive(self, deadline: float | None = None) -> list[Any]:
        if self._received is None:
            try:
                self._received = await self._arrive(self.deadline if deadline is None else deadline)
            except WorkerError:
                for replies in self._upstream:
                    await replies.arrive(time.monotonic())
                raise
        return self._received


class GroupFuture(Generic[Out]):
    """What an `_async` call returns: awaitable, or to be waited for by `result`. The deadline counts from the call.

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

    def result(self) -> Out:
        """Wait for all replies. Raises the first failure, or `DeadlineError`; if it is the failure of a call that an
        argument comes from, that one's."""
        return self._made_of(self.replies.wait())

    def __await__(self) -> Generator[Any, None, Out]:
        """Wait for all replies as `result` does, without blocking the event loop."""
        replies = yield from self.replies.arrive().__await__()
        return self._made_of(replies)

    def _made_of(self, replies: list[Any]) -> Out:
        return cast(Out, self.gather([replies[index] for index in self._kept]))

    def __reduce__(self) -> Any:
        raise TypeError("a future can be an argument of a call, but not be inside one")

    def forward(self) -> Out:
        """The future itself, typed as its result, to stand for it among the arguments of another call."""
        return cast(Out, self)

    def shares(self, parts: int, split: Callable[[Any, int], Sequence[Any]]) -> list[GroupFuture[Any]]:
        """Futures for the shares of a batch that is not there yet.

        A batch that is to be cut as it was joined, from as many replies, is handed on reply by reply; any other is put
        together and cut where it arrives.
        """
        if (self.gather, split) == (join_batches, split_batch) and len(self._kept) == parts:
            return self.each()
        return [
            GroupFuture(self.replies, self._kept, GatherAndCut(self.gather, split, part, parts))
            for part in range(parts)
        ]

    def each(self) -> list[GroupFuture[Any]]:
        """A future for each reply."""
        return [GroupFuture(self.replies, [index], only) for index in self._kept]


@dataclass(frozen=True, slots=True)
class GatherAndCut:
    gather: Gather
    split: Callable[[Any, int], Sequence[Any]]
    part: int
    parts: int

    def __call__(self, replies: list[Any]) -> Any:
        return self.split(self.gather(replies), self.parts)[self.part]


def wait_any(futures: Sequence[GroupFuture[Any]], timeout_s: float) -> list[GroupFuture[Any]]:
    """Those whose replies have all come, or failed, or are late; waits up to `timeout_s` for the first. What has become
    of them, `result` tells without more ado."""
    deadline = min([time.monotonic() + timeout_s, *(future.replies.deadline for future in futures)])
    refs = [handle for future in futures for handle in future.handles if isinstance(handle, ray.ObjectRef)]
    known = list(dict.fromkeys(refs))
    num_awaited = 1
    while True:
        missing: list[Any] = []
        if known:
            ray.wait(known, num_returns=num_awaited, timeout=max(0.0, deadline - time.monotonic()), fetch_local=False)
            came, late = ray.wait(known, num_returns=len(known), timeout=0, fetch_local=False)
            missing = late
            num_awaited = min(len(known), len(came) + 1)
        now = time.monotonic()
        ready = [f for f in futures if now >= f.replies.deadline or not any(one in missing for one in f.handles)]
        if ready or now >= deadline:
            return ready


def only(replies: list[Any]) -> Any:
    (reply,) = replies
    return reply
