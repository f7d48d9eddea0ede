"""Keeps an engine writing on a thread of its own, so that requests can join those under way.

submit ─▶ inbox of the engine ─▶ on_sample, as each answer is done
between(function): nothing new begins, what is under way is finished (or broken off, to be gone on with), then the
                   function has the engine to itself: new weights, sleep, waking up
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from practicum.errors import RolloutError
from practicum.rollout.base import BaseRollout
from practicum.rollout.inbox import Inbox, Ticket
from practicum.types import RolloutRequest, Sample

T = TypeVar("T")
_STOP_S = 30.0


@dataclass(slots=True, eq=False)
class Order:
    """A request under way, as whoever submitted it knows it."""

    request: RolloutRequest
    on_sample: Callable[[int, Sample], None]
    """In the engine's thread, once for each answer."""
    on_failure: Callable[[Exception], None]
    """In the engine's thread, if the engine fails: answers that have not been told are lost."""
    on_tokens: Callable[[int, list[int], list[float]], None] | None = None
    is_cancelled: bool = False
    tickets: set[Ticket] = field(default_factory=set)


class EngineRunner:
    """`is_partial`: an answer may be broken off for new weights and gone on with under them."""

    def __init__(self, engine: BaseRollout, *, is_partial: bool = False) -> None:
        self.engine = engine
        self._is_partial = is_partial
        self._news = threading.Condition()
        self._inbox: Inbox | None = None  # while the engine writes
        self._waiting: list[tuple[Order, Ticket]] = []
        self._orders: dict[Ticket, Order] = {}  # with open answers in the engine
        self._interludes: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._is_breaking_off = False
        self._num_broken_off = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="practicum-engine", daemon=True)
        self._thread.start()

    def submit(self, *orders: Order) -> None:
        """Raises `RolloutError` where the engine cannot answer one of them: then none is begun.

        The engine gets orders that are submitted together at once, so that what it puts in one batch is no matter of
        chance.
        """
        for order in orders:
            self.engine.check(order.request)
        with self._news:
            if self._is_closed:
                raise RolloutError("the engine has been closed")
            self._put([(order, self._ticket(order, order.request, 0)) for order in orders])

    @property
    def num_waiting(self) -> int:
        """Requests the engine has not taken up yet."""
        with self._news:
            return len(self._waiting) + (0 if self._inbox is None else self._inbox.num_waiting)

    @property
    def num_running(self) -> int:
        """Requests that are being answered."""
        with self._news:
            return len(self._orders) - (0 if self._inbox is None else self._inbox.num_waiting)

    def cancel(self, order: Order) -> None:
        """What there is of its answers is told soon, with finish reason `abort`."""
        with self._news:
            order.is_cancelled = True
            for ticket in order.tickets:
                if self._inbox is not None:
                    self._inbox.cancel(ticket)
                else:
                    ticket.is_cancelled = True

    def abort(self) -> None:
        """Cancel everything."""
        with self._news:
            for order in {id(o): o for o in (*self._orders.values(), *(o for o, _ in self._waiting))}.values():
                self.cancel(order)

    def between(self, function: Callable[[], T], timeout_s: float, *, break_off: bool | None = None) -> T:
        """Run a function in the engine's thread while nothing is written.

        `break_off` says whether answers under way are broken off and gone on with after it; None: as the runner is
        set up. The order of several such calls is kept.
        """
        result: Future[T] = Future()
        with self._news:
            if self._is_closed:
                raise RolloutError("the engine has been closed")
            self._interludes.append((function, result))
            if self._inbox is not None:
                self._take_back(self._inbox)
                if self._is_partial if break_off is None else break_off:
                    self._is_breaking_off = True
                    self._inbox.abort()
            self._news.notify_all()
        try:
            return result.result(timeout_s)
        except TimeoutError:
            if result.done():
                raise
            result.cancel()
            raise TimeoutError(f"the engine was not free within {timeout_s:g} s") from None

    def close(self) -> None:
        """Break everything off; answers that were not told are failures."""
        with self._news:
            self._is_closed = True
            if self._inbox is not None:
                self._inbox.abort()
            self._news.notify_all()
        self._thread.join(_STOP_S)

    # In the engine's thread

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._waiting or self._interludes or self._is_closed)
                if self._is_closed:
                    break
                interludes, self._interludes = self._interludes, []
            for function, result in interludes:
                _resolve(function, result)
            with self._news:
                if self._is_closed or self._interludes or not self._waiting:  # it may be asleep: then nothing is begun
                    continue
                self._inbox, self._is_breaking_off, self._num_broken_off = Inbox(), False, 0
                waiting, self._waiting = self._waiting, []
                self._put(waiting)
            try:
                self.engine.write(self._inbox)
                error: Exception | None = None
            except Exception as failure:  # whatever a model may raise: those who wait are told, the engine lives on
                error = failure
            self._written(error)
        closed = RolloutError("the engine has been closed")
        for _, result in self._interludes:
            if result.set_running_or_notify_cancel():
                result.set_exception(closed)
        self._written(closed)
        waiting, self._waiting = self._waiting, []
        self._fail({id(order): order for order, _ in waiting}, closed)

    def _written(self, error: Exception | None) -> None:
        with self._news:
            if self._inbox is not None and not self._is_closed:
                self._take_back(self._inbox)  # what was never begun has not failed
            left = {id(order): order for order in self._orders.values()}
            self._orders.clear()
            self._inbox = None
            # An answer that was broken off may wait to be gone on with: whoever is told of a failure hears no more.
            self._waiting = [(order, ticket) for order, ticket in self._waiting if id(order) not in left]
        if left:
            self._fail(left, error or RolloutError("the engine ended without an answer"))

    def _fail(self, orders: dict[int, Order], error: Exception) -> None:
        for order in orders.values():
            order.tickets.clear()
            order.on_failure(error)

    def _put(self, waiting: list[tuple[Order, Ticket]]) -> None:
        """Into the engine's inbox, or to those that wait until there is one."""
        for order, ticket in waiting:
            order.tickets.add(ticket)
            ticket.is_cancelled = order.is_cancelled
        # The engine may be done with a ticket before `put` returns, but has to wait for us to say so.
        if self._inbox is not None and self._inbox.put(*(ticket for _, ticket in waiting)):
            self._orders.update((ticket, order) for order, ticket in waiting)
        else:
            self._waiting += waiting
            self._news.notify_all()

    def _take_back(self, inbox: Inbox) -> None:
        """What the engine has not begun with waits for the next inbox, in front of what came later."""
        recalled = inbox.recall()
        self._waiting[:0] = [(self._orders.pop(ticket), ticket) for ticket in recalled]

    def _ticket(self, order: Order, request: RolloutRequest, first: int) -> Ticket:
        """`first` is the number of its first answer among those of the order."""

        def told(answer: int, sample: Sample) -> None:
            with self._news:
                if not ticket.num_open:
                    self._orders.pop(ticket, None)
                    order.tickets.discard(ticket)
                if sample.finish_reason == "abort" and self._is_breaking_off and not order.is_cancelled:
                    again = request.going_on(answer, sample)
                    follower = self._ticket(order, again, first + answer)
                    order.tickets.add(follower)
                    self._waiting.insert(self._num_broken_off, (order, follower))  # before what was not begun
                    self._num_broken_off += 1
                    return
            order.on_sample(first + answer, sample)

        def told_tokens(answer: int, tokens: list[int], log_probs: list[float]) -> None:
            assert order.on_tokens is not None
            order.on_tokens(first + answer, tokens, log_probs)

        ticket = Ticket(request, told, told_tokens if order.on_tokens is not None else None)
        return ticket


def _resolve(function: Callable[[], Any], result: Future[Any]) -> None:
    if not result.set_running_or_notify_cancel():
        return
    try:
        result.set_result(function())
    except BaseException as error:
        result.set_exception(error)
