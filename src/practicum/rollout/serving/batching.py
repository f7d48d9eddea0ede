"""Requests that wait are computed together.

    submit ─▶ waiting ─ all that is there, by length ─▶ batches of so many tokens ─ one thread ─▶ answers

The event loop never computes: it answers others meanwhile. Whoever went away before their turn is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

P = TypeVar("P")
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job(Generic[P]):
    """One thing to compute."""

    payload: P
    num_tokens: int  # padding apart


@dataclass(slots=True)
class _Ticket(Generic[P, R]):
    job: Job[P]
    answer: asyncio.Future[R]


class BatchQueue(Generic[P, R]):
    """`compute` takes the payloads of a batch and returns an answer, or the error of that one job, for each.

    To be made and used in one event loop. `max_batch_tokens` counts rows times the longest row; a job that is larger
    by itself is computed alone.
    """

    def __init__(self, compute: Callable[[Sequence[P]], Sequence[R | Exception]], max_batch_tokens: int) -> None:
        self._compute = compute
        self._max_batch_tokens = max_batch_tokens
        self._waiting: list[_Ticket[P, R]] = []
        self._num_open = self._num_running = 0
        self._arrival = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="practicum-forward")
        self._loop = asyncio.get_running_loop()
        self._serving = self._loop.create_task(self._serve())

    async def submit(self, jobs: Sequence[Job[P]]) -> list[R]:
        """The answers in order. Cancelling the wait takes the jobs back whose turn has not come."""
        tickets = [_Ticket(job, self._loop.create_future()) for job in jobs]
        self._waiting.extend(tickets)
        self._arrival.set()
        self._num_open += len(tickets)
        try:
            return list(await asyncio.gather(*(ticket.answer for ticket in tickets)))
        finally:
            self._num_open -= len(tickets)
            for ticket in tickets:
                ticket.answer.cancel()

    @property
    def num_waiting(self) -> int:
        return self._num_open - self._num_running

    @property
    def num_running(self) -> int:
        return self._num_running

    async def run(self, function: Callable[[], T]) -> T:
        """Something else in the thread that computes, between two batches."""
        return await self._loop.run_in_executor(self._thread, function)

    async def close(self) -> None:
        """Finish the batch under way; who still waits gets a cancellation."""
        self._serving.cancel()
        with suppress(asyncio.CancelledError):
            await self._serving
        for ticket in self._waiting:
            ticket.answer.cancel()
        await asyncio.to_thread(self._thread.shutdown)

    async def _serve(self) -> None:
        while True:
            await self._arrival.wait()
            self._arrival.clear()
            taken, self._waiting = self._waiting, []
            try:
                for batch in plan_batches([ticket.job for ticket in taken], self._max_batch_tokens):
                    await self._answer([taken[index] for index in batch if not taken[index].answer.done()])
            finally:  # on closing; otherwise all are answered
                for ticket in taken:
                    ticket.answer.cancel()

    async def _answer(self, tickets: Sequence[_Ticket[P, R]]) -> None:
        if not tickets:
            return
        results: Sequence[R | Exception]
        self._num_running = len(tickets)
        try:
            results = await self.run(lambda: self._compute([ticket.job.payload for ticket in tickets]))
        except Exception as error:  # whatever a model may raise: those in the batch are told
            results = [error] * len(tickets)
        finally:
            self._num_running = 0
        for ticket, result in zip(tickets, results, strict=True):
            if ticket.answer.done():
                continue
            if isinstance(result, Exception):
                ticket.answer.set_exception(result)
            else:
                ticket.answer.set_result(result)


def plan_batches(jobs: Sequence[Job[P]], max_batch_tokens: int) -> list[list[int]]:
    """Indices of the jobs of each batch: alike in length, within the tokens where one job alone is, shortest first."""
    batches: list[list[int]] = []
    for index in sorted(range(len(jobs)), key=lambda index: jobs[index].num_tokens):
        if not batches or (len(batches[-1]) + 1) * jobs[index].num_tokens > max_batch_tokens:
            batches.append([])
        batches[-1].append(index)
    return batches
