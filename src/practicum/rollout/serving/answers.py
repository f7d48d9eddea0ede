"""Requests to an engine from an event loop: the engine's thread tells, the loop waits.

with Answers(runner, requests, …) as answers:     all are submitted
    async for news in answers:                    as it comes, until every answer is done
                                                  however the block is left, the engine stops writing for it
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from practicum.errors import RolloutError
from practicum.rollout.runner import EngineRunner, Order
from practicum.rollout.serving.refusals import BadRequest, NotNow
from practicum.types import RolloutRequest, Sample


@dataclass(frozen=True, slots=True)
class Written:
    """Tokens of an answer."""

    request: int
    answer: int
    token_ids: list[int]
    log_probs: list[float]


@dataclass(frozen=True, slots=True)
class Done:
    """An answer is finished."""

    request: int
    answer: int
    sample: Sample


News = Written | Done


class Answers:
    """To be made in the event loop. `wants_tokens`: told of the tokens as they are written, and not only at the end."""

    def __init__(self, runner: EngineRunner, requests: Sequence[RolloutRequest], *, wants_tokens: bool) -> None:
        self._runner = runner
        self._loop = asyncio.get_running_loop()
        self._news: deque[News | Exception] = deque()
        self._lock = threading.Lock()
        self._is_called = False  # whether the loop looks for news by itself, or has been called to
        self._arrival = asyncio.Event()
        self._num_open = sum(request.params.num_answers for request in requests)
        self._orders = [
            Order(
                request,
                partial(self._sample, number),
                self._tell,
                partial(self._tokens, number) if wants_tokens else None,
            )
            for number, request in enumerate(requests)
        ]

    @property
    def is_done(self) -> bool:
        return not self._num_open

    def __enter__(self) -> Self:
        for order in self._orders:
            try:
                self._runner.engine.check(order.request)
            except RolloutError as error:
                raise BadRequest(str(error)) from error
        try:
            self._runner.submit(*self._orders)
        except RolloutError as error:
            raise NotNow(f"{error}.") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._num_open:
            self._cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> News:
        while not self._news:
            if not self._num_open:
                raise StopAsyncIteration
            with self._lock:
                self._is_called = bool(self._news)
            if not self._is_called:
                await self._arrival.wait()
                self._arrival.clear()
        news = self._news.popleft()
        if isinstance(news, Exception):
            raise news
        if isinstance(news, Done):
            self._num_open -= 1
            if news.sample.finish_reason == "abort":
                raise NotNow("the answer was broken off: the server is about to end.")
        return news

    def _cancel(self) -> None:
        for order in self._orders:
            self._runner.cancel(order)

    # In the engine's thread

    def _sample(self, request: int, answer: int, sample: Sample) -> None:
        self._tell(Done(request, answer, sample))

    def _tokens(self, request: int, answer: int, token_ids: list[int], log_probs: list[float]) -> None:
        self._tell(Written(request, answer, token_ids, log_probs))

    def _tell(self, news: News | Exception) -> None:
        with self._lock:
            self._news.append(news)
            is_called, self._is_called = self._is_called, True
        if not is_called:  # otherwise it is still busy with the news before, and will find this one
            self._loop.call_soon_threadsafe(self._arrival.set)
