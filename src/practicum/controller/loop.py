"""The driver's one event loop, in a thread of its own, for callers that are not on an event loop themselves."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import aclosing
from typing import Any, TypeVar

R = TypeVar("R")

log = logging.getLogger("practicum.controller")

_starting = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_begun: set[concurrent.futures.Future[None]] = set()


def driver_loop() -> asyncio.AbstractEventLoop:
    """Return the loop. It is started on first use and runs as long as the process."""
    global _loop
    with _starting:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, daemon=True, name="practicum-loop").start()
        return _loop


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the loop that runs the calling code, None if there is none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def run_sync(coroutine: Coroutine[Any, Any, R], loop: asyncio.AbstractEventLoop | None = None) -> R:
    """Run a coroutine on the driver's loop, or another that runs in another thread, and return its result.

    What interrupts the waiting thread, such as Ctrl-C, cancels the coroutine and is raised once that has ended.
    """
    loop = loop or driver_loop()
    if running_loop() is loop:
        coroutine.close()
        raise RuntimeError("a blocking call was made on the event loop that would have to answer it: await it instead")
    tasks: list[asyncio.Task[R]] = []

    async def run() -> R:
        tasks.append(asyncio.ensure_future(coroutine))
        return await tasks[0]

    future = asyncio.run_coroutine_threadsafe(run(), loop)
    try:
        return future.result()
    except BaseException:
        if not future.done():
            # Called after `run` has begun: the loop takes up what comes from other threads in order.
            loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
            concurrent.futures.wait([future])
        raise


def iterate(items: AsyncGenerator[R, None]) -> Iterator[R]:
    """Return the items of an async generator, which runs on the driver's loop.

    All of it runs in one task, so that it may hold time-outs and task groups from one item to the next. It computes an
    item when that is asked for. Closing the iterator, or an interrupt while it waits, closes the generator.
    """
    tasks: list[asyncio.Task[Any] | None] = []
    asked: asyncio.Queue[concurrent.futures.Future[R] | None] = asyncio.Queue()

    async def serve() -> None:
        tasks.append(asyncio.current_task())
        async with aclosing(items):
            while (reply := await asked.get()) is not None:
                try:
                    reply.set_result(await anext(items))
                except StopAsyncIteration:
                    reply.cancel()
                    return
                except asyncio.CancelledError:
                    reply.cancel()
                    raise
                except BaseException as error:
                    reply.set_exception(error)
                    return

    loop = driver_loop()
    serving = asyncio.run_coroutine_threadsafe(serve(), loop)
    try:
        while True:
            reply: concurrent.futures.Future[R] = concurrent.futures.Future()
            loop.call_soon_threadsafe(asked.put_nowait, reply)
            try:
                item = reply.result()
            except concurrent.futures.CancelledError:
                return
            yield item
    except GeneratorExit:
        loop.call_soon_threadsafe(asked.put_nowait, None)
        raise
    except BaseException:
        # The task, not `serving`: that would be done at once, before the generator has ended.
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks if task is not None])
        raise
    finally:
        concurrent.futures.wait([serving])


def for_future(error: BaseException) -> BaseException:
    """Return the error as futures take it. They refuse a StopIteration, and whoever waited for them would hang."""
    if not isinstance(error, StopIteration):
        return error
    told = RuntimeError(f"StopIteration: {error}")
    told.__cause__ = error
    return told


def run_or_begin(
    coroutine: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop | None, timeout_s: float
) -> bool:
    """Run a coroutine on `loop` or, if that does not run, on the caller's or the driver's loop.

    Return False if it has not ended within `timeout_s`. A caller on an event loop does not wait: for it, the coroutine
    is only begun.
    """
    here = running_loop()
    if loop is None or not loop.is_running():
        loop = here or driver_loop()
    running = asyncio.run_coroutine_threadsafe(coroutine, loop)
    if here is not None:
        _begun.add(running)  # a loop alone does not keep its tasks
        running.add_done_callback(_end_of_begun)
        return True
    if concurrent.futures.wait([running], timeout_s).not_done:
        running.cancel()
        return False
    running.result()
    return True


def _end_of_begun(running: concurrent.futures.Future[None]) -> None:
    _begun.discard(running)
    if not running.cancelled() and (error := running.exception()) is not None:
        log.error("a coroutine that nobody waits for has failed", exc_info=error)


def _forget_loop() -> None:
    global _loop, _starting
    _loop, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_loop)  # the thread that runs it stays with the parent
