from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.rollout.serving.batching import BatchQueue, Job, plan_batches

jobs = st.lists(st.builds(Job, st.just(None), st.integers(1, 60)), max_size=40)


@given(jobs, st.integers(1, 200))
def test_every_job_is_in_one_batch_within_the_tokens(jobs: list[Job[None]], budget: int) -> None:
    batches = plan_batches(jobs, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(jobs)))
    for batch in batches:
        members = [jobs[index] for index in batch]
        padded = max(job.num_tokens for job in members) * len(members)
        assert padded <= budget or len(members) == 1


def test_jobs_alike_in_length_come_together() -> None:
    lengths = [1, 50, 2, 49, 3, 48]
    batches = plan_batches([Job(None, length) for length in lengths], 150)
    assert [[lengths[index] for index in batch] for batch in batches] == [[1, 2, 3], [48, 49, 50]]


class Gate:
    """A computation that says when it has begun and ends when it is told."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)
        self.batches: list[list[int]] = []

    def __call__(self, payloads: Sequence[int]) -> list[int | Exception]:
        self.batches.append(list(payloads))
        self.begun.release()
        assert self.go_on.acquire(timeout=10)
        return [ValueError(f"{payload} is odd") if payload % 2 else payload * 10 for payload in payloads]

    async def has_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.acquire, timeout=10)


def test_what_waits_is_computed_together_and_what_went_away_not_at_all() -> None:
    async def run() -> None:
        gate = Gate()
        queue: BatchQueue[int, int] = BatchQueue(gate, 100)
        first = asyncio.create_task(queue.submit([Job(0, 1)]))
        await gate.has_begun()
        rest = [asyncio.create_task(queue.submit([Job(payload, 1)])) for payload in (2, 4, 6)]
        await asyncio.sleep(0)  # the loop is free while something is computed: they are in the queue now
        assert (queue.num_running, queue.num_waiting) == (1, 3)
        rest[1].cancel()
        gate.go_on.release(2)
        assert await asyncio.wait_for(first, 10) == [0]
        assert await asyncio.wait_for(asyncio.gather(rest[0], rest[2]), 10) == [[20], [60]]
        assert gate.batches == [[0], [2, 6]]
        assert (queue.num_running, queue.num_waiting) == (0, 0)
        await queue.close()

    asyncio.run(run())


def test_an_error_is_told_to_whose_it_is_and_work_goes_on() -> None:
    async def run() -> None:
        gate = Gate()
        gate.go_on.release(3)
        queue: BatchQueue[int, int] = BatchQueue(gate, 1)
        with pytest.raises(ValueError, match="3 is odd"):
            await queue.submit([Job(2, 1), Job(3, 1)])
        assert await queue.submit([Job(4, 1)]) == [40]
        await queue.close()

    def broken(payloads: Sequence[int]) -> list[int | Exception]:
        raise RuntimeError("the forward pass broke")

    async def run_broken() -> None:
        queue: BatchQueue[int, int] = BatchQueue(broken, 100)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="forward pass broke"):
                await queue.submit([Job(1, 1)])
        await queue.close()

    asyncio.run(run())
    asyncio.run(run_broken())


def test_closing_cancels_those_who_wait() -> None:
    async def run() -> None:
        gate = Gate()
        queue: BatchQueue[int, int] = BatchQueue(gate, 1)
        asked = [asyncio.create_task(queue.submit([Job(payload, 1)])) for payload in (2, 4)]
        await gate.has_begun()
        waiting = asyncio.create_task(queue.submit([Job(6, 1)]))
        await asyncio.sleep(0)
        gate.go_on.release(3)
        await asyncio.wait_for(queue.close(), 10)
        results = await asyncio.gather(*asked, waiting, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)

    asyncio.run(run())
