"""An engine for those who live in an event loop: a future for each answer, told from the engine's thread."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from practicum.rollout.runner import Order
from practicum.types import RolloutRequest, Sample

OnTokens = Callable[[int, list[int], list[float]], None]


class Runner(Protocol):
    """As `EngineRunner` is."""

    def submit(self, *orders: Order) -> None: ...

    def cancel(self, order: Order) -> None: ...


@dataclass(frozen=True, slots=True)
class Writing:
    """A request with the engine."""

    answers: list[asyncio.Future[Sample]]
    """Fail with what the engine failed with. When nobody waits for any of them, the request is cancelled."""
    _cancel: Callable[[], None]

    def break_off(self) -> None:
        """The answers come soon, with what there is of them and finish reason `abort`."""
        self._cancel()


class AsyncEngine:
    """Use it in one event loop only."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def begin(self, request: RolloutRequest, on_tokens: OnTokens | None = None) -> Writing:
        """Raises `RolloutError` where the engine cannot answer the request. `on_tokens` is told in its thread."""
        return self.begin_all([(request, on_tokens)])[0]

    def begin_all(self, asked: Sequence[tuple[RolloutRequest, OnTokens | None]]) -> list[Writing]:
        """All at once or, where one cannot be answered, none."""
        begun = [self._order(request, on_tokens) for request, on_tokens in asked]
        self._runner.submit(*(order for order, _ in begun))
        return [Writing(futures, functools.partial(self._runner.cancel, order)) for order, futures in begun]

    def _order(self, request: RolloutRequest, on_tokens: OnTokens | None) -> tuple[Order, list[asyncio.Future[Sample]]]:
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Sample]] = [loop.create_future() for _ in range(request.params.num_answers)]

        def in_loop(function: Callable[..., None], *args: Any) -> None:
            with suppress(RuntimeError):  # the loop has been closed: nobody waits any more
                loop.call_soon_threadsafe(function, *args)

        def fail(error: Exception) -> None:
            for future in futures:
                if not future.done():
                    future.set_exception(error)

        order = Order(
            request,
            on_sample=lambda answer, sample: in_loop(_resolve, futures[answer], sample),
            on_failure=lambda error: in_loop(fail, error),
            on_tokens=on_tokens,
        )

        def given_up(future: asyncio.Future[Sample]) -> None:
            if future.cancelled() and all(one.done() for one in futures):
                self._runner.cancel(order)

        for future in futures:
            future.add_done_callback(given_up)
        return order, futures

    async def write(self, request: RolloutRequest) -> list[Sample]:
        """All answers. Cancelling it cancels the request."""
        return list(await asyncio.gather(*self.begin(request).answers))


def _resolve(future: asyncio.Future[Sample], sample: Sample) -> None:
    if not future.done():
        future.set_result(sample)
