"""The processes that code of the user's runs in, tools and environments: any number of pools, ended together."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from practicum.errors import ProcessError, RolloutError
from practicum.processes import JobFailed, ProcessPool, Work
from practicum.processes.work import Limits

DESCRIBE_S = 60.0
"""For a process to tell what there is, its imports included."""
_MEMORY_BYTES = 2048 << 20
_NUM_COROUTINES = 128


def num_processes() -> int:
    """For functions that are not async: each has a process to itself."""
    return max(2, min(8, os.cpu_count() or 1))


class Pools:
    """Belongs to the event loop it is used in."""

    def __init__(self) -> None:
        self._open = AsyncExitStack()

    async def plain(self, work: Work, size: int) -> ProcessPool:
        """For one job at a time in each of `size` processes."""
        return await self._start(ProcessPool(work, size=size, limits=Limits(_MEMORY_BYTES, 1)))

    async def for_async(self, work: Work) -> ProcessPool:
        """For many jobs side by side in one process."""
        return await self._start(ProcessPool(work, size=1, limits=Limits(_MEMORY_BYTES, _NUM_COROUTINES)))

    async def _start(self, pool: ProcessPool) -> ProcessPool:
        self._open.push_async_callback(pool.close)
        await pool.start()
        return pool

    @asynccontextmanager
    async def ended_on_failure(self, complaint: str) -> AsyncIterator[None]:
        """Around the start. What a process could not do is a `RolloutError` that begins with the complaint."""
        try:
            yield
        except (ProcessError, JobFailed) as error:
            await self.close()
            raise RolloutError(f"{complaint}: {error}") from error
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await self._open.aclose()
