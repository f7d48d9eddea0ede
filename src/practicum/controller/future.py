"""Replies that may still be under way, and ways to hand them on before they are there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import ray

from practicum.controller.batch import join_batches, split_batch
from practicum.errors import WorkerError

Out = TypeVar("Out", covariant=True)  # a future list of samples is a future sequence of them
Gather = Callable[[list[Any]], Any]


class GroupFuture(Generic[Out]):
    """What an `_async` call returns. The deadline counts from the call, not from `result`.

    It can be an argument of a call to any group: the replies then go from worker to worker. As the batch of `scatter`
    or the list of `map` it is passed as it is; elsewhere `future.forward()` keeps the type checker content.
    """

    def __init__(
        self,
        handles: Sequence[Any],
        collect: Callable[[float], list[Any]],
        deadline: float,
        gather: Gather,
        upstream: Sequence[GroupFuture[Any]] = (),
    ) -> None:
        """`collect` waits for the replies until a time of the monotonic clock; `upstream` are futures among the
        arguments."""
        self.handles = handles
        """One per reply; Ray's references if it is a Ray group's."""
        self.gather = gather
        self._collect = collect
        self._deadline = deadline
        self._upstream = upstream
        self._received: list[Any] | None = None

    def result(self) -> Out:
        """Wait for all replies. Raises the first failure, or `DeadlineError`; if it is the failure of a call that an
        argument comes from, that one's."""
        return cast(Out, self.gather(self._replies(self._deadline)))

    def _replies(self, deadline: float) -> list[Any]:
        if self._received is None:
            try:
                self._received = self._collect(deadline)
            except WorkerError:
                for future in self._upstream:
                    future._replies(time.monotonic())
                raise
        return self._received

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
        if (self.gather, split) == (join_batches, split_batch) and len(self.handles) == parts:
            return self.each()
        return [
            GroupFuture(self.handles, self._replies, self._deadline, GatherAndCut(self.gather, split, part, parts))
            for part in range(parts)
        ]

    def each(self) -> list[GroupFuture[Any]]:
        """A future for each reply."""
        return [
            GroupFuture([handle], lambda deadline, i=index: [self._replies(deadline)[i]], self._deadline, only)  # type: ignore[misc]
            for index, handle in enumerate(self.handles)
        ]


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
    deadline = min([time.monotonic() + timeout_s, *(future._deadline for future in futures)])
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
        ready = [f for f in futures if now >= f._deadline or not any(handle in missing for handle in f.handles)]
        if ready or now >= deadline:
            return ready


def only(replies: list[Any]) -> Any:
    (reply,) = replies
    return reply
