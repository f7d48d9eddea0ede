from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from practicum.errors import RolloutError
from practicum.processes import Work
from practicum.rollout.agent.pools import Pools


class Telling(Work):
    """Tells its process, or cannot begin."""

    def __init__(self, refuses: bool = False) -> None:
        self._refuses = refuses

    def prepare(self) -> None:
        if self._refuses:
            raise ValueError("no such file")

    @property
    def run(self) -> Callable[[Any], Any]:
        return lambda job: os.getpid()


class TellingLater(Telling):
    @property
    def run(self) -> Callable[[Any], Any]:
        return self._tell

    async def _tell(self, job: float) -> int:
        await asyncio.sleep(job)
        return os.getpid()


def test_plain_jobs_have_a_process_each_and_async_ones_share_one() -> None:
    async def ask() -> tuple[set[int], set[int]]:
        pools = Pools()
        try:
            plain = await pools.plain(Telling(), 2)
            both = await pools.for_async(TellingLater())
            seen = [
                {r.value for r in await asyncio.gather(*(p.run(0.05, 20) for _ in range(6)))} for p in (plain, both)
            ]
            return seen[0], seen[1]
        finally:
            await pools.close()

    plain, shared = asyncio.run(ask())
    assert len(shared) == 1 and not plain & shared
    assert not any(psutil.pid_exists(pid) for pid in plain | shared)


def test_when_one_cannot_begin_all_are_ended_and_the_complaint_says_why() -> None:
    async def ask() -> int:
        pools = Pools()
        with pytest.raises(RolloutError, match=r"^they cannot be used: .*no such file"):
            async with pools.ended_on_failure("they cannot be used"):
                told: int = (await (await pools.plain(Telling(), 1)).run(None, 20)).value
                await pools.plain(Telling(refuses=True), 1)
        return told

    assert not psutil.pid_exists(asyncio.run(ask()))
